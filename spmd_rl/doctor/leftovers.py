"""Check: shared memory of runs that are dead.

A program that is killed leaves its files in /dev/shm. They hold memory until the next boot, and a file of the same name
makes the next start fail. A file counts as left over when it has a name that the libraries here give, belongs to this
user, has not been touched for a minute and is neither open nor mapped by any process that can be seen.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from spmd_rl.doctor.finding import Check, Finding, ok, warn
from spmd_rl.doctor.place import Place

NAMES = re.compile(r"spmd_rl|vllm|psm_|torch_|nccl-|sem\.|shm_")
OLD_S = 60.0
SHOWN = 3


def leftovers(place: Place) -> Finding:
    """Files that nobody holds."""
    folder, used = place.root / "dev/shm", _held(place.root / "proc")
    old = time.time() - OLD_S
    found = []
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        try:
            status = path.lstat()
        except FileNotFoundError:  # it is not left over, then
            continue
        mine = status.st_uid == os.getuid() and status.st_mtime < old and path.is_file()
        if mine and NAMES.search(path.name) and f"/dev/shm/{path.name}" not in used:
            found.append((path, status.st_size))
    if not found:
        return ok("none")
    names = " ".join(str(path) for path, _ in found[:SHOWN]) + (" …" if len(found) > SHOWN else "")
    megabytes = sum(size for _, size in found) / 1e6
    return warn(
        f"{len(found)} files, {megabytes:.1f} MB: {names}",
        "remove them, unless a run in another container shares this /dev/shm",
    )


def _held(proc: Path) -> set[str]:
    """Files of /dev/shm that any process has mapped or open."""
    held: set[str] = set()
    for process in proc.glob("[0-9]*"):
        try:
            held.update(re.findall(r"/dev/shm/\S+", (process / "maps").read_text()))
            held.update(os.readlink(link) for link in (process / "fd").iterdir())
        except OSError:  # it ended, or belongs to somebody else
            continue
    return held


CHECKS = (Check("machine", "left-over shared memory", leftovers),)
