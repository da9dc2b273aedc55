"""A control group for one box: how many processes there may be, and on cgroup v2 how much memory they may use.

Root is exempt from the limit of processes that a program can be given (RLIMIT_NPROC); this one binds everybody. It
refuses to know what runs in the box. Invariants: a group is never made where this process may not write; it goes when
its box closes; what a killed process left behind goes when the next box opens. On v1 only `pids` is used: the group of
the memory controller belongs to whoever started this process.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from spmd_rl.envs.sandbox.interface import Limits, SandboxError

PREFIX = "spmd_rl-box-"
OVERHEAD = 4  # processes of the box itself: its keeper, bwrap on both sides, the first process
ATTEMPTS, PAUSE_S = 500, 0.01  # to remove a group
NEW_S = 10.0  # a group that is younger may just be made by a process of another container, whose number says nothing


@dataclass(frozen=True)
class Cgroup:
    """A group that exists. Writing 0 into its `cgroup.procs` joins it."""

    path: Path

    async def remove(self) -> None:
        """Remove it as soon as it is empty; the last process may be just ending."""
        for _ in range(ATTEMPTS):
            if _removed(self.path):
                return
            await asyncio.sleep(PAUSE_S)
        raise SandboxError(f"the cgroup {self.path} of a closed box still holds processes")


def make_cgroup(limits: Limits, parent: Path) -> Cgroup:
    """A group below `parent`, which `find_parent` found. OSError when that can't be made."""
    _sweep(parent)
    path = parent / f"{PREFIX}{os.getpid()}-{token_hex(4)}"
    path.mkdir()
    (path / "pids.max").write_text(str(limits.processes + OVERHEAD))
    if (path / "memory.max").exists():
        memory = (limits.memory_mb + limits.folder_mb) * 2**20  # files in the box are memory too
        (path / "memory.max").write_text(str(memory))
    return Cgroup(path)


def find_parent(proc: Path = Path("/proc/self")) -> Path | None:
    """The nearest group in which groups that limit processes can be made; None when there is none."""
    own = dict(_own_groups(proc / "cgroup"))
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, mount = (_unescaped(name) for name in left.split()[3:5])
        kind, _, options = right.split()[:3]
        if kind == "cgroup" and "pids" in options.split(","):
            group = _below(mount, root, own.get("pids", "/"))
            if os.access(group, os.W_OK):
                return group
        if kind == "cgroup2":
            # Processes and limits don't mix in one group: the nearest one above that already limits what is in it.
            group = _below(mount, root, own.get("", "/"))
            for above in (group, *group.parents):
                if not above.is_relative_to(mount):
                    break
                if _limits_processes(above) and os.access(above, os.W_OK):
                    return above
    return None


def _own_groups(file: Path) -> list[tuple[str, str]]:
    """(controller, group) of this process; v2 has the controller ""."""
    lines = [line.split(":", 2) for line in file.read_text().splitlines()]
    return [(controller, group) for _, controllers, group in lines for controller in controllers.split(",")]


def _below(mount: str, root: str, group: str) -> Path:
    """The folder of a group, where a container may see only what is below `root`."""
    inside = os.path.relpath(group, root)
    return Path(mount) if inside.startswith("..") else Path(mount, inside)


def _limits_processes(group: Path) -> bool:
    try:
        return "pids" in (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _unescaped(name: str) -> str:
    return name.replace("\\040", " ").replace("\\134", "\\")


def _sweep(parent: Path) -> None:
    """Remove the groups of processes that are gone."""
    mine = f"{PREFIX}{os.getpid()}-"
    for name in os.listdir(parent):
        if not name.startswith(PREFIX) or name.startswith(mine):
            continue
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists() and _age(parent / name) > NEW_S:
            _removed(parent / name)


def _removed(path: Path) -> bool:
    """True when it is gone. False while there is a process in it: a box always has one, its keeper."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
