"""Rank 0's view of the trainer ranks: orders that can be awaited.

All trainer ranks carry out the same orders one after the other; only rows differ. It refuses to know why something is
ordered. Invariant: what was ordered is answered once, and the answer ends the wait of whoever ordered it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.routes import routes_of_batch
from spmd_rl.rollouts.packing import Packed
from spmd_rl.rollouts.types import Row
from spmd_rl.world.messages import Export, Exported, FreshOptimizer, Restore, Save, Saved, Train, Trained


class Trainers:
    """The trainer ranks.

    Args:
        saved: called with the folder of each checkpoint that is complete.
    """

    def __init__(self, link: Link, saved: Callable[[str], None]) -> None:
        self._link, self._saved = link, saved
        self._trained: dict[tuple[str, int], asyncio.Future[Trained]] = {}
        self._written: dict[str, asyncio.Event] = {}  # folders
        link.listen(Trained, lambda event: self._trained[event.phase, event.step].set_result(event))
        link.listen(Exported, lambda event: self._written.pop(event.folder).set())
        link.listen(Saved, self._on_saved)

    def train(self, phase: str, step: int, packed: list[Packed], lr: float = -1.0) -> asyncio.Future[Trained]:
        """An optimizer step per minibatch; `lr` below 0: as the schedule has it."""
        future: asyncio.Future[Trained] = asyncio.get_running_loop().create_future()
        self._trained[phase, step] = future
        future.add_done_callback(lambda _: self._trained.pop((phase, step)))
        ranks = range(self._link.trainers)
        shares = range(self._link.data_ranks)
        rows = [[[columns(row) for row in minibatch.rows[share]] for minibatch in packed] for share in shares]
        given = self._given(packed) if self._link.colocated else {}
        self._link.order([Train(step, phase, rows[rank // self._link.cp], lr, given.get(rank, [])) for rank in ranks])
        return future

    def _given(self, packed: list[Packed]) -> dict[int, list[np.ndarray]]:
        """By the ranks that lead replicas and train too: which kept routed experts they give."""
        each = self._link.trainers // self._link.replicas
        return {i * each: routes_of_batch(self._link, packed, i) for i in range(self._link.replicas)}

    def begin_rl(self) -> None:
        """The weights as they are now are version 0: a fresh optimizer."""
        self._link.order_all(FreshOptimizer("rl"))

    def restore(self, folder: str) -> None:
        """Weights and optimizer as a checkpoint has them."""
        self._link.order_all(Restore(folder))

    def save(self, folder: str, state: dict[str, Any], snapshot: bytes) -> asyncio.Event:
        """A checkpoint, written beside what follows; set when it is complete."""
        written = self._written[folder] = asyncio.Event()
        others = Save(folder, state)
        self._link.order([Save(folder, state, snapshot), *[others] * (self._link.trainers - 1)])
        return written

    async def export(self, folder: str) -> None:
        """A Hugging Face folder; returns when it is complete."""
        written = self._written[folder] = asyncio.Event()
        self._link.order_all(Export(folder))
        await written.wait()

    def _on_saved(self, event: Saved) -> None:
        self._written.pop(event.folder).set()
        self._saved(event.folder)


def columns(row: Row) -> dict[str, np.ndarray]:
    """The streams that a row has, as they travel."""
    found = {field.name: getattr(row, field.name) for field in fields(Row)}
    return {name: column for name, column in found.items() if column is not None}
