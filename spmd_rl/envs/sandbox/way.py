"""How this machine lets a bwrap box be made: who its programs are on the host, and what counts its processes.

Found out (Linux 6.18, bubblewrap 0.8): RLIMIT_NPROC does not bind the host's root, also not from inside a user
namespace that calls it something else; it binds any other user, and since Linux 5.14 it counts within each user
namespace. So root lets every box run as a user of its own that nobody else has, and anybody else relies on the box's
user namespace; a cgroup counts as well where one can be made, and alone where root may not give root up.
It refuses to know how the box is built. Invariant: there is no way without a limit on processes.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.envs.sandbox.cgroup import find_parent
from spmd_rl.envs.sandbox.interface import SandboxError

CAP_SYS_ADMIN = 21
COUNTS_BY_NAMESPACE = (5, 14)  # the first Linux that does
FIRST_UID, UIDS = 2**30, 2**29  # a user of one box; the range is far from all that hosts and containers hand out
SMALL_FIRST_UID, SMALL_UIDS = 20_000, 40_000  # in a container that has only 2^16 users


@dataclass(frozen=True)
class Way:
    """How one box is made."""

    privileged: bool  # this process may mount; without, a user namespace lets it
    uid: int | None  # the user and group that programs run as on the host; None: this process's own
    cgroups: Path | None  # where the box's cgroup is made; None: nowhere


def find_way() -> Way:
    """The strongest way that this machine has. SandboxError, with the ways out, when it has none."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise SandboxError("the bwrap sandbox needs a Linux that lists children in /proc (CONFIG_PROC_CHILDREN)")
    parent = find_parent()
    if _may_mount():
        if _user_namespaces_for_all():
            return Way(True, _new_uid(), parent)
        if parent is not None:
            return Way(True, None, parent)
        raise SandboxError(
            "the bwrap sandbox can't limit processes here: users other than root may not make user namespaces "
            f"({_switches()}), and root has no cgroup with the pids controller that it can write to. Allow one of both"
        )
    if not _user_namespaces_for_all():
        raise SandboxError(
            "the bwrap sandbox needs user namespaces, which this machine refuses to users other than root: "
            f"run as root, or set {_switches()}"
        )
    if parent is None and _kernel() < COUNTS_BY_NAMESPACE:
        raise SandboxError(
            f"the bwrap sandbox can't limit processes on Linux {os.uname().release}, which counts them for the whole "
            "user: run as root, in a cgroup that is delegated to you (systemd-run --user -p Delegate=yes), or on "
            "Linux 5.14 and later"
        )
    return Way(False, None, parent)


def _may_mount() -> bool:
    status = Path("/proc/self/status").read_text()
    (effective,) = re.findall(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return os.geteuid() == 0 and bool(int(effective, 16) >> CAP_SYS_ADMIN & 1)


# What distributions switch user namespaces off with: file below /proc/sys → the value that allows them.
SWITCHES = {"kernel/unprivileged_userns_clone": 1, "kernel/apparmor_restrict_unprivileged_userns": 0}


def _user_namespaces_for_all() -> bool:
    if _sysctl("user/max_user_namespaces") == 0:
        return False
    return all(_sysctl(name) in (None, allowed) for name, allowed in SWITCHES.items())


def _switches() -> str:
    return ", ".join(f"{name.replace('/', '.')} = {allowed}" for name, allowed in SWITCHES.items())


def _sysctl(name: str) -> int | None:
    try:
        return int(Path("/proc/sys", name).read_text())
    except (OSError, ValueError):  # this kernel has no such switch
        return None


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


def _new_uid() -> int:
    """A user nobody is. By chance: there is no list of those in use, and the range makes two alike improbable."""
    large = FIRST_UID + secrets.randbelow(UIDS)
    return large if _mapped(large) else SMALL_FIRST_UID + secrets.randbelow(SMALL_UIDS)


def _mapped(uid: int) -> bool:
    spans = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= uid < first + count for first, _, count in spans)
