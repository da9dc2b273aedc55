"""Steering: what somebody tells a run while it goes on (`tools/steer.py`), or asks by a signal.

Commands are files in OUTPUT/steer, taken in order of their names and removed when they are taken: no port is open and
nothing listens. One that begins with @STEP waits for that step (`tools/replay.py` repeats a run's commands so).
SIGTERM and SIGUSR1 on rank 0, and a file OUTPUT/stop, mean `stop`.

It refuses to know what commands do; the loop asks for them at the boundary of a step. Invariant: a command that can't
be understood changes nothing and is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from pathlib import Path

from spmd_rl.world.launcher import STOP_FILE

FOLDER = "steer"
PLAIN = ("pause", "resume", "save", "eval", "stop")
SETTABLE = ("lr",)
LOOK_S = 0.5


class SteerError(ValueError):
    """No command."""


def parse(command: str) -> tuple[str, str, float]:
    """("set", key, value) or (word, "", 0). SteerError says what there is."""
    words = command.split()
    if len(words) == 1 and words[0] in PLAIN:
        return words[0], "", 0.0
    if len(words) == 2 and words[0] == "set" and "=" in words[1]:
        key, _, value = words[1].partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if key in SETTABLE and 0 <= number < float("inf"):
            return "set", key, number
        raise SteerError(f"{command!r}: only {', '.join(SETTABLE)} can be set while a run goes on, to 0 or more")
    raise SteerError(f"{command!r} is no command: say set lr=NUMBER, {', '.join(PLAIN)}")


class Steering:
    """Commands for one run.

    Args:
        folder: its output folder.
        show: told about files that hold no command.
        heard: called when something has come, so that a loop that waits looks up.
    """

    def __init__(self, folder: str | Path, show: Callable[[str], object]) -> None:
        self._folder, self._show = Path(folder), show
        self._commands: deque[tuple[int, str]] = deque()  # (step to wait for, command)
        self._stop = False
        self.heard: Callable[[], object] = lambda: None
        self._changed = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """True from the moment at which somebody asked for the end."""
        return self._stop or (0, "stop") in self._commands

    def stop(self) -> None:
        """Ask for the end; callable from a signal handler of the event loop."""
        self._stop = True
        self._changed.set()
        self.heard()

    def take(self, step: int) -> list[str]:
        """The commands since the last call that are due before `step`, oldest first."""
        self._look()
        due = [command for at, command in self._commands if at <= step]
        self._commands = deque(entry for entry in self._commands if entry[0] > step)
        return [*(c for c in due if c != "stop"), *(["stop"] if self._stop or "stop" in due else [])]

    async def changed(self, most_s: float) -> None:
        """Until something new has come, or so many seconds are over."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), most_s)

    async def watch(self) -> None:
        """Look for commands, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()

    def _look(self) -> None:
        before = len(self._commands)
        if (self._folder / STOP_FILE).exists():
            (self._folder / STOP_FILE).unlink()
            self.stop()
        for path in sorted((self._folder / FOLDER).glob("*.txt")):
            command = path.read_text(encoding="utf-8", errors="replace").strip()
            path.unlink()
            at, _, rest = command.partition(" ")
            step, command = (int(at[1:]), rest) if at[:1] == "@" and at[1:].isdigit() else (0, command)
            try:
                parse(command)
                self._commands.append((step, command))
            except SteerError as error:
                self._show(f"steering: {error}\n")
        if len(self._commands) > before:
            self._changed.set()
            self.heard()
