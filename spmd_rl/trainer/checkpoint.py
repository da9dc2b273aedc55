"""Checkpoints of the trainer ranks: weights, optimizer moments, a critic's too, and a small state that goes with them.

Written by torch's distributed checkpoint, every rank its shards, from a copy in memory while training goes on; on a
group of its own, because a save is a collective on another thread. A checkpoint is a folder that is complete or not
there: it is written beside its name and renamed when every rank is done. Ranks that do not see the first one's folder
write into one of their own (`checkpoint_parts.py`).

It refuses to know what the state means and when to save. Invariants: loading on another number of ranks gives the same
values; at most one save is under way; a save that failed is seen before the next one begins, and at the end.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner

from spmd_rl.trainer import checkpoint_parts
from spmd_rl.world.checkpoints import SNAPSHOT, STATE, part_of, prune, read_state, seal

MOMENTS = ("exp_avg", "exp_avg_sq", "step")

# By name: parameters, and their optimizer where they are trained.
Parts = dict[str, tuple[list[tuple[str, nn.Parameter]], torch.optim.AdamW | None]]


class Checkpoints:
    """Saves and loads what the trainer ranks hold.

    Args:
        group: the trainer ranks, on gloo, used by nothing else.
        keep: newest checkpoints that stay; 0 = all.
        keep_every: those of steps that it divides stay too; 0 = none.
    """

    def __init__(self, group: dist.ProcessGroup, keep: int, keep_every: int = 0) -> None:
        self._group, self._keep, self._keep_every = group, keep, keep_every
        self._keepers: list[int] = []  # by rank: who renames and deletes in the folder that it sees
        self._finisher = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Any] | None = None

    def save(
        self, folder: str, parts: Parts, state: dict[str, Any], done: Any = lambda: None, snapshot: bytes = b""
    ) -> None:
        """Copy now, write beside what follows. Collective. `done` is called on the first rank when it is complete."""
        self.wait()
        target = Path(folder)
        writing = target.with_name(target.name + ".tmp")
        self._keepers = self._keepers or checkpoint_parts.find_keepers(self._group, target.parent)
        if self._keeps:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
        if self._group.rank() == 0:
            (writing / STATE).write_text(json.dumps(state))
            if snapshot:
                (writing / SNAPSHOT).write_bytes(snapshot)
        dist.barrier(group=self._group)  # nobody writes into the folder before it is there
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        tensors = tensors_of(parts)
        future = dcp.async_save(tensors, checkpoint_id=writing, process_group=self._group, planner=planner)
        self._pending = self._finisher.submit(self._complete, future, writing, target, done)

    def wait(self) -> None:
        """Until the save under way is complete; raises what it raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, folder: str, parts: Parts) -> dict[str, Any]:
        """Put a checkpoint's values into the parameters and optimizers; its state. Collective."""
        state, part = read_state(folder), part_of(folder)
        tensors = tensors_of(parts)
        if part:
            checkpoint_parts.load(self._group, Path(folder), tensors, part["ranks"])
        else:
            dcp.load(tensors, checkpoint_id=folder, process_group=self._group)
        return state

    @property
    def _keeps(self) -> bool:
        return self._keepers[self._group.rank()] == self._group.rank()

    def _complete(self, future: Future[Any], writing: Path, target: Path, done: Any) -> None:
        """On a thread of its own, which has the group until it ends."""
        future.result()
        divided = any(self._keepers)
        if divided:
            checkpoint_parts.spread_small_files(self._group, self._keepers, writing)
        if self._keeps:
            seal(writing, target)
            prune(target.parent, self._keep, self._keep_every)
        if divided:
            dist.barrier(group=self._group)  # complete on all hosts
        if self._group.rank() == 0:
            done()


def tensors_of(parts: Parts) -> dict[str, Tensor]:
    """Every tensor of the state, by name; optimizers that have not stepped get their zeros."""
    tensors: dict[str, Tensor] = {}
    for part, (named, optimizer) in parts.items():
        for name, parameter in named:
            tensors[f"{part}/{name}"] = parameter.detach()
            if optimizer is None:
                continue
            moments = optimizer.state[parameter]
            if not moments:
                moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                moments["exp_avg"] = torch.zeros_like(parameter)
                moments["exp_avg_sq"] = torch.zeros_like(parameter)
            tensors |= {f"{part}/{name}/{key}": moments[key] for key in MOMENTS}
    return tensors
