"""Files below a folder that a hostile program writes to, reached from outside of its box.

It refuses to know what the folder belongs to. Invariants: a path is relative and has no `..`; every step is taken from
the folder before it, by an open descriptor, and none follows a symbolic link, so nothing a program does at the same
time leads out; only regular files are read or written, and opening one never blocks.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from spmd_rl.envs.sandbox.interface import BoxFileError

LONGEST = 4096  # characters of a path
STEP = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # a pipe's other end is not waited for


def parts(path: str) -> list[str]:
    """The names along a path. BoxFileError unless it stays below the folder it starts in."""
    shown = ascii(path[:200])
    if len(path) > LONGEST:
        raise BoxFileError(f"{shown}… is too long: a path has at most {LONGEST} characters")
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in path):
        raise BoxFileError(f"{shown} is no path: it holds a character that no file name has")
    if path.startswith("/"):
        raise BoxFileError(f"{shown} is absolute: paths are relative to the working folder")
    names = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in names:
        raise BoxFileError(f"{shown} has a '..': paths stay in the working folder")
    if not names:
        raise BoxFileError(f"{shown} names no file")
    return names


def write_below(root: int, path: str, data: bytes, owner: int | None = None) -> None:
    """Make or replace a file below the open folder `root`; it and new folders belong to the user `owner`."""
    *folders, name = parts(path)
    with _explained(path), _descended(root, folders, make=True, owner=owner) as folder:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | FILE, 0o644, dir_fd=folder)
        with os.fdopen(file, "wb", buffering=0) as opened:
            _only_regular(file, path)
            if owner is not None:
                os.fchown(file, owner, owner)
            opened.truncate(0)
            rest = memoryview(data)
            while rest:
                rest = rest[opened.write(rest) :]


def read_below(root: int, path: str, max_bytes: int) -> bytes:
    """The first `max_bytes` bytes of a file below the open folder `root`."""
    *folders, name = parts(path)
    with _explained(path), _descended(root, folders, make=False, owner=None) as folder:
        file = os.open(name, os.O_RDONLY | FILE, dir_fd=folder)
        with os.fdopen(file, "rb") as opened:
            _only_regular(file, path)
            return opened.read(max_bytes)


@contextmanager
def _descended(root: int, folders: list[str], *, make: bool, owner: int | None) -> Iterator[int]:
    """An open folder, `folders` below `root`."""
    here = os.dup(root)
    try:
        for name in folders:
            new = make and _made(name, here)
            below = os.open(name, STEP, dir_fd=here)
            os.close(here)
            here = below
            if new and owner is not None:
                os.fchown(here, owner, owner)
        yield here
    finally:
        os.close(here)


def _made(name: str, folder: int) -> bool:
    """Make a folder. False when there is something of that name."""
    try:
        os.mkdir(name, 0o755, dir_fd=folder)
    except FileExistsError:
        return False
    return True


def _only_regular(file: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise BoxFileError(f"{path!a} is no regular file")


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """What the system refuses, as a BoxFileError."""
    try:
        yield
    except OSError as error:
        link = error.errno == errno.ELOOP
        why = "it is a symbolic link, and those are not followed" if link else error.strerror
        raise BoxFileError(f"{path[:200]!a}: {why}") from error
