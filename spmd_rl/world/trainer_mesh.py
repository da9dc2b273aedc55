"""The trainer ranks as a grid: dp_replicate × dp_shard × cp, and experts over ep ranks inside dp_shard × cp.

A trainer rank's number counts cp fastest, then dp_shard, then dp_replicate: context parallelism talks in every layer
and so gets neighbours, replicas exchange gradients alone. Like the whole mesh this is arithmetic, to be printed for a
cluster that does not exist. It refuses to know about torch and roles.

Invariants: every trainer rank has one place in the grid; ranks of one `data rank` (one cp group) get the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from spmd_rl.config.tree import ParallelConfig


class MeshError(ValueError):
    """The world does not fit the deployment."""


@dataclass(frozen=True)
class TrainerDims:
    """Sizes of the grid's dimensions."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1  # 0: chosen where the number of experts is known

    @classmethod
    def of(cls, parallel: ParallelConfig, host_of: Sequence[int]) -> TrainerDims:
        """The grid of so many trainer ranks, whose hosts are `host_of`, in order. MeshError says what does not fit."""
        ranks, cp, ep = len(host_of), parallel.cp, parallel.ep
        replicas = parallel.dp_replicate
        if parallel.nodes_per_fsdp_group:
            replicas = _replicas_of_hosts(parallel.nodes_per_fsdp_group, host_of)
        if ranks % (replicas * cp):
            more = -(-ranks // (replicas * cp)) * replicas * cp
            raise MeshError(
                f"{_ranks(ranks)} can't be divided into trainer.parallel.dp_replicate = {replicas} × "
                f"trainer.parallel.cp = {cp}: start a multiple of {replicas * cp} trainer ranks (such as {more}; "
                "deployment.train_ranks, or the processes of sft), or change these keys"
            )
        inside = ranks // replicas
        if ep and inside % ep:
            raise MeshError(
                f"trainer.parallel.ep = {ep} does not divide dp_shard × cp = {inside} ({_ranks(ranks)}, dp_replicate = "
                f"{replicas}): set ep to one of {', '.join(str(n) for n in range(1, inside + 1) if inside % n == 0)}, "
                "or 0 for the largest that fits"
            )
        return cls(replicas, inside // cp, cp, ep)

    @staticmethod
    def smallest(parallel: ParallelConfig) -> int:
        """The fewest trainer ranks that these keys can run on, and what any number of them is a multiple of."""
        return parallel.dp_replicate * lcm(parallel.cp, parallel.ep or 1)

    @property
    def ranks(self) -> int:
        """All trainer ranks."""
        return self.dp_replicate * self.dp_shard * self.cp

    @property
    def data_ranks(self) -> int:
        """How many ranks, or cp groups, have rows of their own."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, index: int) -> int:
        """Whose rows trainer rank `index` gets."""
        return index // self.cp

    def fsdp_groups(self) -> list[range]:
        """Trainer ranks that hold one copy of the model together."""
        return _cut(self.ranks, self.ranks // self.dp_replicate)

    def cp_groups(self) -> list[range]:
        """Trainer ranks that share rows."""
        return _cut(self.ranks, self.cp)

    def ep_groups(self) -> list[range]:
        """Trainer ranks that share the experts; single ranks where their number is not chosen yet."""
        return _cut(self.ranks, self.ep or 1)

    def describe(self) -> str:
        """`dp_shard 4`, and whatever else is not 1."""
        sizes = [("dp_replicate", self.dp_replicate), ("dp_shard", self.dp_shard), ("cp", self.cp)]
        grid = " × ".join(f"{name} {size}" for name, size in sizes if size > 1 or name == "dp_shard")
        return grid + {0: ", ep auto", 1: ""}.get(self.ep, f", ep {self.ep}")


def largest_ep(dims: TrainerDims, host_of: Sequence[int], experts: int) -> int:
    """What `ep = 0` stands for: the most ranks that share a host in every group, divide dp_shard × cp and the experts.

    host_of: of the trainer ranks, in order.
    """
    inside = dims.dp_shard * dims.cp
    sizes = [size for size in range(inside, 0, -1) if inside % size == 0 and experts % size == 0]
    return next(s for s in sizes if all(len({host_of[i] for i in group}) == 1 for group in _cut(dims.ranks, s)))


def _replicas_of_hosts(nodes: int, host_of: Sequence[int]) -> int:
    """dp_replicate, where every `nodes` hosts in a row hold one copy of the model."""
    hosts = list(dict.fromkeys(host_of))
    counts = [list(host_of).count(host) for host in hosts]
    key = f"trainer.parallel.nodes_per_fsdp_group = {nodes}"
    if len(hosts) % nodes:
        fitting = ", ".join(str(n) for n in range(1, len(hosts) + 1) if len(hosts) % n == 0)
        raise MeshError(
            f"{key} does not divide the {len(hosts)} host{'s' * (len(hosts) > 1)} with trainer ranks: set it to one of "
            f"{fitting}, or to 0 and dp_replicate itself"
        )
    replicas = len(hosts) // nodes
    groups = [sum(counts[i : i + nodes]) for i in range(0, len(hosts), nodes)]
    if len(set(groups)) > 1 or list(host_of) != sorted(host_of, key=hosts.index):
        raise MeshError(
            f"{key}: groups of hosts have {' and '.join(map(str, groups))} trainer ranks, and every copy of the model "
            "needs equally many, host after host: put the other roles on hosts of their own (deployment.rank_map), "
            "start other numbers of processes, or set it to 0 and dp_replicate itself"
        )
    return replicas


def _cut(count: int, size: int) -> list[range]:
    return [range(start, start + size) for start in range(0, count, size)]


def _ranks(count: int) -> str:
    return f"{count} trainer rank{'s' * (count > 1)}"
