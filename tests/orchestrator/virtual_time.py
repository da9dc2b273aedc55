"""An event loop whose clock jumps: where nothing is ready, it is at once the time of the next timer.

So a heavy tail of delays costs nothing, and a program in which nothing will ever happen again is an error at once.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Deadlock(RuntimeError):
    """Everybody waits and no timer runs."""


class _JumpingSelector(selectors.SelectSelector):
    """Waits for nothing; remembers how long it should have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if not ready and timeout is None:
            raise Deadlock("every task waits, and nothing is going to happen")
        if not ready:
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`loop.time()` and every timer follow the jumping clock. `problems` is what callbacks raised."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        self.problems: list[BaseException] = []
        super().__init__(self._clock)
        self._clock_resolution = 1e-6  # finer than floats are after years, no timer would ever be due
        self.set_exception_handler(self._remember)

    def time(self) -> float:
        return self._clock.now

    def _remember(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context:  # a callback; tasks whose error nobody asked for are no problem of their own
            self.problems.append(context["exception"])


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` in virtual time. What a callback raised comes first: asyncio itself would only log it."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        try:
            return runner.run(main)
        finally:
            if loop.problems:
                raise loop.problems[0]
