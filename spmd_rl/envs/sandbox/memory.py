"""How much memory a program and everything it started uses, read from /proc.

For machines where no cgroup with a memory limit can be had: the limit of one process (`prlimit --as`) says nothing
about many. It refuses to know what to do about it. Invariant: pages that several processes share count once before
anything is called too much.
"""

from __future__ import annotations

import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def uses_more(pid: int, limit: int) -> bool:
    """True when process `pid` and its descendants use more than `limit` bytes."""
    pids = _family(pid)
    # Resident pages are cheap to ask for, but count what is shared again and again; exact shares cost a walk.
    return sum(map(_resident, pids)) > limit and sum(map(_share, pids)) > limit


def children(pid: int) -> list[int]:
    """The processes that process `pid` started, while they run."""
    tasks = f"/proc/{pid}/task"
    return [int(child) for thread in _names(tasks) for child in _text(f"{tasks}/{thread}/children").split()]


def _family(pid: int) -> list[int]:
    """`pid` and its descendants. In a PID namespace nothing leaves this tree."""
    pids, queue = [], [pid]
    while queue:
        pids.append(pid := queue.pop())
        queue += children(pid)
    return pids


def _resident(pid: int) -> int:
    fields = _text(f"/proc/{pid}/statm").split()
    return int(fields[1]) * PAGE if fields else 0


def _share(pid: int) -> int:
    """Bytes, where a page that n processes share counts as 1/n."""
    for line in _text(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return _resident(pid)  # not ours to look into, or ended meanwhile


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # it has ended meanwhile
        return []


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
