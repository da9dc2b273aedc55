"""The always-on check: wrong weights in the engine always show in the probe.

The engine gets damaged weights by the same way as right ones; what the trainer says of the true weights must differ by
more than the limit. The probe set is the one a run uses: 8 sequences of 24 tokens.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spmd_rl.orchestrator.versions import K3_LIMIT, k3
from spmd_rl.world.buckets import WeightsError
from tests.inference.engines import LEARNING_RATE, Tensors, load, make_learner, probe, prompts, take_step, weights_of

LIMIT = K3_LIMIT["float32"]
SEQUENCES = prompts(8, 24, seed=3)


def disagreement(engine, learner, tensors: Tensors) -> float:
    """Mean k3 between an engine that holds `tensors` and the learner's true weights."""
    engine.swap(engine.version + 1, list(tensors.items()), list(tensors))
    scored = np.concatenate(probe(engine, SEQUENCES).logprobs)
    return float(k3(np.concatenate(learner.score(SEQUENCES)), scored).mean())


def caught(value: float) -> bool:
    return not value <= LIMIT  # NaN is above every limit, as in `Versions`


def flip_sign(tensors: Tensors, name: str) -> None:
    """One bit of the largest element."""
    flat = tensors[name].view(-1)
    flat.view(torch.int32)[flat.abs().argmax()] ^= -(2**31)


def flip_exponent(tensors: Tensors, name: str) -> None:
    """The highest bit of the exponent of one element: a number beyond all others."""
    tensors[name].view(-1).view(torch.int32)[1] ^= 2**30


def swap_layers(tensors: Tensors, name: str) -> None:
    other = name.replace("layers.0", "layers.1")
    tensors[name], tensors[other] = tensors[other], tensors[name]


def transpose(tensors: Tensors, name: str) -> None:
    assert tensors[name].shape[0] == tensors[name].shape[1]
    tensors[name] = tensors[name].T.contiguous()


ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
MUTATIONS = [
    *((flip, name) for flip in (flip_sign, flip_exponent) for name in (
        ATTENTION + "q_proj.weight", ATTENTION + "v_proj.weight", ATTENTION + "q_norm.weight", MLP + "up_proj.weight",
        MLP + "down_proj.weight", "model.norm.weight", "lm_head.weight",
    )),
    *((swap_layers, name) for name in (
        ATTENTION + "q_proj.weight", ATTENTION + "k_proj.weight", ATTENTION + "v_proj.weight",
        ATTENTION + "o_proj.weight", MLP + "gate_proj.weight", MLP + "up_proj.weight", MLP + "down_proj.weight",
    )),
    *((transpose, ATTENTION + name) for name in ("q_proj.weight", "o_proj.weight")),
]  # fmt: skip


def test_right_weights_agree(engine, learner):
    assert disagreement(engine, learner, weights_of(learner)) <= LIMIT


@pytest.mark.filterwarnings("ignore:overflow")  # some are off by so much
@pytest.mark.parametrize(("mutate", "name"), MUTATIONS)
def test_a_mutation_is_caught(engine, learner, mutate, name):
    tensors = weights_of(learner)
    mutate(tensors, name)
    assert caught(disagreement(engine, learner, tensors))


@pytest.mark.parametrize("lr", [LEARNING_RATE, 1e-5])
def test_an_older_version_is_caught(engine, folders, lr):
    """One optimizer step apart."""
    newer = make_learner(folders[0])
    older = weights_of(newer)
    take_step(newer, lr)
    assert caught(disagreement(engine, newer, older))
    assert disagreement(engine, newer, weights_of(newer)) <= LIMIT


# --- mixture of experts ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moe_learner(moe_folder):
    return make_learner(moe_folder)


def test_experts_hold_the_weights_of_every_swap(moe_engine, moe_learner):
    """The CPU's expert kernel packs weights when it is made; a reload that forgets this serves wrong experts."""
    scored = np.concatenate(probe(moe_engine, SEQUENCES).logprobs)
    assert k3(np.concatenate(moe_learner.score(SEQUENCES)), scored).mean() <= LIMIT  # as it was built
    for version in range(1, 4):
        older = scored
        take_step(moe_learner, 1e-2)
        load(moe_engine, version, moe_learner)
        scored = np.concatenate(probe(moe_engine, SEQUENCES).logprobs)
        assert k3(np.concatenate(moe_learner.score(SEQUENCES)), scored).mean() <= LIMIT
        assert k3(older, scored).mean() > 1e-4  # the step changed something


def name_of(expert: int, part: str) -> str:
    return f"model.layers.1.mlp.experts.{expert}.{part}.weight"


def expert_stays_behind(tensors: Tensors, older: Tensors, part: str) -> None:
    tensors[name_of(5, part)] = older[name_of(5, part)]


def experts_change_places(tensors: Tensors, older: Tensors, part: str) -> None:
    one, other = name_of(0, part), name_of(1, part)
    tensors[one], tensors[other] = tensors[other], tensors[one]


def expert_is_empty(tensors: Tensors, older: Tensors, part: str) -> None:
    tensors[name_of(5, part)].zero_()


@pytest.mark.parametrize("mutate", [expert_stays_behind, experts_change_places, expert_is_empty])
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_one_wrong_expert_is_caught(moe_engine, moe_learner, mutate, part):
    older = weights_of(moe_learner)
    take_step(moe_learner, 1e-2)
    tensors = weights_of(moe_learner)
    mutate(tensors, older, part)
    assert caught(disagreement(moe_engine, moe_learner, tensors))


def test_a_missing_expert_tensor_is_caught(moe_engine, moe_learner):
    """Left out on both sides of the plan: the engine itself must notice."""
    tensors = weights_of(moe_learner)
    del tensors[name_of(5, "down_proj")]
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.experts"):
        disagreement(moe_engine, moe_learner, tensors)
