"""Checkpoint folders: where they are, which are complete, what goes with them besides tensors.

    OUTPUT/checkpoints/step_000040/   tensors (trainer ranks), state.json, snapshot.bin (rank 0's), files.json

A folder is complete when it has its name: it is written as step_….tmp and renamed. `files.json` says how long every
file must be, so that one that was cut off later is found before anything is loaded. Where hosts share no folder, each
has its part of the tensors and all that is small; part.json says so, and which parts belong together. All parts copied
into one folder are the whole checkpoint. It refuses to know about tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STATE, SNAPSHOT, FILES, PART = "state.json", "snapshot.bin", "files.json", "part.json"


class CheckpointError(ValueError):
    """There is no such checkpoint, or it does not fit."""


def folder_of(output_dir: str | Path, step: int) -> Path:
    """Where the checkpoint of a step belongs."""
    return Path(output_dir).resolve() / "checkpoints" / f"step_{step:06d}"


def step_of(folder: str | Path) -> int:
    """The step in a checkpoint's name."""
    return int(str(folder).rpartition("_")[2])


def seal(writing: Path, target: Path) -> None:
    """All files are there: note their lengths, and let the folder have its name."""
    sizes = {str(path.relative_to(writing)): path.stat().st_size for path in writing.rglob("*") if path.is_file()}
    (writing / FILES).write_text(json.dumps(sizes))
    shutil.rmtree(target, ignore_errors=True)
    writing.rename(target)


def prune(folder: Path, keep: int, keep_every: int) -> None:
    """Delete all but the newest `keep` (0 = all stay) and those of steps that `keep_every` divides.

    And what a run that died was writing: nothing may be under way in the folder.
    """
    for half in folder.glob("step_*.tmp"):
        shutil.rmtree(half, ignore_errors=True)
    for old in complete(folder)[:-keep] if keep else []:
        if not (keep_every and step_of(old) % keep_every == 0):
            shutil.rmtree(old, ignore_errors=True)


def complete(folder: str | Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    found: Iterable[Path] = Path(folder).glob("step_*")
    return sorted(path for path in found if path.suffix != ".tmp" and (path / STATE).exists())


def part_of(folder: str | Path) -> dict[str, Any]:
    """{"save": a mark that all parts have, "ranks": how many trained}; empty for a checkpoint in one folder."""
    path = Path(folder) / PART
    part: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return part


def marks(folder: str | Path) -> dict[str, str]:
    """The names of the complete checkpoints in a folder, with their marks; what is whole has an empty one."""
    return {path.name: str(part_of(path).get("save", "")) for path in complete(folder)}


def read_state(folder: str | Path) -> dict[str, Any]:
    """The small state of a checkpoint. CheckpointError when there is none, or a file is missing or cut off."""
    path = Path(folder)
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text())
        sizes: dict[str, int] = json.loads((path / FILES).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(folder)!r} is no complete checkpoint: {error}") from None
    for name, size in sizes.items():
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes, and should have {size}"
            others = [str(other) for other in complete(path.parent) if other != path]
            raise CheckpointError(
                f"{path} is damaged: {name} {what}. Restore it from a copy, or "
                + (f"resume from {others[-1]}" if others else "begin anew without ckpt.resume")
            )
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
