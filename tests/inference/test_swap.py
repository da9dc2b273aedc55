"""A swap writes every parameter exactly once, or it is an error that names what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spmd_rl.orchestrator.versions import k3
from spmd_rl.world.buckets import WeightsError
from tests.inference.engines import load, make_engine, make_learner, probe, prompts, take_step, weights_of

QUERY, GATE = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def spare(folders, group, moe_engine):
    """An engine of its own: what a failed swap leaves behind is not defined."""
    return make_engine(folders[0], group)


@pytest.fixture
def tensors(stranger):
    return list(weights_of(stranger).items())


@pytest.mark.parametrize("name", [QUERY, GATE, EMBEDDING, HEAD, NORM])
def test_a_missing_tensor_is_named(spare, tensors, name):
    names = [n for n, _ in tensors]
    with pytest.raises(WeightsError, match=name):
        spare.swap(1, [(n, t) for n, t in tensors if n != name], names)


@pytest.mark.parametrize("name", [QUERY, EMBEDDING, NORM])
def test_a_repeated_tensor_is_named(spare, tensors, name):
    names = [n for n, _ in tensors]
    with pytest.raises(WeightsError, match=name):
        spare.swap(1, [*tensors, (name, dict(tensors)[name])], names)


def test_an_unknown_tensor_is_named(spare, tensors):
    names = [n for n, _ in tensors]
    with pytest.raises(WeightsError, match=r"model\.layers\.7\.nothing"):
        spare.swap(1, [*tensors, ("model.layers.7.nothing", torch.zeros(3))], names)


@pytest.mark.parametrize("name", [QUERY, GATE, EMBEDDING, HEAD, NORM])
def test_a_plan_that_does_not_cover_the_engines_model_is_an_error(spare, tensors, name):
    """The trainer's own list lacks a tensor that the engine has: nothing but the engine can know."""
    fewer = [(n, t) for n, t in tensors if n != name]
    layer = name.removesuffix(".weight").replace("q_proj", "qkv_proj").replace("gate_proj", "gate_up_proj")
    with pytest.raises(WeightsError, match=layer):
        spare.swap(1, fewer, [n for n, _ in fewer])


@pytest.mark.parametrize("name", [QUERY, GATE, EMBEDDING, HEAD, NORM])
@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_a_wrong_shape_is_an_error_that_names_it(spare, tensors, name, change):
    def wrong(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:-1].clone() if change == "shorter" else torch.cat([tensor, tensor[:1]])

    with pytest.raises(WeightsError, match=name):
        spare.swap(1, [(n, wrong(t) if n == name else t) for n, t in tensors], [n for n, _ in tensors])


def test_a_swap_that_succeeds_writes_everything(spare, stranger):
    """Also after all the failures above."""
    sequences = prompts(8, 24)
    load(spare, 2, stranger)
    assert spare.version == 2
    scored = np.concatenate(probe(spare, sequences).logprobs)
    assert k3(np.concatenate(stranger.score(sequences)), scored).mean() <= 1e-8


def test_a_tied_head_follows_the_embedding(tied_folder, group, moe_engine):
    """One tensor on the wire for two layers; on the CPU the head keeps a packed copy of its own."""
    engine, learner, sequences = make_engine(tied_folder, group), make_learner(tied_folder), prompts(8, 24)
    for version in range(1, 3):
        before = np.concatenate(learner.score(sequences))
        take_step(learner, 1e-2)
        load(engine, version, learner)
        scored = np.concatenate(probe(engine, sequences).logprobs)
        assert k3(np.concatenate(learner.score(sequences)), scored).mean() <= 1e-8
        assert k3(before, scored).mean() > 1e-4
    tensors = weights_of(learner)
    del tensors[EMBEDDING]
    with pytest.raises(WeightsError, match=r"model\.embed_tokens"):
        engine.swap(3, tensors.items(), list(tensors))
