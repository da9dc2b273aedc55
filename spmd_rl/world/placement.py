"""Which groups of ranks cross hosts although they need not, and which order of ranks would keep them together.

Ranks of one cp group, ep group or tensor-parallel replica talk in every layer; between hosts that is slow. It refuses
to know how hosts were found. Pure functions: what they say follows from the mesh and from where ranks are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm

from spmd_rl.config.tree import Config
from spmd_rl.world.mesh import Mesh, MeshError
from spmd_rl.world.trainer_mesh import TrainerDims

PROCESSES = "SPMD_RL_HOST_PROCESSES"  # of every host, by number: "5,4,4"; set where the machines have met


def processes_by_host(env: Mapping[str, str]) -> tuple[int, ...]:
    """Ranks of each host, as far as torchrun's environment tells it equally on all ranks; empty where it does not.

    Without a meeting the hosts are taken to be alike, but for one process more on the first.
    """
    if env.get(PROCESSES):
        return tuple(int(count) for count in env[PROCESSES].split(","))
    world, hosts = int(env.get("WORLD_SIZE", "0")), int(env.get("GROUP_WORLD_SIZE", "1"))
    each, more = divmod(world, hosts)
    return (each + more, *[each] * (hosts - 1)) if hosts > 1 and more <= 1 else ()


def wrong_hosts(config: Config, mesh: Mesh, host_of: Sequence[int]) -> str:
    """Why dimensions that follow from hosts are not those of the hosts there are; empty when they are."""
    if not (config.trainer.parallel.nodes_per_fsdp_group and mesh.trainers):
        return ""
    try:
        dims = TrainerDims.of(config.trainer.parallel, [host_of[rank] for rank in mesh.trainers])
    except MeshError as error:
        return str(error)
    if dims == mesh.dims:
        return ""
    return (
        f"trainer.parallel.nodes_per_fsdp_group = {config.trainer.parallel.nodes_per_fsdp_group} makes dp_replicate = "
        f"{dims.dp_replicate} on these hosts, and this rank could only guess {mesh.dims.dp_replicate} before they met: "
        f"set nodes_per_fsdp_group = 0 and dp_replicate = {dims.dp_replicate}"
    )


def crossings(mesh: Mesh, host_of: Sequence[int]) -> list[str]:
    """One line per kind of group that crosses hosts although one host would hold it, with the way out.

    host_of: by rank, anything that tells hosts apart.
    """
    lines, order = [], better_order(mesh, host_of)
    for key, role, apart in _apart(mesh, host_of):
        size = len(apart[0])
        named = "; ".join(", ".join(map(str, group)) for group in apart[:3]) + "; ..." * (len(apart) > 3)
        way = f"start a multiple of {size} {role} ranks on every host, or choose another {key}"
        if order:
            way = f"deployment.rank_map = {order} keeps them together"
        lines.append(f"{key} = {size} crosses hosts although it fits on one (ranks {named}), which is slow: {way}")
    return lines


def better_order(mesh: Mesh, host_of: Sequence[int]) -> list[int]:
    """A `deployment.rank_map` with which no group crosses that would fit on one host; empty where none was found.

    Whole groups take whole hosts' free ranks first: trainers before engines, and the other way round.
    """
    unit = lcm(mesh.dims.cp, mesh.dims.ep or 1)
    sizes = [unit] * (len(mesh.trainers) // unit), [len(replica) for replica in mesh.engines]
    for first in (0, 1):
        free: dict[int, list[int]] = {}
        for rank in range(int(0 not in mesh.trainers), mesh.world_size):
            free.setdefault(host_of[rank], []).append(rank)
        taken: list[list[int]] = [[], []]
        for kind in (first, 1 - first):
            for size in sizes[kind] if kind or not mesh.colocated else []:
                host = next((host for host, ranks in free.items() if len(ranks) >= size), None)
                if host is not None:
                    taken[kind] += free[host][:size]
                    free[host] = free[host][size:]
        order = [0] * (0 not in mesh.trainers) + taken[0] + taken[1]
        if len(order) == mesh.world_size and order[0] == 0 and not _apart(_reordered(mesh, order), host_of):
            return order
    return []


def _reordered(mesh: Mesh, order: Sequence[int]) -> Mesh:
    """The same roles, taken by ranks in this order."""
    now = [*([0] * (0 not in mesh.trainers)), *mesh.trainers, *(r for replica in mesh.engines for r in replica)]
    moved = dict(zip(dict.fromkeys(now), order, strict=True))
    trainers = tuple(moved[rank] for rank in mesh.trainers)
    replicas, frozen = (tuple(tuple(moved[r] for r in e) for e in es) for es in (mesh.replicas, mesh.frozen))
    return replace(mesh, trainers=trainers, replicas=replicas, frozen=frozen)


def _apart(mesh: Mesh, host_of: Sequence[int]) -> list[tuple[str, str, list[list[int]]]]:
    """(key, role, groups that cross hosts) of what talks in every layer and would fit on one host."""
    grid, t = mesh.dims, mesh.trainers
    kinds = [("trainer.parallel.cp", grid.cp_groups()), ("trainer.parallel.ep", grid.ep_groups())] if t else []
    close = [(key, "trainer", [[t[i] for i in group] for group in groups]) for key, groups in kinds]
    close.append(("inference.tp", "inference", [list(replica) for replica in mesh.engines]))
    hosts = list(host_of[int(0 not in t) :])
    room = max(hosts.count(host) for host in hosts)
    found = []
    for key, role, groups in close:
        apart = [group for group in groups if len({host_of[rank] for rank in group}) > 1]
        if apart and len(apart[0]) <= room:
            found.append((key, role, apart))
    return found
