"""How many ranks share the experts, and how they talk, as a trainer rank decides before it builds anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spmd_rl.config.tree import Config, ModelConfig, ParallelConfig, TrainerConfig, TrainerModelConfig
from spmd_rl.models.experts_parallel import AllToAll
from spmd_rl.models.tiny import make_tiny
from spmd_rl.trainer.role import _expert_parallelism
from spmd_rl.world.trainer_mesh import TrainerDims

SHAPE = {"vocab_size": 61, "layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "ff": 24}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    make = {"dense": {"architecture": "qwen3"}, "six": {"architecture": "qwen3_moe", "experts": 6}}
    return {name: make_tiny(tmp_path_factory.mktemp(name), seed=0, **SHAPE, **about) for name, about in make.items()}


def world(folder: str, hosts: str, ep: int, impl: Any = "auto", **parallel: Any) -> Any:
    """Of trainer ranks alone; one letter per rank says its host."""
    trainer = TrainerConfig(model=TrainerModelConfig(impl=impl), parallel=ParallelConfig(ep=ep, **parallel))
    return SimpleNamespace(
        config=Config(model=ModelConfig(name=folder), trainer=trainer),
        mesh=SimpleNamespace(dims=TrainerDims(dp_shard=len(hosts), ep=ep), trainers=tuple(range(len(hosts)))),
        hosts=SimpleNamespace(first=[hosts.index(host) for host in hosts]),
    )


@pytest.mark.parametrize(
    ("model", "hosts", "ep", "expected"),
    [
        ("dense", "aaaa", 0, 1),
        ("dense", "aaaa", 1, 1),
        ("six", "aaaa", 2, 2),
        ("six", "aaaa", 0, 2),  # 4 does not divide 6
        ("six", "aaaaaa", 0, 6),
        ("six", "aaabbb", 0, 3),
        ("six", "aabbcc", 0, 2),
    ],
)
def test_the_number_of_ranks(folders, model, hosts, ep, expected):
    dims, exchange = _expert_parallelism(world(folders[model], hosts, ep))
    assert dims.ep == expected and exchange is AllToAll


@pytest.mark.parametrize(
    ("model", "impl", "ep", "says"),
    [
        ("dense", "auto", 2, "the model has none of our own making"),
        ("six", "hf", 2, "the model has none of our own making"),
        ("six", "auto", 4, "does not divide the model's 6 experts: set it to one of 1, 2, 3, 6"),
    ],
)
def test_what_does_not_fit_is_refused(folders, model, impl, ep, says):
    with pytest.raises(ValueError, match=says):
        _expert_parallelism(world(folders[model], "aaaa", ep, impl))


def test_deepep_is_asked_for_at_once(folders):
    with pytest.raises(ValueError, match="needs deep_ep"):
        _expert_parallelism(world(folders["six"], "aaaa", 2, ep_comm_backend="deepep"))
