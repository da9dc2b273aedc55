"""A user's function beside the event loop, sync or async: what blocks or hangs in it holds up nothing else.

Sync functions get a thread per call, async ones share a loop on one thread: a client that was made in one call can be
used in the next one, also where the caller's loop is another by then. It refuses to know what the function does.
Invariants: at most `at_once` threads are waited for; one that hangs is left behind, takes no other's place and does
not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any

from spmd_rl.envs.deadline import within

THREADS = 16


class Threads:
    """Calls one function in threads of this process."""

    def __init__(self, function: Callable[..., Any], at_once: int = THREADS) -> None:
        self._function = function
        self._free = asyncio.Semaphore(at_once)  # so that a deadline does not count the time in a queue
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, arguments: dict[str, Any], deadline_s: float) -> Any:
        """function(**arguments), awaited where that can be. TooSlow after `deadline_s`."""
        if inspect.iscoroutinefunction(self._function):
            return await within(deadline_s, self._awaited(self._function(**arguments)))
        async with self._free:
            return await within(deadline_s, self._threaded(arguments))

    async def _threaded(self, arguments: dict[str, Any]) -> Any:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a thread can't be cancelled: its result is dropped
        # No pool: its threads would be waited for when the process ends, and those that hang would fill it.
        Thread(target=_apply, args=(future, self._function, arguments), name="reward", daemon=True).start()
        result = await asyncio.wrap_future(future)
        return await self._awaited(result) if inspect.isawaitable(result) else result

    async def _awaited(self, work: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await work

        self._loop = self._loop or _start_loop()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(awaited(), self._loop))


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="reward-loop", daemon=True).start()
    return loop


def _apply(future: Future[Any], function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    try:
        future.set_result(function(**arguments))
    except BaseException as error:
        # A StopIteration can't pass through a future, and a SystemExit would end the whole program.
        passes = isinstance(error, Exception) and not isinstance(error, StopIteration)
        future.set_exception(error if passes else RuntimeError(f"it raised {error!r}"))
