"""FSDP2 over the trainer ranks.

What it refuses to know: which ranks these are (the mesh is handed in) and what the model computes; it needs only
`model.blocks`, the modules that are gathered one at a time.

Invariants: parameters and gradients are float32 whatever the compute dtype; gradients are **summed** over ranks, never
averaged, because the loss weights already hold the global denominator.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def parallelize(model: nn.Module, mesh: DeviceMesh | None, dtype: str) -> None:
    """Shards `model` in place over `mesh`: each of `model.blocks`, then the rest as one group.

    dtype "bfloat16" computes in bfloat16 over float32 master weights and reduces gradients in float32. One rank and
    "float32" leave the model as it is: FSDP would only copy. Raises ValueError when bfloat16 comes without a mesh.
    """
    if dtype == "float32" and (mesh is None or mesh.size() == 1):
        return
    if mesh is None:
        raise ValueError(f"{dtype} over float32 master weights is FSDP's mixed precision; pass a mesh, if of one rank")
    policy = _precision(dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        # gloo has no reduction that multiplies first, which is how FSDP would divide.
        module.set_force_sum_reduction_for_comms(mesh.device_type == "cpu")


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that FSDP manages; none for a model that was left as it is."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Frees what a forward without a backward left gathered, so that `model`'s parameters are its shards again."""
    for module in sharded_modules(model):
        module.reshard()


def _precision(dtype: str) -> MixedPrecisionPolicy:
    if dtype == "float32":
        return MixedPrecisionPolicy()
    # Inputs are not cast: the model's only float input is the temperature, and 0.7 in bfloat16 is 0.699.
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
