"""Checks: the folders that a run writes to and reads from.

Refuses to make any of them: what does not exist yet is judged by the folder in which it would be made.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from spmd_rl.doctor.finding import Check, Finding, fail, ok, warn
from spmd_rl.doctor.place import Place

GB = 10**9
OUTPUT_GB = (0.5, 5.0)  # below the first a run fails, below the second it soon will
CACHE_GB = (0.0, 10.0)
TEMPORARY_GB = (0.1, 1.0)


def output(place: Place) -> Finding:
    """Where checkpoints, logs and rollouts go."""
    return _room(Path(place.wishes.output_dir), OUTPUT_GB, "set output_dir to a folder on a larger disk")


def temporary(place: Place) -> Finding:
    """torchrun's logs, sockets, compiled kernels."""
    return _room(Path(tempfile.gettempdir()), TEMPORARY_GB, "free some, or set TMPDIR to a folder on another disk")


def cache(place: Place) -> Finding:
    """The Hugging Face cache, into which models of the Hub are downloaded."""
    folder = cache_folder(place)
    if place.wishes.model and Path(place.wishes.model).is_dir():
        return ok(f"{folder}; not needed: the model is a local folder")
    finding = _room(folder, CACHE_GB, "set HF_HOME to a folder on a larger disk")
    if finding.status == "ok" and place.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "TRUE", "ON", "YES"):
        return ok(f"{finding.value}; offline: only what is there can be loaded", "unset HF_HUB_OFFLINE to download")
    return finding


def model(place: Place) -> Finding:
    """A model named as a folder is there, with a config in it."""
    name = place.wishes.model
    if not name:
        return ok("none named")
    folder = Path(name)
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith("."):
            return fail(f"{name}: no such folder here", "copy it to every host, or name a folder that all of them see")
        return ok(f"{name}: not a folder here, so an id of the Hub")
    if not (folder / "config.json").exists():
        return fail(f"{name} has no config.json", "name a folder in Hugging Face format")
    try:
        kind = json.loads((folder / "config.json").read_text()).get("model_type", "unknown")
    except ValueError as error:
        return fail(f"{folder / 'config.json'}: {error}", "restore the file")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / GB
    return ok(f"{name}: {kind}, {size:.2f} GB")


def cache_folder(place: Place) -> Path:
    """Where huggingface_hub puts its cache."""
    home = place.environ.get("HF_HOME") or Path(place.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(place.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _room(folder: Path, bounds: tuple[float, float], to_do: str) -> Finding:
    """Writable, and with room: below bounds[0] GB it fails, below bounds[1] it warns."""
    base = existing(folder)
    if not base.is_dir():
        return fail(f"{folder}: {base} is a file", "name another folder")
    try:
        with tempfile.TemporaryFile(dir=base) as file:  # os.access knows nothing of read-only and full disks
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return fail(f"{folder}: {error.strerror} in {base}", to_do)
    free = shutil.disk_usage(base).free / GB
    value = f"{folder}: {free:.1f} GB free"
    if free < bounds[0]:
        return fail(value, to_do)
    return warn(value, to_do) if free < bounds[1] else ok(value)


CHECKS = (
    Check("disks", "output folder", output),
    Check("disks", "model", model),
    Check("disks", "Hugging Face cache", cache),
    Check("disks", "temporary folder", temporary),
)
