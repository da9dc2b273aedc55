"""Calls for the event loop of another thread, with one wake-up for many.

To wake a loop is a system call that hands the interpreter's lock over, and costs more than what most calls do. It
refuses to know what is called. Invariant: what was posted is called once, in order, on the loop's thread, as long as
the loop runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Mailbox:
    """Of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posts: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._woken = False

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call it there, from any thread. RuntimeError when the loop is closed."""
        self._posts.append((function, arguments))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before anything is read: what is posted from here on wakes the loop again
        for _ in range(len(self._posts)):
            function, arguments = self._posts.popleft()
            self._loop.call_soon(function, *arguments)


class Mailboxes:
    """One for each loop that asks, until it is closed."""

    def __init__(self) -> None:
        self._of: dict[asyncio.AbstractEventLoop, Mailbox] = {}

    def mine(self) -> Mailbox:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        found = self._of.get(loop)
        if found is None:
            found = Mailbox(loop)
            self._of = {other: box for other, box in self._of.items() if not other.is_closed()} | {loop: found}
        return found

    def wait(self, future: Future[T]) -> Awaitable[T]:
        """The result of another thread's future, in the running loop; to cancel the wait cancels the future."""
        mailbox, mine = self.mine(), asyncio.get_running_loop().create_future()

        def told() -> None:
            if mine.cancelled():
                return
            if future.cancelled():
                mine.cancel()
            elif error := future.exception():
                mine.set_exception(error)
            else:
                mine.set_result(future.result())

        def done(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                mailbox.post(told)

        mine.add_done_callback(lambda mine: future.cancel() if mine.cancelled() else None)
        future.add_done_callback(done)
        return mine
