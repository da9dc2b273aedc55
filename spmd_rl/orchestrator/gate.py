"""The gate: when what a rollout does between two generations takes effect.

In free mode at once. In lockstep nothing may depend on how long an environment thinks (a reward in a thread, a tool in
another process): rollouts that are through wait at the gate until all are, and pass in order of their ids.

It refuses to know what rollouts do. Invariant (lockstep): the order in which rollouts pass is a function of what they
heard, never of time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """An open gate: everybody passes at once."""

    def enter(self, rollout: int) -> None:
        """The rollout begins, thinking."""

    async def land(self, rollout: int) -> None:
        """It is through with thinking, and passes when it may."""

    @contextmanager
    def away(self, rollout: int) -> Iterator[None]:
        """It waits for an engine inside of this context, and thinks again behind it."""
        yield

    def leave(self, rollout: int) -> None:
        """It is over."""


class OrderedGate(Gate):
    """The gate of lockstep.

    A rollout that waits for several generations at once thinks when the last of them is there.
    """

    def __init__(self, loop: QuietLoop) -> None:
        self._loop = loop
        self._thinking: set[int] = set()
        self._away: Counter[int] = Counter()
        self._landed: list[tuple[int, int, asyncio.Future[None]]] = []  # (rollout, number of landing, who waits)
        self._landings = 0
        self._changed = asyncio.Event()

    def enter(self, rollout: int) -> None:
        self._thinking.add(rollout)

    async def land(self, rollout: int) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._landed.append((rollout, self._landings, future))
        self._landings += 1
        self._rest(rollout)
        await future

    @contextmanager
    def away(self, rollout: int) -> Iterator[None]:
        self._rest(rollout)
        self._away[rollout] += 1
        try:
            yield
        finally:
            self._away[rollout] -= 1
            if not self._away[rollout]:
                del self._away[rollout]
                self._thinking.add(rollout)

    def leave(self, rollout: int) -> None:
        self._rest(rollout)

    async def settle(self) -> None:
        """Let everybody pass, again and again, until all rollouts wait for engines and nothing is left to do."""
        while True:
            await self._loop.quiet()
            if self._thinking:
                self._changed.clear()
                await self._changed.wait()
            elif self._landed:
                landed, self._landed = sorted(self._landed, key=lambda entry: entry[:2]), []
                for _, _, future in landed:
                    if not future.done():  # else its rollout was cancelled
                        future.set_result(None)
            else:
                return

    def _rest(self, rollout: int) -> None:
        self._thinking.discard(rollout)
        self._changed.set()


class QuietLoop(asyncio.SelectorEventLoop):
    """An event loop that can say when nothing is ready to run."""

    def __init__(self) -> None:
        self._watching = _WatchingSelector()
        super().__init__(self._watching)

    async def quiet(self) -> None:
        """Return when no callback is ready: everybody waits for a timer, a thread or the network."""
        future: asyncio.Future[None] = self.create_future()
        self._watching.waiting.append(future)
        await future


class _WatchingSelector(selectors.DefaultSelector):
    """asyncio asks its selector to wait only when nothing is ready to run."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[asyncio.Future[None]] = []

    def select(self, timeout: float | None = None) -> list:
        if timeout == 0 or not self.waiting:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            waiting, self.waiting = self.waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)
        return ready
