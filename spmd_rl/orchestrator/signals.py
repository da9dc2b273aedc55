"""SIGTERM and SIGUSR1 ask a run for its end; the event loop hears them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from spmd_rl.orchestrator.steering import Steering


class Hurries(Protocol):
    """The watchdog."""

    on_signal: Callable[[str], object]  # hears the signals, on the main thread

    def hurry(self) -> None:
        """Somebody may be dead already: wait for nobody's sign of life for long."""
        ...


@contextlib.contextmanager
def stop_signals(steering: Steering, watchdog: Hurries) -> Iterator[None]:
    """Inside, the signals ask for the end: a checkpoint first. With SIGTERM somebody may be dead already."""
    loop, before = asyncio.get_running_loop(), watchdog.on_signal

    def stop() -> None:
        watchdog.hurry()
        steering.stop()

    watchdog.on_signal = lambda name: loop.call_soon_threadsafe(stop)  # the loop may run on another thread
    try:
        yield
    finally:
        watchdog.on_signal = before
