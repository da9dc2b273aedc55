"""Which ranks share a disk: found out at start, because what needs a common folder must say so before it is needed.

Every host puts a token into the output folder, and every rank looks whose tokens it sees. The lowest of the ranks that
see the same folder is its keeper, who prepares, locks and seals things there. A file system that all hosts share makes
rank 0 everybody's keeper.

It refuses to know what is written into folders. Invariants: all ranks hold the same `Hosts`; nothing of the search
stays behind in the folder; problems follow from what all ranks have said, so all of them find the same.
"""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from spmd_rl.config.tree import Config
from spmd_rl.world.mesh import Mesh


class Store(Protocol):
    """Of the process group."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class Everyone:
    """Rounds in which every rank says something and hears what all have said.

    Args:
        deadline_s: of a round. A rank that never comes is the watchdog's business, which is sooner.
    """

    def __init__(self, store: Store, rank: int, world_size: int, deadline_s: float) -> None:
        self._store, self.rank, self.world_size, self._deadline_s = store, rank, world_size, deadline_s

    def say(self, about: str, mine: Any) -> list[Any]:
        """What all ranks say about it, by rank; JSON. `about` may be used once. Collective."""
        key, timeout = f"spmd_rl/{about}", timedelta(seconds=self._deadline_s)
        self._store.set(f"{key}/{self.rank}", json.dumps(mine))
        if self.rank == 0:
            keys = [f"{key}/{rank}" for rank in range(self.world_size)]
            self._store.wait(keys, timeout)
            self._store.set(key, json.dumps([json.loads(self._store.get(k)) for k in keys]))
        self._store.wait([key], timeout)
        said: list[Any] = json.loads(self._store.get(key))
        return said


@dataclass(frozen=True)
class Hosts:
    """By rank: its host's name, the lowest rank of its host, and the lowest rank that sees its output folder."""

    names: tuple[str, ...]
    first: tuple[int, ...]
    keepers: tuple[int, ...]

    @classmethod
    def alone(cls, world_size: int) -> Hosts:
        """One host."""
        return cls((socket.gethostname(),) * world_size, (0,) * world_size, (0,) * world_size)

    @classmethod
    def find(cls, everyone: Everyone, output_dir: str, local_rank: int) -> Hosts:
        """Who shares what. Collective; makes the output folder where there is none."""
        rank = everyone.rank
        said = everyone.say("host", [socket.gethostname(), rank - local_rank, uuid.uuid4().hex[:8]])
        names, first = tuple(name for name, *_ in said), tuple(lowest for _, lowest, _ in said)
        if not any(first):
            return cls.alone(everyone.world_size)

        def meet(about: str) -> None:
            everyone.say(about, None)

        keeper = lowest_sharer(Path(output_dir), rank, sorted(set(first)), meet, mark=said[0][2])
        return cls(names, first, tuple(everyone.say("keeper", keeper)))

    @property
    def common_folder(self) -> bool:
        """Whether all ranks see the output folder of rank 0."""
        return not any(self.keepers)

    def share(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks see one and the same output folder."""
        return len({self.keepers[rank] for rank in ranks}) <= 1

    def describe(self, ranks: Iterable[int]) -> str:
        """The hosts of some ranks, for people: "a (ranks 0, 1) and b (ranks 2, 3)"."""
        by_host: dict[int, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.first[rank], []).append(rank)
        parts = [
            f"{self.names[host]} (rank{'s' * (len(r) > 1)} {', '.join(map(str, r))})" for host, r in by_host.items()
        ]
        return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def lowest_sharer(folder: Path, me: int, tokens: Sequence[int], meet: Callable[[str], object], mark: str) -> int:
    """The lowest of `tokens` (numbers) that was put into the folder which this rank sees; its own number if none was.

    Those who find their own number in `tokens` put it there. meet: returns when all ranks have called it with the same
    name. mark: of this search, to tell it from others.
    """
    mine = folder / token_name(me, mark)
    folder.mkdir(parents=True, exist_ok=True)
    if me in tokens:
        mine.touch()
    meet("tokens are out")
    # By name, not by listing: a client of a network file system may show an old listing.
    found = next((number for number in tokens if (folder / token_name(number, mark)).exists()), me)
    meet("tokens were looked for")
    mine.unlink(missing_ok=True)
    return found


def token_name(number: int, mark: str) -> str:
    """The file that says who was there."""
    return f".rank_{number}_sees_this_{mark}"


def savers(mesh: Mesh) -> tuple[int, ...]:
    """The ranks that write to a checkpoint or read it: those that train, and rank 0."""
    return tuple(sorted({0, *mesh.trainers})) if mesh.trainers else ()


def folder_problem(config: Config, mesh: Mesh, hosts: Hosts, resume: str) -> str:
    """Why checkpoints can't be written or read by these hosts, and the ways out; empty when they can."""
    ranks = savers(mesh)
    if hosts.share(ranks) or not (config.ckpt.interval or resume):
        return ""
    why = f"ckpt.resume = {resume}" if resume else f"ckpt.interval = {config.ckpt.interval}"
    apart = f"output_dir {config.output_dir!r} is not one and the same folder on {hosts.describe(ranks)}"
    ways = "set output_dir to a folder that all of them share (the same path on each)"
    if not config.ckpt.per_node:
        return (
            f"{why} needs a folder that all ranks which save can see, and {apart}. Either {ways}, or set "
            "ckpt.per_node = true: every host then keeps its own part of each checkpoint"
        )
    if hosts.keepers[0] not in {hosts.keepers[rank] for rank in mesh.trainers}:
        return (
            f"{why} with ckpt.per_node: {apart}, and rank 0, which needs a part of every checkpoint, is on a host "
            f"where nobody trains. Either {ways}, or let a trainer rank start on {hosts.names[0]} (one process more "
            "there, or deployment.orchestrator = shared)"
        )
    return ""


def common_part(parts: list[dict[str, str]], hosts: Hosts, ranks: Iterable[int], resume: str) -> tuple[str, str]:
    """(the newest checkpoint of which every host holds its part, "") or ("", why there is none).

    parts: by rank, the name and the mark of every complete checkpoint there. resume: a folder, or "latest".
    """
    holders = sorted({hosts.keepers[rank] for rank in ranks})
    wanted = Path(resume).name
    names = sorted(parts[holders[0]], reverse=True) if resume == "latest" else [wanted]
    for name in names:
        if len({parts[rank].get(name) for rank in holders}) == 1 and name in parts[holders[0]]:
            return name, ""
    what = "no checkpoint is complete on all hosts" if resume == "latest" else f"{wanted} is not complete on all hosts"
    there = "; ".join(f"{hosts.names[rank]} has {', '.join(sorted(parts[rank])) or 'none'}" for rank in holders)
    return "", (
        f"ckpt.resume = {resume}: {what} ({there}; parts of one name that were not written together do not count). "
        "Start the same hosts in the same order as before, copy the missing part to its place, or start afresh "
        "without ckpt.resume"
    )
