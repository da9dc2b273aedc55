"""FSDP2 over the trainer ranks, and over several copies of the model (HSDP).

A model is sharded over dp_shard × cp ranks, and held dp_replicate times. Experts are first divided over ep of these
ranks, and then sharded over the others. What it refuses to know: which ranks these are (the meshes are handed in) and
what the model computes; it needs only `model.blocks`, the modules that are gathered one at a time, and experts.

Invariants: parameters and gradients are float32 whatever the compute dtype; gradients are **summed** over ranks, never
averaged, because the loss weights already hold the global denominator.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from spmd_rl.models.experts_parallel import AllToAll, ExchangeMaker, divide_experts
from spmd_rl.world.groups import as_default
from spmd_rl.world.trainer_mesh import TrainerDims


@dataclass(frozen=True)
class TrainerMeshes:
    """Torch's view of the trainer ranks, as far as this rank takes part."""

    fsdp: DeviceMesh  # [dp_shard × cp], or [dp_replicate, dp_shard × cp]
    cp: DeviceMesh | None = None  # [cp], the ranks that share this one's rows; None where each has rows of its own
    experts: DeviceMesh | None = None  # [efsdp] or [dp_replicate, efsdp], the ranks that hold the same experts
    ep: DeviceMesh | None = None  # [ep], the ranks that hold one of each expert together; None where all hold all
    exchange: ExchangeMaker = AllToAll  # between the ranks of ep
    group: dist.ProcessGroup | None = None  # all trainer ranks: the default group of the time of building

    @classmethod
    def build(cls, dims: TrainerDims, device: str, exchange: ExchangeMaker = AllToAll) -> TrainerMeshes:
        """Of a default group that holds the trainer ranks in their order. Collective."""
        inside = dims.dp_shard * dims.cp
        if dims.dp_replicate > 1:
            fsdp = init_device_mesh(device, (dims.dp_replicate, inside), mesh_dim_names=("dp_replicate", "dp_shard_cp"))
        else:
            fsdp = init_device_mesh(device, (inside,), mesh_dim_names=("dp_shard_cp",))
        cp = experts = ep = None
        if dims.cp > 1:
            cp = init_device_mesh(device, (dims.data_ranks, dims.cp), mesh_dim_names=("data", "cp"))["cp"]
        if dims.ep > 1:
            # Whole experts are gathered over two dimensions, one after the other, which DTensor warns of every time.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
            grid, names = (dims.dp_replicate, inside // dims.ep, dims.ep), ("dp_replicate", "efsdp", "ep")
            skip = int(dims.dp_replicate == 1)
            mesh = init_device_mesh(device, grid[skip:], mesh_dim_names=names[skip:])
            experts, ep = mesh[names[skip:-1]], mesh["ep"]
        return cls(fsdp, cp, experts, ep, exchange, dist.group.WORLD)

    @property
    def copies(self) -> int:
        """How often the model is held."""
        return self.fsdp.size(0) if self.fsdp.ndim == 2 else 1


def parallelize(model: nn.Module, meshes: TrainerMeshes | None, dtype: str, keep_gathered: bool = False) -> None:
    """Shards `model` in place: experts, each of `model.blocks`, then the rest as one group.

    dtype "bfloat16" computes in bfloat16 over float32 master weights and reduces gradients in float32. One rank and
    "float32" leave the model as it is: FSDP would only copy. keep_gathered: what the forward gathered stays until the
    backward. Raises ValueError when bfloat16 comes without meshes.
    """
    if dtype == "float32" and (meshes is None or meshes.fsdp.size() == 1):
        return
    if meshes is None:
        raise ValueError(f"{dtype} over float32 master weights is FSDP's mixed precision; pass meshes, if of one rank")
    mesh, policy = meshes.fsdp, _precision(dtype)
    # FSDP takes meshes of several dimensions apart and together, and a mesh takes this rank's number from the default
    # group.
    with as_default(meshes.group) if meshes.group else nullcontext():
        if meshes.ep is not None:
            for experts in divide_experts(model, meshes.ep, meshes.exchange):
                fully_shard(experts, mesh=meshes.experts, mp_policy=policy, reshard_after_forward=not keep_gathered)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    _prefetch(model)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        # gloo has no reduction that multiplies first, which is how FSDP would divide.
        module.set_force_sum_reduction_for_comms(mesh.device_type == "cpu")


def _prefetch(model: nn.Module) -> None:
    """While a block computes, the next one is gathered, experts included: forward in order, backward in reverse.

    FSDP looks ahead by itself only as far as the host runs ahead of the device, and routing tokens to experts makes the
    host wait; experts, gathered apart, would never be early.
    """
    units = [[m for m in block.modules() if isinstance(m, FSDPModule)] for block in model.blocks]
    model.set_modules_to_forward_prefetch(units[0])
    for before, after in pairwise(units):
        before[0].set_modules_to_forward_prefetch(after)
        after[0].set_modules_to_backward_prefetch(before[::-1])


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that FSDP manages; none for a model that was left as it is."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def last_backward(model: nn.Module, last: bool) -> None:
    """Says whether the next backward is the last one of a step, behind which copies of the model add up gradients.

    Before that they are added up within a copy only. Nothing changes where there is one copy.
    """
    for module in sharded_modules(model):
        module.set_requires_all_reduce(last, recurse=False)


def reshard(model: nn.Module) -> None:
    """Frees what a forward without a backward left gathered, so that `model`'s parameters are its shards again."""
    for module in sharded_modules(model):
        module.reshard()


def _precision(dtype: str) -> MixedPrecisionPolicy:
    if dtype == "float32":
        return MixedPrecisionPolicy()
    # Inputs are not cast: the model's only float input is the temperature, and 0.7 in bfloat16 is 0.699.
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
