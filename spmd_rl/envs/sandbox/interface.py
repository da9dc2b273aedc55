"""What every sandbox offers: a working folder, programs that run in it under limits, files in and out.

It refuses to know how a box is made; that is one module a kind. Invariants: what the model did (a program that fails,
hangs, prints without end, a path that leads nowhere) is a `Result` or a `BoxFileError`; what the machine did is a
`SandboxError`, which makes a failed episode and never a zero reward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

Kind = Literal["auto", "bwrap", "docker", "subprocess"]
Killed = Literal["", "deadline", "memory", "output", "folder", "closed"]

Command = str | Sequence[str]  # text for a shell, or a program and its arguments
TIMEOUT_S = 30.0
MAX_ARGUMENT = 2**17 - 1  # bytes: Linux takes no longer argument of a program, whatever the limits are
MAX_ARGUMENTS = 2**20  # bytes of all arguments together


class SandboxError(RuntimeError):
    """The sandbox itself failed or can't be had here; says nothing about the program in it."""


class BoxFileError(ValueError):
    """The box has no such file, or the path does not lie in its working folder; the text may go to the model."""


@dataclass(frozen=True)
class Limits:
    """What one box may use. All are positive."""

    memory_mb: int = 1024  # of all processes together; no process may address more either
    cpu_s: int = 60  # CPU seconds of one process
    file_mb: int = 64  # size of one file
    folder_mb: int = 256  # of all files that can be written, together
    files: int = 20_000  # how many files and folders there may be
    processes: int = 64  # processes and threads at a time
    open_files: int = 256  # of one process
    output_kb: int = 64  # kept of what a program prints, for stdout and stderr each: the first and the last half

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"sandbox: {limit.name} = {value!r} must be a whole number of at least 1")


@dataclass(frozen=True)
class Result:
    """How one program ended."""

    code: int  # its exit code; 128 + n when signal n ended it
    stdout: str  # what is no UTF-8 is replaced; a line in the middle says how much was left out
    stderr: str
    killed: Killed = ""  # why the sandbox ended it, "" when it ended by itself
    truncated: bool = False  # whether stdout or stderr lack something
    seconds: float = 0.0  # of wall-clock time

    @property
    def timed_out(self) -> bool:
        """True when it ran into its deadline."""
        return self.killed == "deadline"


class Sandbox(ABC):
    """One box: files persist from one program to the next, processes don't. Made by `open_sandbox`."""

    folder: str  # the working folder as programs in the box see it

    @abstractmethod
    async def open(self) -> None:
        """Make the box. SandboxError when that can't be done here."""

    @abstractmethod
    async def exec(self, command: Command, *, timeout_s: float = TIMEOUT_S, stdin: bytes | str = b"") -> Result:
        """Run a program in the working folder, one at a time; everything it started ends with it.

        `command` is text for a shell, or a program with its arguments; `timeout_s` are seconds of wall-clock time.
        Junk in the command is a `Result` with code 126. Raises SandboxError when the sandbox failed.
        """

    @abstractmethod
    async def write(self, path: str, data: bytes | str) -> None:
        """Make or replace the file `path`, relative to the working folder; folders on the way are made.

        Raises BoxFileError when it leads out of the folder or through a link, or the box is full.
        """

    @abstractmethod
    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        """The first `max_bytes` bytes of the file `path`, relative to the working folder.

        Raises BoxFileError when there is no such regular file, or it is reached through a link.
        """

    @abstractmethod
    async def close(self) -> None:
        """End whatever runs and remove everything. May be called again."""


def as_bytes(data: bytes | str) -> bytes:
    """Text as UTF-8; what has no encoding (a lone surrogate) becomes a question mark."""
    return data.encode("utf-8", "replace") if isinstance(data, str) else data


def as_argv(command: Command, shell: str) -> list[bytes]:
    """The program and its arguments; text becomes the argument of `shell -c`."""
    if not command or isinstance(command, bytes):
        raise TypeError(f"sandbox: exec needs shell text, or a list with a program and its arguments, not {command!r}")
    return [as_bytes(part) for part in ((shell, "-c", command) if isinstance(command, str) else command)]


def refused(argv: Sequence[bytes]) -> Result | None:
    """The result of a command that no system would start, None for any other."""
    if any(b"\0" in part for part in argv):
        why = "the command holds a NUL character"
    elif max(map(len, argv)) > MAX_ARGUMENT or sum(map(len, argv)) > MAX_ARGUMENTS:
        why = f"the command is too long: an argument takes at most {MAX_ARGUMENT} bytes; write it into a file instead"
    else:
        return None
    return Result(126, "", f"sandbox: {why}\n")
