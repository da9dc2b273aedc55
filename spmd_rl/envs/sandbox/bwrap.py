"""A box by bubblewrap: the files stay in a tmpfs of their own, and every program gets new namespaces around them.

How it holds: what can be seen (`jail`), system calls (`seccomp`), a user without rights (`way`), limits of each process
(`limits`), of all processes together (`memory`, `cgroup`), and of all files (`keeper`). Not counted as memory where no
cgroup v2 does it: the kernel's own buffers of pipes and sockets. What /proc says of the machine itself (its processors,
its memory) can be read.

It refuses to know what runs. Invariants: when `exec` returns every process it started is gone, as the first one of its
PID namespace is; a box that can't be made as described is not made at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from spmd_rl.envs.sandbox.cgroup import Cgroup, make_cgroup
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
from spmd_rl.envs.sandbox.jail import FOLDER, arguments, furnish, hidden
from spmd_rl.envs.sandbox.keeper import Keeper
from spmd_rl.envs.sandbox.limits import MB, prlimit
from spmd_rl.envs.sandbox.memory import children, uses_more
from spmd_rl.envs.sandbox.program import Program, Start
from spmd_rl.envs.sandbox.seccomp import filter_program
from spmd_rl.envs.sandbox.way import Way, find_way

TOOLS = ("bwrap", "unshare", "nsenter", "mount", "prlimit", "sh")
# $1: the cgroup, or nothing; then the program. When the host runs out of memory a box goes before we do.
JOIN = """{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null
[ -z "$1" ] || echo 0 >"$1/cgroup.procs" || exit
shift
exec "$@"
"""
# The first process of a program's PID namespace: it waits for the program, and reaps what that leaves behind.
FIRST = '"$@"; exit $?'


class BwrapBox(Sandbox):
    """One box made by bubblewrap."""

    folder = FOLDER

    def __init__(self, limits: Limits, way: Way | None = None, prefix: str = sys.base_prefix) -> None:
        """`way`: by default the strongest that this machine has; `prefix`: where the Python to show is installed."""
        self._limits, self._way, self._prefix = limits, way, prefix
        self._one = asyncio.Lock()
        self._cgroup: Cgroup | None = None
        self._keeper: Keeper | None = None
        self._program: Program | None = None
        self._closing: asyncio.Task[None] | None = None
        self._work = -1  # the working folder, open while the box is

    async def open(self) -> None:
        """Make the box. SandboxError when that can't be done here."""
        if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
            raise SandboxError(
                f"the bwrap sandbox needs {' and '.join(missing)}: apt install bubblewrap util-linux mount (or your "
                "distribution's packages of these names); or use the docker sandbox; or, for code you trust, the "
                "subprocess one with allow_unsafe"
            )
        self._filter = filter_program()
        try:
            self._way = self._way or find_way()
            if self._way.cgroups is not None:
                self._cgroup = make_cgroup(self._limits, self._way.cgroups)
            prefix = self._prefix if hidden(self._prefix) else ""
            self._keeper = Keeper(self._way, self._limits, prefix, self._cgroup)
            await self._keeper.start()
            furnish(self._keeper.folder, self._prefix, self._way.uid)
            self._work = os.open("work", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._keeper.folder)
        except OSError as error:
            raise SandboxError(f"the bwrap sandbox can't be made: {error}") from error

    async def exec(self, command: Command, *, timeout_s: float = TIMEOUT_S, stdin: bytes | str = b"") -> Result:
        """Run a program; see `Sandbox.exec`."""
        argv = as_argv(command, "bash" if shutil.which("bash", path="/usr/bin:/bin") else "sh")
        async with self._one:
            self._check_open()
            try:
                return refused(argv) or await self._run(argv, timeout_s, as_bytes(stdin))
            except OSError as error:  # no descriptors left, or the like
                raise SandboxError(f"the bwrap sandbox could not run a program: {error}") from error

    async def write(self, path: str, data: bytes | str) -> None:
        """Make or replace a file; see `Sandbox.write`."""
        self._check_open()
        write_below(self._work, path, as_bytes(data), self._way.uid)

    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        """The start of a file; see `Sandbox.read`."""
        self._check_open()
        return read_below(self._work, path, max_bytes)

    async def close(self) -> None:
        """End and remove everything; see `Sandbox.close`."""
        self._closing = self._closing or asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._program is not None:
            await self._program.stop()
        if self._work >= 0:
            os.close(self._work)
            self._work = -1
        if self._keeper is not None:
            await self._keeper.stop()
        if self._cgroup is not None:
            await self._cgroup.remove()

    def _check_open(self) -> None:
        if self._work < 0:
            raise SandboxError("the box is closed, or was never opened")

    async def _run(self, argv: list[bytes], timeout_s: float, stdin: bytes) -> Result:
        with ExitStack() as stack:
            status = stack.enter_context(_Status())
            system_calls = stack.enter_context(_pipe_with(self._filter))
            start = Start(
                argv=[*self._around(system_calls, status.write), *argv],
                env={"PATH": os.environ.get("PATH", os.defpath)},
                end=status.end,
                pass_fds=(system_calls, status.write),
                owner=self._way.uid,
                watch=self._watch,
            )
            keep = self._limits.output_kb * 1024
            self._program = Program(start, timeout_s=timeout_s, stdin=stdin, keep=keep)
            ended = await self._program.end()
            code = status.said("exit-code")
        if code is None and not ended.killed:  # bwrap itself failed, or was killed from outside
            raise SandboxError(f"the bwrap sandbox could not run a program: {ended.stderr.text().strip()[-2000:]}")
        return ended.result(code)

    def _watch(self, pid: int) -> Killed:
        return "memory" if uses_more(pid, self._limits.memory_mb * MB) else ""

    def _around(self, system_calls: int, status: int) -> list[str]:
        """The arguments before those of the program, for one run."""
        join = ["sh", "-c", JOIN, "sh", "" if self._cgroup is None else str(self._cgroup.path)]
        jail = arguments(self._keeper.place, self._prefix)
        descriptors = ["--seccomp", str(system_calls), "--json-status-fd", str(status)]
        # The first process counts too, and has the same limits: a program could make it do what it likes.
        first = [*prlimit(self._limits, processes=self._limits.processes + 1), "sh", "-c", FIRST, "sh"]
        return [*join, *self._keeper.enter(), *jail, *descriptors, "--", *first]


class _Status:
    """What bwrap says about itself, in lines of JSON."""

    def __enter__(self) -> _Status:
        self._read, self.write = os.pipe()
        os.set_blocking(self._read, False)
        self._lines = b""
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._read)
        os.close(self.write)

    def said(self, key: str) -> int | None:
        """The number it gave for `key`, if it did by now."""
        with suppress(BlockingIOError):
            self._lines += os.read(self._read, 4096)
        complete = self._lines.rpartition(b"\n")[0].splitlines()
        return next((line[key] for line in map(json.loads, complete) if key in line), None)

    def end(self, pid: int) -> bool:
        """End a program; `pid` is the process outside: nsenter, whose child is bwrap, whose child is the first process.

        False when that one isn't there yet; what is killed before could go on half made.
        """
        if self.said("exit-code") is not None:
            return True
        for _ in ("bwrap", "the first process"):
            pid = next(iter(children(pid)), 0)
            if not pid:
                return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True


@contextmanager
def _pipe_with(data: bytes) -> Iterator[int]:
    """A descriptor to read a little data from."""
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    try:
        yield read
    finally:
        os.close(read)
