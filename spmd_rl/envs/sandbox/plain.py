"""Programs as plain subprocesses in a temporary folder: for code that you trust, where there is no other way.

Stopped: what `limits` says of each process, the deadline, and looks at what all of them use. NOT stopped: reading and
writing every file this user can, the network, signals to this user's processes, more processes than the limit (they
are not counted), a program that leaves its session and so outlives its run, memory and files taken faster than one can
look. It refuses to be used on model-written code unless asked to by name (`open_sandbox`). Invariant: the environment
of this process, with whatever secrets are in it, is not handed on.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile

from spmd_rl.envs.sandbox.folder import read_below, write_below
from spmd_rl.envs.sandbox.interface import (
    TIMEOUT_S,
    Command,
    Killed,
    Limits,
    Result,
    Sandbox,
    SandboxError,
    as_argv,
    as_bytes,
    refused,
)
from spmd_rl.envs.sandbox.jail import python
from spmd_rl.envs.sandbox.limits import MB, prlimit
from spmd_rl.envs.sandbox.memory import uses_more
from spmd_rl.envs.sandbox.program import Program, Start, end_group

LATER_S = 1.0  # after its deadline a program ends by itself: when we are killed, nobody else ends it


class PlainBox(Sandbox):
    """A temporary folder, and subprocesses with limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._one = asyncio.Lock()
        self._program: Program | None = None
        self._root, self._open = "", -1

    async def open(self) -> None:
        """Make the folder; see `Sandbox.open`."""
        if missing := [tool for tool in ("prlimit", "timeout", "sh") if shutil.which(tool) is None]:
            raise SandboxError(
                f"the subprocess sandbox needs {' and '.join(missing)}: apt install util-linux coreutils"
            )
        self._root = tempfile.mkdtemp(prefix="spmd_rl-box-")
        self.folder, self._bin = f"{self._root}/work", f"{self._root}/bin"
        os.mkdir(self.folder)
        os.mkdir(self._bin)
        for name in ("python", "python3"):
            os.symlink(python(sys.base_prefix), f"{self._bin}/{name}")
        self._open = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    async def exec(self, command: Command, *, timeout_s: float = TIMEOUT_S, stdin: bytes | str = b"") -> Result:
        """Run a program; see `Sandbox.exec`."""
        argv = as_argv(command, "bash" if shutil.which("bash") else "sh")
        async with self._one:
            self._check_open()
            if (result := refused(argv)) is not None:
                return result
            # The number of processes is counted for the whole user, who has others: no limit here.
            limited = [*_timeout(timeout_s + LATER_S), *prlimit(self._limits, processes=None), *argv]
            start = Start(limited, self._environment(), end_group, self.folder, watch=self._watch)
            keep = self._limits.output_kb * 1024
            self._program = Program(start, timeout_s=timeout_s, stdin=as_bytes(stdin), keep=keep)
            return (await self._program.end()).result()

    async def write(self, path: str, data: bytes | str) -> None:
        """Make or replace a file; see `Sandbox.write`."""
        self._check_open()
        write_below(self._open, path, as_bytes(data))

    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        """The start of a file; see `Sandbox.read`."""
        self._check_open()
        return read_below(self._open, path, max_bytes)

    async def close(self) -> None:
        """End what runs, remove the folder; see `Sandbox.close`."""
        if self._open >= 0:
            os.close(self._open)
            self._open = -1
        try:
            if self._program is not None:
                await self._program.stop()
        finally:
            if self._root:
                shutil.rmtree(self._root, ignore_errors=True)

    def _check_open(self) -> None:
        if self._open < 0:
            raise SandboxError("the box is closed, or was never opened")

    def _environment(self) -> dict[str, str]:
        path = f"{self._bin}:{os.environ.get('PATH', os.defpath)}"
        return {"PATH": path, "HOME": self.folder, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}

    def _watch(self, pid: int) -> Killed:
        if uses_more(pid, self._limits.memory_mb * MB):
            return "memory"
        return "folder" if _overfull(self.folder, self._limits) else ""


def _timeout(seconds: float) -> list[str]:
    return ["timeout", "--signal=KILL", f"{seconds:.3f}"]


def _overfull(folder: str, limits: Limits) -> bool:
    """True when there is more below a folder than the limits allow. Links are not followed."""
    used, count, queue = 0, 0, [folder]
    while queue:
        try:
            with os.scandir(queue.pop()) as entries:
                for entry in entries:
                    count += 1
                    used += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)
        except OSError:  # it was removed meanwhile, or is not for us to see
            continue
        if count > limits.files or used > limits.folder_mb * MB:
            return True
    return False
