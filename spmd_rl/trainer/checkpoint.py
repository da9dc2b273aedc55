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
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

STATE = "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")

Parts = dict[str, tuple[list[tuple[str, nn.Parameter]], torch.optim.AdamW]]  # by name: parameters and their optimizer


class CheckpointError(ValueError):
    """There is no such checkpoint, or it does not fit."""


class Checkpoints:
    """Saves and loads what the trainer ranks hold.

    Args:
        group: the trainer ranks, on gloo, used by nothing else.
        keep: newest checkpoints that stay; 0 = all.
    """

    def __init__(self, group: dist.ProcessGroup, keep: int) -> None:
        self._group, self._keep = group, keep
        self._pending: Future[Any] | None = None

    def save(self, folder: str, parts: Parts, state: dict[str, Any], done: Any = lambda: None) -> None:
        """Copy now, write beside what follows. Collective. `done` is called on the first rank when it is complete."""
        self.wait()
        target = Path(folder)
        writing = target.with_name(target.name + ".tmp")
        first = self._group.rank() == 0
        if first:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
            (writing / STATE).write_text(json.dumps(state))
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
            shutil.rmtree(target, ignore_errors=True)
            writing.rename(target)
            for old in complete(target.parent)[: -self._keep] if self._keep else []:
                shutil.rmtree(old, ignore_errors=True)
            done()


def tensors_of(parts: Parts) -> dict[str, Tensor]:
    """Every tensor of the state, by name; optimizers that have not stepped get their zeros."""
    tensors: dict[str, Tensor] = {}
    for part, (named, optimizer) in parts.items():
        for name, parameter in named:
            tensors[f"{part}/{name}"] = parameter.detach()
            moments = optimizer.state[parameter]
            if not moments:
                moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                moments["exp_avg"] = torch.zeros_like(parameter)
                moments["exp_avg_sq"] = torch.zeros_like(parameter)
            tensors |= {f"{part}/{name}/{key}": moments[key] for key in MOMENTS}
    return tensors


def complete(folder: str | Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    found: Iterable[Path] = Path(folder).glob("step_*")
    return sorted(path for path in found if path.suffix != ".tmp" and (path / STATE).exists())


def read_state(folder: str | Path) -> dict[str, Any]:
    """The small state of a checkpoint. CheckpointError when there is none."""
    path = Path(folder) / STATE
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(folder)!r} is no complete checkpoint: {error}") from None
    return state


def find(resume: str, output_dir: str) -> Path:
    """The checkpoint that `ckpt.resume` names: a folder, or "latest". CheckpointError when it is not there."""
    if resume != "latest":
        read_state(resume)
        return Path(resume)
    found = complete(Path(output_dir) / "checkpoints")
    if not found:
        raise CheckpointError(
            f"ckpt.resume = latest, and {output_dir}/checkpoints holds no complete checkpoint: name one, or start "
            "afresh without ckpt.resume (ckpt.interval says how often one is written)"
        )
    return found[-1]
