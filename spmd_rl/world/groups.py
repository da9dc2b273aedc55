"""Process groups: all of them, made once, in the order the mesh lists them.

`init_world` joins torchrun's world; `make_groups` makes every group on every rank before vLLM is built, because vLLM
advances the group counter of its own ranks and a later `new_group` would hang. `as_default` lends a group
to code that believes the default group is its whole world (vLLM, `init_device_mesh`) and restores everything after.

Each group has one owning thread per process; nothing else may use it (`docs/design.md` says which).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from spmd_rl.world.mesh import Mesh

_WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def init_world(timeout_s: float) -> dist.ProcessGroup:
    """Join the world that torchrun's environment describes; the default group is gloo over all ranks."""
    timeout, attempt = timedelta(seconds=timeout_s), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        dist.init_process_group("gloo", timeout=timeout)
    else:
        # torchrun's agent may keep its store over a restart, and with it the addresses of the ranks that are gone.
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        prefixed = dist.PrefixStore(f"spmd_rl/attempt_{attempt}", store)
        dist.init_process_group("gloo", timeout=timeout, store=prefixed, rank=rank, world_size=size)
    return dist.group.WORLD


def make_groups(mesh: Mesh, rank: int, device: torch.device, timeout_s: float) -> dict[str, dist.ProcessGroup]:
    """Every group of the mesh, on every rank in one order; returns those this rank is a member of."""
    mine: dict[str, dist.ProcessGroup] = {}
    for spec in mesh.groups():
        backend = "nccl" if spec.carries == "device" and device.type == "cuda" else "gloo"
        group = dist.new_group(
            list(spec.ranks),
            backend=backend,
            timeout=timedelta(seconds=timeout_s),
            group_desc=spec.name,
            sort_ranks=False,  # `deployment.rank_map` may give roles to ranks in any order
        )
        if rank in spec.ranks:
            mine[spec.name] = group
    return mine


@contextlib.contextmanager
def as_default(group: dist.ProcessGroup, local_rank: int | None = None) -> Iterator[None]:
    """Make `group` the default group, and RANK, WORLD_SIZE, LOCAL_RANK its own, inside this context only.

    Also restores the torch RNG (building vLLM reseeds it) and `torch.set_num_threads` (vLLM disables it).
    """
    saved_group = c10d._world.default_pg
    saved_env = {name: os.environ.get(name) for name in _WORLD_VARIABLES}
    saved_rng, saved_set_threads = torch.get_rng_state(), torch.set_num_threads
    c10d._update_default_pg(group)
    rank = group.rank()
    values = (rank, group.size(), rank if local_rank is None else local_rank)
    os.environ.update(zip(_WORLD_VARIABLES, map(str, values), strict=True))
    try:
        yield
    finally:
        c10d._update_default_pg(saved_group)
        for name, value in saved_env.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        torch.set_rng_state(saved_rng)
        torch.set_num_threads = saved_set_threads
