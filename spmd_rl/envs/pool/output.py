"""What a worker prints, line by line, with its name before it, and never more than a log can bear.

Invariants: the pipe is always read, so no worker waits for a reader for long; a line has `LINE_CHARS` characters at
most; a worker that prints for ever gets `PER_S` lines a second into the log, and the log says how many it did not get.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

LINE_CHARS = 2000
BURST, PER_S = 200, 20.0  # lines that may come at once, and for ever
LAST_WORDS = 30  # lines that are kept for the message about a death
PAUSE_S = 0.01  # after each piece that is left out: to read them all at full speed would take the pool's whole time
END_S = 0.5  # how long the end of the pipe is waited for: a process that the worker left behind may hold it open


class Output(asyncio.Protocol):
    """The reading end of one worker's standard output and error."""

    def __init__(self, name: str, log: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self.last: deque[str] = deque(maxlen=LAST_WORDS)
        self._name, self._log, self._clock = name, log, clock
        self._partial = b""
        self._room, self._at = float(BURST), clock()
        self._left_out = 0
        self._transport: asyncio.ReadTransport | None = None
        self._ended = asyncio.Event()

    async def end(self) -> None:
        """Read what is left, and close."""
        if self._transport is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), END_S)
            self._transport.close()
        self._take(b"\n" if self._partial else b"")
        if self._left_out:
            self._say(f"({self._left_out} more lines)")
            self._left_out = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.ReadTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._take(data)
        if self._left_out and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(PAUSE_S, self._transport.resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()

    def _take(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line)
        self._partial = self._partial[-4 * LINE_CHARS :]  # who never ends a line is no reason to keep it all

    def _line(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]  # of a bar that redraws itself the end
        if len(text) > LINE_CHARS:
            text = f"{text[:LINE_CHARS]} … ({len(text) - LINE_CHARS} more characters)"
        self.last.append(text)
        now = self._clock()
        self._room, self._at = min(float(BURST), self._room + PER_S * (now - self._at)), now
        if self._room < 1:
            self._left_out += 1
            return
        self._room -= 1
        if self._left_out:
            text, self._left_out = f"({self._left_out} lines left out)\n[{self._name}] {text}", 0
        self._say(text)

    def _say(self, text: str) -> None:
        self._log(f"[{self._name}] {text}")
