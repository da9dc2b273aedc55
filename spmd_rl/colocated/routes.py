"""Routed experts between ranks that infer and train in turns.

All ranks carry out the order that trains, so all meet in one exchange: leaders give what the order says, everybody
gets what its own rows need. There is no second thread, and nobody waits in a circle. It refuses to know what experts
are. Invariant: what arrives is checked as `world/routes.py` checks it, own blocks included.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.rollouts.types import Row
from spmd_rl.world.routes import RouteReceiver, RoutesError, RouteStore, message


class RouteExchange(RouteReceiver):
    """A rank's end.

    Args:
        store: what this rank keeps, where it leads a replica.
        leaders: their places among the ranks of the group, in the order of their replicas.
        layers, top_k, experts: of the model.
    """

    def __init__(
        self, group: dist.ProcessGroup, store: RouteStore, leaders: Sequence[int], layers: int, top_k: int, experts: int
    ) -> None:
        super().__init__(group, leaders, layers, top_k, experts)
        self._store = store
        self._came: list[tuple[list[int], torch.Tensor]] = []  # by rank

    def exchange(self, step: int, rows: Sequence[Row], pieces: Sequence[np.ndarray]) -> list[Row]:
        """The rows with their routed experts; `pieces`, by rank, is what this one gives. Collective."""
        ranks = self._group.size()
        shares = [self._store.cut(of_rank) for of_rank in pieces] or [np.zeros(0, np.uint8)] * ranks
        heads, bodies = zip(*(message(step, share) for share in shares), strict=True)
        heads_RH = torch.empty(ranks, len(heads[0]), dtype=torch.int64)
        dist.all_to_all_single(heads_RH, torch.stack(heads), group=self._group)
        sizes = heads_RH[:, 1].tolist()
        into = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.all_to_all_single(into, torch.cat(bodies), sizes, [len(body) for body in bodies], group=self._group)
        self._came = list(zip(heads_RH.tolist(), into.split(sizes), strict=True))
        filled = self.fill(step, rows)
        if left := [rank for rank, (_, body) in enumerate(self._came) if len(body)]:
            raise RoutesError(f"ranks {left} of the trainer sent routed experts for step {step} that no row asked for")
        return filled

    def _head(self, place: int) -> list[int]:
        return self._came[place][0]

    def _body(self, place: int, size: int) -> torch.Tensor:
        head, body = self._came[place]
        self._came[place] = head, body[:0]
        return body
