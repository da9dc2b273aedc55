"""SIGTERM and SIGUSR1 ask a run for its end; the event loop hears them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Protocol

from spmd_rl.orchestrator.steering import Steering


class Hurries(Protocol):
    """The watchdog."""

    def hurry(self) -> None:
        """Somebody may be dead already: wait for nobody's sign of life for long."""
        ...


@contextlib.contextmanager
def stop_signals(steering: Steering, watchdog: Hurries) -> Iterator[None]:
    """Inside, the signals ask for the end: a checkpoint first. With SIGTERM somebody may be dead already."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        watchdog.hurry()
        steering.stop()

    for number in (signal.SIGTERM, signal.SIGUSR1):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            loop.remove_signal_handler(number)
