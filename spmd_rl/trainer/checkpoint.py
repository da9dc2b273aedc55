"""Checkpoints of the trainer ranks: weights, optimizer moments, a critic's too, and a small state that goes with them.

Written by torch's distributed checkpoint, every rank its shards, from a copy in memory while training goes on; on a
group of its own, because a save is a collective on another thread. A checkpoint is a folder that is complete or not
there: it is written beside its name and renamed when every rank is done.

It refuses to know what the state means and when to save. Invariants: loading on another number of ranks gives the same
values; at most one save is under way; a save that failed is seen before the next one begins, and at the end.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from spmd_rl.world.checkpoints import SNAPSHOT, STATE, prune, read_state, seal

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
        self._pending: Future[Any] | None = None

    def save(
        self, folder: str, parts: Parts, state: dict[str, Any], done: Any = lambda: None, snapshot: bytes = b""
    ) -> None:
        """Copy now, write beside what follows. Collective. `done` is called on the first rank when it is complete."""
        self.wait()
        target = Path(folder)
        writing = target.with_name(target.name + ".tmp")
        first = self._group.rank() == 0
        if first:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
            (writing / STATE).write_text(json.dumps(state))
            if snapshot:
                (writing / SNAPSHOT).write_bytes(snapshot)
        # The folder is there before anybody writes into it: the save begins with a collective.
        self._pending = dcp.async_save(tensors_of(parts), checkpoint_id=writing, process_group=self._group)
        if first:
            self._pending.add_done_callback(lambda future: self._complete(future, writing, target, done))

    def wait(self) -> None:
        """Until the save under way is on disk; raises what it raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, folder: str, parts: Parts) -> dict[str, Any]:
        """Put a checkpoint's values into the parameters and optimizers; its state. Collective."""
        state = read_state(folder)
        tensors = tensors_of(parts)
        dcp.load(tensors, checkpoint_id=folder, process_group=self._group)
        return state

    def _complete(self, future: Future[Any], writing: Path, target: Path, done: Any) -> None:
        """On the thread that wrote. What raises here is lost, so nothing is said to be done before it is."""
        if future.exception() is None:
            seal(writing, target)
            prune(target.parent, self._keep, self._keep_every)
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
