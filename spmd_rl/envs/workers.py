"""A function in processes of its own: a main thread for every call, and an end to calls that hang.

For libraries that need a main thread (signals) or don't release the interpreter's lock. It refuses to know what the
function does. Invariants: a call that misses its deadline ends with its whole pool, which is replaced; no process
outlives this one.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from spmd_rl.envs.deadline import TooSlow, within

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent ends


class Workers:
    """Processes that call one picklable function. Started with the first call."""

    def __init__(self, function: Callable[..., Any], processes: int) -> None:
        self._function, self._processes = function, processes
        self._pool: ProcessPoolExecutor | None = None
        self._free = asyncio.Semaphore(processes)  # so that a deadline does not count the time in a queue

    async def call(self, arguments: dict[str, Any], deadline_s: float) -> Any:
        """function(**arguments). TooSlow after `deadline_s`, ChildProcessError when the process died."""
        async with self._free:
            pool = self._pool = self._pool or self._start()
            future = asyncio.get_running_loop().run_in_executor(pool, _apply, self._function, arguments)
            try:
                return await within(deadline_s, future)
            except TooSlow:
                self._end(pool)
                raise
            except BrokenProcessPool as error:
                self._end(pool)
                raise ChildProcessError("its process ended, or one beside it hung and was ended") from error

    def _start(self) -> ProcessPoolExecutor:
        # Spawned, not forked: this process has threads that hold locks.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._processes, mp_context=context, initializer=_die_with_parent)

    def _end(self, pool: ProcessPoolExecutor) -> None:
        if self._pool is pool:
            self._pool = None
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def _apply(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return function(**arguments)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
