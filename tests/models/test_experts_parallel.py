"""Which models can be divided over ranks, and what is said about those that can't; on one process."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from spmd_rl.models.build import expert_count
from spmd_rl.models.deepep import DeepEP
from spmd_rl.models.experts_parallel import AllToAll, divide_experts, ep_problem
from spmd_rl.models.moe import Experts
from spmd_rl.models.tiny import make_tiny
from tests.models.families import hugging_face, ours, row

SHAPE = {"vocab_size": 61, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "ff": 24}


@pytest.mark.parametrize(
    ("ep", "experts", "says"),
    [
        (1, 0, ""),
        (1, 5, ""),
        (4, 8, ""),
        (2, 0, "divides experts, and the model has none of our own making: leave ep at 1"),
        (4, 6, "ep = 4 does not divide the model's 6 experts: set it to one of 1, 2, 3, 6"),
        (8, 4, "ep = 8 does not divide the model's 4 experts: set it to one of 1, 2, 4"),
    ],
)
def test_what_fits(ep: int, experts: int, says: str) -> None:
    problem = ep_problem(ep, experts)
    assert says in problem and bool(says) == bool(problem)


def test_experts_are_counted_without_a_model(tmp_path) -> None:
    for family, impl, expected in (("qwen3", "auto", 0), ("qwen3_moe", "custom", 6), ("qwen3_moe", "hf", 0)):
        folder = make_tiny(tmp_path / f"{family}_{impl}", seed=0, architecture=family, experts=6, **SHAPE)
        (tmp_path / f"{family}_{impl}" / "model.safetensors").unlink()  # only the config is looked at
        assert expert_count(folder, impl) == expected


def test_dividing_by_one_changes_nothing(group) -> None:
    hf = hugging_face("qwen3_moe")
    model, tokens_T, documents = ours(hf), *row([9, 3])
    expected_TV = model.logits(tokens_T, documents)
    assert len(divide_experts(model, init_device_mesh("cpu", (1,)), AllToAll)) == 2
    assert isinstance(model.moe_layers[0].experts.down_proj, DTensor)
    torch.testing.assert_close(model.logits(tokens_T, documents), expected_TV)


def test_a_meta_model_is_divided_without_memory(group) -> None:
    with torch.device("meta"):
        experts = Experts(16, 12, 6, torch.float32)
    divide_experts(torch.nn.Sequential(experts), init_device_mesh("cpu", (1,)), AllToAll)
    assert experts.gate_up_proj.to_local().is_meta and experts.gate_up_proj.shape == (6, 24, 16)


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="deep_ep is installed")
def test_a_missing_deep_ep_is_said_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"needs deep_ep 2\.1, .*No module named .*ep_comm_backend to torch"):
        DeepEP(1024)
