"""Which replica knows the routed experts of which tokens, so that trainer ranks can replay them (R3).

A request's answer leaves its routed experts with the leader that served it. When a rollout has ended, its samples are
matched with its requests, which may have gone to different replicas; when a batch is packed, every leader is told what
goes to which trainer rank; when a group is done with, the leaders forget. Rank 0 sees positions, never experts.

What a run that is taken up again finds in its journal has no routes: they went with the processes that kept them. Such
tokens are not replayed, and the share of those that are is a metric. In lockstep, where going on and being taken up
again must be the same, every checkpoint gives up the routes of what was sampled before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np

from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.policy import Call
from spmd_rl.rollouts.packing import Packed
from spmd_rl.rollouts.routes import pieces_of
from spmd_rl.rollouts.types import Episode, Sample
from spmd_rl.world.messages import ForgetRoutes, SendRoutes


class Routes:
    """The routes of all groups that are open or in training."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._held: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # (replica, request) by group

    def hold(self, group: int, replica: int, request: int) -> None:
        """A request of a rollout of this group was answered, be it one that fails, and the replica keeps its routes."""
        self._held[group].append((replica, request))

    def attach(self, episode: Episode, calls: Sequence[Call]) -> Episode:
        """The episode, whose samples say where the routed experts of their tokens are."""
        kept = [call for call in calls if call.kept]
        samples = tuple(replace(sample, routes=routes_of(sample, kept)) for sample in episode.samples)
        return replace(episode, samples=samples)

    def send(self, step: int, packed: Sequence[Packed]) -> dict[str, float]:
        """Tell the leaders what the trainer ranks get for their rows of this step; how much is replayed."""
        for replica in range(self._link.replicas):
            pieces = routes_of_batch(self._link, packed, replica)
            if not self._link.colocated and any(map(len, pieces)):  # else the order to train says it
                self._link.decide(replica, SendRoutes(step, pieces))
        whole = [row for part in packed for of_rank in part.rows for row in of_rank]
        routed = sum(int((row.routes[:, 3] - row.routes[:, 2]).sum()) for row in whole if row.routes is not None)
        return {"moe/replayed": routed / max(1, sum(len(row.tokens) for row in whole))}

    def forget_all(self) -> None:
        """Whatever is kept so far; what is not answered yet is not."""
        self.forget(list(self._held))

    def forget(self, groups: Sequence[int]) -> None:
        """These groups are done with."""
        gone: defaultdict[int, list[int]] = defaultdict(list)
        for group in groups:
            for replica, request in self._held.pop(group, ()):
                gone[replica].append(request)
        for replica, requests in gone.items():
            self._link.decide(replica, ForgetRoutes(requests))


def routes_of_batch(link: Link, packed: Sequence[Packed], replica: int) -> list[np.ndarray]:
    """By trainer rank, int64[n, 3]: what a replica has to give for the rank's rows, as `SendRoutes` has it."""
    rows = [[row for part in packed for row in part.rows[rank // link.cp]] for rank in range(link.trainers)]
    return [np.ascontiguousarray(pieces_of(of_rank, replica)[:, 1:4]) for of_rank in rows]


def routes_of(sample: Sample, calls: Sequence[Call]) -> np.ndarray | None:
    """int64[pieces, 4], (replica, request, first position, one past the last); None when no call belongs to the sample.

    A call belongs to it when the sample begins with all that was asked and answered. A call's engine has routed every
    token but the last one, which nothing was sampled from.
    """
    tokens = np.ascontiguousarray(sample.tokens, dtype=np.int32)
    pieces, seen, done = [], 0, 0  # `seen`: checksum of the first `done` tokens
    for call in sorted(calls, key=lambda call: call.length):
        if call.length > len(tokens):
            break
        seen, done = crc32(tokens[done : call.length], seen), call.length
        if seen == call.whole:
            pieces.append((call.replica, call.request, call.routes_from, call.length - 1))
    return np.asarray(pieces, dtype=np.int64) if pieces else None
