"""What FSDP is asked to do, on one rank and a toy model; equality over ranks is in tests/distributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from spmd_rl.trainer.parallel import TrainerMeshes, parallelize, reshard, sharded_modules


class Toy(nn.Module):
    """Two blocks, and a float input that a cast would change."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x_T4, temperatures_T):
        x_T4 = x_T4.to(self.scale.dtype)
        for block in self.blocks:
            x_T4 = block(x_T4)
        return x_T4, temperatures_T


@pytest.fixture
def mesh(group):
    return TrainerMeshes(init_device_mesh("cpu", (1,)))


def test_one_rank_in_float32_is_left_alone(mesh):
    for one in (None, mesh):
        model = Toy()
        before = dict(model.named_parameters())
        parallelize(model, one, "float32")
        assert sharded_modules(model) == []
        assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_bfloat16_computes_in_bfloat16_over_float32_masters(mesh):
    model = Toy()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parallelize(model, mesh, "bfloat16")
    assert len(sharded_modules(model)) == 3
    temperatures_T = torch.tensor([0.7])
    hidden, seen = model(torch.ones(1, 4), temperatures_T)
    assert hidden.dtype == torch.bfloat16
    assert torch.equal(seen, temperatures_T)  # 0.7 survives: float inputs are not cast
    (hidden.float().sum() * model.scale.sum()).backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and torch.equal(parameter.full_tensor(), before[name])
        assert parameter.grad.dtype == torch.float32


def test_reshard_undoes_a_forward_without_a_backward(mesh):
    model = Toy()
    parallelize(model, mesh, "bfloat16")
    with torch.no_grad():
        model(torch.ones(1, 4), torch.ones(1))
    assert not isinstance(model.scale, DTensor)  # what the root gathered stays gathered
    reshard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_the_next_block_is_gathered_while_one_computes(mesh, monkeypatch):
    """In both directions; nothing else would look ahead where the host waits for the device."""
    said: list[str] = []
    unshard, model = FSDPParamGroup.unshard, Toy()

    def listening(group: FSDPParamGroup, async_op: bool = False) -> None:
        if not group.is_unsharded and group._all_gather_result is None:
            said.append(f"gather {group._module_fqn}")
        unshard(group, async_op)

    monkeypatch.setattr(FSDPParamGroup, "unshard", listening)
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, number=number: said.append(f"forward {number}"))
        block.register_full_backward_hook(lambda *_, number=number: said.append(f"backward {number}"))
    parallelize(model, mesh, "bfloat16")
    hidden, _ = model(torch.ones(1, 4, requires_grad=True), torch.ones(1))
    before, after = said.index("forward 0"), said.index("forward 1")
    assert said.index("gather blocks.1") < before < after
    del said[:]
    hidden.float().sum().backward()
    assert said.index("gather blocks.0") < said.index("backward 1") < said.index("backward 0")


def test_bfloat16_needs_a_mesh():
    with pytest.raises(ValueError, match="pass meshes"):
        parallelize(Toy(), None, "bfloat16")
