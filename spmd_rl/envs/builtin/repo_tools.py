"""A repository in a box, and the tools that work on it: run a command, read a file, replace a text in a file.

What a tool answers is the same for the same calls before it: sets have one order, commits one date, and what differs
between two runs of the same program (times, addresses, dates) is written over. A command that asks for the time or for
chance itself can still tell.

It refuses to know what is to be done and what that is worth. Invariants: the model's mistakes are answers, the
sandbox's are raised, in the end (`Workplace.check`); no box is opened before a tool needs it; programs wait for their
turn before their deadline starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

from spmd_rl.envs.builtin.boxes import Boxes
from spmd_rl.envs.builtin.git_files import WHEN
from spmd_rl.envs.sandbox import BoxFileError, Limits, Result, Sandbox, SandboxError

LARGEST = 2**18  # bytes of a file that is read or edited
LIMITS = Limits(memory_mb=512, cpu_s=20, file_mb=16, folder_mb=64, files=5000, processes=32)
FOLDER = "/sandbox"  # what the model reads, wherever the box really is
BEFORE = f"""exec 2>&1
export PYTHONHASHSEED=0 GIT_AUTHOR_DATE="@{WHEN} +0000" GIT_COMMITTER_DATE="@{WHEN} +0000"
"""
_DAYS = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ 0-3]?[0-9]"
_SAME = [
    (re.compile(r"\bin [0-9]+\.[0-9]+ ?s\b"), "in 0.000s"),  # unittest
    (re.compile(r"\b[0-9]+m[0-9]+\.[0-9]+s\b"), "0m0.000s"),  # time
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "0x0"),
    (re.compile(rf"\b{_DAYS} +[0-9]{{2}}:[0-9]{{2}}(:[0-9]{{2}})?"), "Jan  1 00:00"),  # ls, date
    (re.compile(r"\b20[0-9]{2}-[0-9]{2}-[0-9]{2}[ T][0-9:]{5,8}(\.[0-9]+)?"), "2025-01-01 00:00"),
]


class Workplace:
    """One box with some files, opened when it is first needed. `async with` closes it."""

    def __init__(self, boxes: Boxes, files: Mapping[str, bytes], seconds: float) -> None:
        """`seconds` a command may take."""
        self._boxes, self._files, self._seconds = boxes, files, seconds
        self._stack = AsyncExitStack()
        self._box: Sandbox | None = None
        self._error: SandboxError | None = None

    async def __aenter__(self) -> Workplace:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def failed(self) -> bool:
        """Whether the sandbox failed."""
        return self._error is not None

    def check(self) -> None:
        """Raise what the sandbox raised. Whoever called a tool may have made an answer of it."""
        if self._error is not None:
            raise self._error

    async def run(self, command: str) -> Result:
        """Run a shell command in the repository."""
        try:
            box = await self._opened()
            async with self._boxes.turn():
                result = await box.exec(BEFORE + command, timeout_s=self._seconds)
            return replace(result, stdout=result.stdout.replace(box.folder, FOLDER))
        except SandboxError as error:
            self._error = error
            raise

    async def read(self, path: str) -> bytes:
        """A file. BoxFileError where there is none, or a larger one than LARGEST."""
        try:
            data = await (await self._opened()).read(path, LARGEST + 1)
        except SandboxError as error:
            self._error = error
            raise
        if len(data) > LARGEST:
            raise BoxFileError(f"{path[:200]!a} has more than {LARGEST} bytes")
        return data

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file. BoxFileError where that can't be."""
        try:
            await (await self._opened()).write(path, data)
        except SandboxError as error:
            self._error = error
            raise

    async def changed(self, files: Mapping[str, str]) -> dict[str, bytes] | None:
        """What these files are now, without those that can't be read; None when no tool was ever used."""
        if self._box is None:
            return None
        found = {}
        for path in files:
            try:
                found[path] = await self.read(path)
            except BoxFileError:
                continue
        return found

    async def _opened(self) -> Sandbox:
        if self._box is None:
            async with self._boxes.turn():
                self._box = await self._stack.enter_async_context(self._boxes.open(LIMITS, self._files))
        return self._box


class RepoTools:
    """The tools, for one attempt."""

    def __init__(self, place: Workplace) -> None:
        self._place = place

    async def bash(self, command: str) -> str:
        """Run a shell command in the repository; get its output, and its exit code where that is not 0."""
        result = await self._place.run(command)
        text = same(result.stdout).rstrip()
        if result.killed:
            last = f"stopped: {result.killed}"
        else:
            last = f"exit code {result.code}" if result.code or not text else ""
        return "\n".join(part for part in (text, last) if part)

    async def read(self, path: str) -> str:
        """Read a file of the repository."""
        try:
            return (await self._place.read(_relative(path))).decode(errors="replace")
        except BoxFileError as error:
            return f"error: {error}"

    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text in a file by another one.

        Args:
            old: the text as it stands there, exactly; it must stand there once.
        """
        try:
            data = await self._place.read(_relative(path))
            wanted = old.encode(errors="replace")
            count = data.count(wanted) if wanted else 0
            if count != 1:
                return f"error: old stands in the file {count} times; it must be there once" if wanted else _EMPTY
            await self._place.write(_relative(path), data.replace(wanted, new.encode(errors="replace")))
        except BoxFileError as error:
            return f"error: {error}"
        return "done"


_EMPTY = "error: old is empty; to make a new file use bash"


def same(text: str) -> str:
    """A program's output without what is different each time it runs."""
    for pattern, replacement in _SAME:
        text = pattern.sub(replacement, text)
    return text


def _relative(path: str) -> str:
    """The path from the working folder, which tracebacks name with it."""
    return path.removeprefix(f"{FOLDER}/")
