"""What a program in a bwrap box sees: bubblewrap's arguments, and the files that the box brings along.

It refuses to know when programs run and how they end. Invariants: nothing of the host is shown but the programs and
libraries of the system, the Python of this process, two harmless parts of /etc, and devices that hold nothing; all of
that is read-only; every place that can be written lies in the keeper's tmpfs, also below /dev.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from spmd_rl.envs.sandbox.interface import SandboxError

FOLDER, HOME, OWN_BIN = "/sandbox", "/home/box", "/opt/bin"
WRITABLE = {"shm": "/dev/shm", "tmp": "/tmp", "home": HOME, "work": FOLDER}  # name in the tmpfs → place in the box
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
ETC_OF_HOST = ("ld.so.cache", "alternatives")  # where the system's libraries and programs are
UID = 1000  # of the only user in the box
ETC = {
    "passwd": f"box:x:{UID}:{UID}:box:{HOME}:/bin/sh\n",
    "group": f"box:x:{UID}:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "gitconfig": "[user]\n\tname = box\n\temail = box@localhost\n[init]\n\tdefaultBranch = main\n",
}
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
ENVIRONMENT = {
    "HOME": HOME,
    "USER": "box",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    # Compiled files are told from stale ones by whole seconds; a model edits and runs faster than that.
    "PYTHONDONTWRITEBYTECODE": "1",
    # A library that starts a thread for each of the host's cores would be out of memory and processes at once.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def python(prefix: str) -> Path:
    """The Python of this process's version that is installed in `prefix`, which is no virtual environment."""
    return Path(prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")


def hidden(prefix: str) -> bool:
    """True when what is installed in `prefix` is not part of the system that a box shows anyway."""
    return not any(Path(prefix).is_relative_to(system) for system in SYSTEM)


def furnish(folder: int, prefix: str, owner: int | None) -> None:
    """Make the folders and files of a box in its open tmpfs; the writable ones belong to `owner`."""
    for name in (*WRITABLE, "etc", "bin"):
        os.mkdir(name, 0o755, dir_fd=folder)
        if name in WRITABLE and owner is not None:
            os.chown(name, owner, owner, dir_fd=folder)
    for name, text in ETC.items():
        _new_file(f"etc/{name}", text, folder)
    for name in ETC_OF_HOST:  # what they are bound on
        if os.path.isdir(f"/etc/{name}"):
            os.mkdir(f"etc/{name}", 0o755, dir_fd=folder)
        else:
            _new_file(f"etc/{name}", "", folder)
    _check_python(prefix)
    for name in ("python", "python3"):
        os.symlink(python(prefix), f"bin/{name}", dir_fd=folder)


def arguments(place: str, prefix: str) -> list[str]:
    """bwrap and its arguments for a box whose tmpfs is mounted on `place`."""
    view = []
    for path in SYSTEM:
        if os.path.islink(path):
            view += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            view += ["--ro-bind", path, path]
    view += ["--ro-bind", f"{place}/etc", "/etc", "--ro-bind", f"{place}/bin", OWN_BIN]
    for name in ETC_OF_HOST:
        view += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    view += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for name, target in WRITABLE.items():
        view += ["--bind", f"{place}/{name}", target]
    if hidden(prefix):  # after /tmp and the like: it may lie in one of them
        view += ["--ro-bind", f"{place}/python", prefix]
    environment = {"PATH": f"{OWN_BIN}:{prefix}/bin:{PATH}", **ENVIRONMENT}
    settings = [part for name, value in environment.items() for part in ("--setenv", name, value)]
    namespaces = [f"--unshare-{name}" for name in ("user", "ipc", "pid", "net", "uts", "cgroup-try")]
    identity = ["--uid", str(UID), "--gid", str(UID), "--hostname", "box", "--cap-drop", "ALL"]
    # Its first process is ours: the end of that one ends all others before bwrap itself ends.
    life = ["--new-session", "--as-pid-1", "--clearenv", "--chdir", FOLDER]
    return ["bwrap", *namespaces, *identity, *life, *view, "--remount-ro", "/", *settings]


def _new_file(name: str, text: str, folder: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o644, dir_fd=folder), "w") as file:
        os.fchmod(file.fileno(), 0o644)  # whatever the umask of this process is
        file.write(text)


def _check_python(prefix: str) -> None:
    """SandboxError unless Python is there, and anybody may run it."""
    path = python(prefix)
    if not path.is_file():
        raise SandboxError(f"the bwrap sandbox finds no {path.name} in {path.parent}, where this one is installed")
    if not path.stat().st_mode & 0o001:
        raise SandboxError(f"{path} may only be run by its owner: chmod -R o+rX {prefix}")
