"""How much memory this process may have, and has: the machine's, within every control group above it (both versions).

It refuses to know what it is for. `root` is what /proc and /sys are below, so that a test can show another machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
_FILES = (  # limit, usage, the part of the usage that would be given back
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_total(root: Path = ROOT) -> int:
    """Bytes in all."""
    said = [read(group / limit) for group in cgroups("memory", root) for limit, _, _ in _FILES]
    return min([_meminfo(root)["MemTotal"], *(int(limit) for limit in said if limit.isdigit())])


def memory_available(root: Path = ROOT) -> int:
    """Bytes that may still be taken."""
    free = _meminfo(root)["MemAvailable"]
    for group in cgroups("memory", root):
        for limit, usage, cache in _FILES:
            said = read(group / limit)
            if said.isdigit():
                reclaimable = dict(line.split() for line in read(group / "memory.stat").splitlines()).get(cache, 0)
                free = min(free, int(said) - int(read(group / usage) or 0) + int(reclaimable))
    return max(0, free)


def resident(root: Path = ROOT) -> int:
    """Bytes that this process holds."""
    return _status("VmRSS", root)


def peak_resident(root: Path = ROOT) -> int:
    """The most that it held, since its start or the last `forget_peak`.

    (getrusage says another peak, which begins with that of the parent that forked this process.)
    """
    return _status("VmHWM", root)


def forget_peak(root: Path = ROOT) -> None:
    """The peak begins anew, where the kernel lets a process say so."""
    with suppress(OSError):
        (root / "proc/self/clear_refs").write_text("5")


def cgroups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """The folders of the groups of one controller that this process is in, from its own to the root."""
    top = root / "sys/fs/cgroup"
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = next((m for m in (top / controllers, top / controller) if controllers and m.is_dir()), top)
        own = mount / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder == mount or mount in folder.parents)


def read(path: Path) -> str:
    """A small file's text, stripped; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _status(field: str, root: Path) -> int:
    lines = (root / "proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _meminfo(root: Path) -> dict[str, int]:
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(number) * 1024 for name, number, *_ in lines}
