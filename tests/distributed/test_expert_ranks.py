"""Real gloo processes: experts divided over ranks compute what one rank computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.models.tiny import make_tiny
from spmd_rl.world.trainer_mesh import TrainerDims
from tests.distributed.experts_worker import (
    EXPERTS,
    LAYERS,
    LAYOUTS,
    LOADED,
    MAX_NORM,
    MORE,
    SAVED,
    TOP_K,
    make_learner,
    two_steps,
)
from tests.distributed.launch import torchrun
from tests.trainer.rows import VOCAB

RANKS, TOLERANCE = 4, 1e-5
SHAPE = {"vocab_size": VOCAB, "layers": LAYERS, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ff": 50}
SPARSE = {"architecture": "qwen2_moe", "experts": EXPERTS, "top_k": TOP_K, "expert_ff": 20, "mlp_only_layers": [0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A dense layer, then one with experts and a shared one."""
    return make_tiny(tmp_path_factory.mktemp("model"), seed=0, init_std=0.2, **SHAPE, **SPARSE)


@pytest.fixture(scope="module")
def single(folder) -> dict:
    """One rank, without FSDP and without processes."""
    torch.set_num_threads(1)
    return two_steps(make_learner(folder), TrainerDims(), 0)


@pytest.fixture(scope="module")
def out(folder, tmp_path_factory) -> Path:
    """What all ranks of one launch left."""
    out = tmp_path_factory.mktemp("experts")
    with torchrun("experts_worker.py", 1 + RANKS, out, folder) as started:
        assert started.wait(400) == [0], started.output()
    return out


@pytest.fixture(scope="module")
def ranks(out) -> list[dict]:
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= TOLERANCE * tensor.norm() + 1e-12, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_rank(single, ranks, layout):
    assert single["metrics"][0]["grad_norm"] > MAX_NORM  # so that clipping took part
    for results in ranks:
        found = results[layout]
        for metrics, one in zip(found["metrics"], single["metrics"], strict=True):
            for name in (name for name in one if not name.startswith(("time/", "tokens/packed"))):
                assert metrics[name] == pytest.approx(one[name], rel=1e-5, abs=1e-9), name
        assert_near(found["gradients"], single["gradients"])
        assert_near(found["weights"], single["weights"])
        assert_near(found["biases"], single["biases"])
        assert found["table"] == single["table"]
        assert list(found["weights"]) == [name for name, *_ in found["table"]]
        for scores, one in zip(found["scores"], single["scores"], strict=True):
            np.testing.assert_allclose(scores, one, rtol=0, atol=2e-5)


def test_a_critic_and_a_reference_are_divided_too(folder, ranks):
    algorithm = MORE[0][0]
    one = two_steps(make_learner(folder, algorithm=algorithm), TrainerDims(), 0, algorithm)
    assert {"critic/loss", "reference/k3_mean"} <= one["metrics"][1].keys()
    for results in ranks:
        found = results[MORE[0]]
        for metrics, expected in zip(found["metrics"], one["metrics"], strict=True):
            for name in (name for name in expected if not name.startswith(("time/", "tokens/packed"))):
                assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-9), name
        assert_near(found["weights"], one["weights"])


def test_bfloat16_stays_near_float32(single, ranks):
    for results in ranks:
        found = results[MORE[1]]
        for name in ("loss", "entropy", "grad_norm"):
            assert found["metrics"][0][name] == pytest.approx(single["metrics"][0][name], rel=0.05), name
        assert {tensor.dtype for tensor in found["weights"].values()} == {torch.bfloat16}
        assert {tensor.dtype for tensor in found["moments"].values()} == {torch.float32}
        for name, tensor in single["weights"].items():
            assert (found["weights"][name].float() - tensor).norm() <= 0.02 * tensor.norm(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_holds_its_share(single, ranks, layout):
    copies = LAYOUTS[layout].dp_replicate
    assert sum(results[layout]["held"] for results in ranks) == copies * single["held"]
    assert max(results[layout]["held"] for results in ranks) < 0.4 * copies * single["held"]


@pytest.mark.parametrize("layout", LOADED)
def test_a_checkpoint_loads_into_another_layout(ranks, layout):
    for results in ranks:
        saved, loaded = results[SAVED], results["loaded", layout]
        for part in ("weights", "moments", "biases"):
            assert saved[part].keys() == loaded[part].keys()
            assert all(torch.equal(saved[part][name], loaded[part][name]) for name in saved[part]), part
        assert all(bias.abs().sum() > 0 for bias in loaded["biases"].values())


def test_an_export_is_the_whole_model(ranks, out):
    exported = load_file(out / "export" / "model.safetensors")
    assert exported.keys() == ranks[0][SAVED]["weights"].keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in ranks[0][SAVED]["weights"].items())
