"""How late an event loop is: what a timer of a few milliseconds waits beyond its time.

A loop that is late makes everybody wait who lives in it: rollouts, routers, deadlines. It refuses to know why it is
late. Invariant: nothing here grows, however long nobody reads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

import numpy as np

PERIOD_S = 0.05
KEPT = 4096  # samples; about three minutes of one loop


class LoopLag:
    """Measures the event loop in which it was started."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._lags_ms: deque[float] = deque(maxlen=KEPT)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin, in the running loop; nothing happens when it has begun."""
        if self._timer is None:
            self._next(asyncio.get_running_loop())

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take(self) -> np.ndarray:
        """float32[k]: milliseconds of delay since the last call, at most the last `KEPT`."""
        taken = np.asarray(self._lags_ms, dtype=np.float32)
        self._lags_ms.clear()
        return taken

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + self._period_s
        self._timer = loop.call_at(due, self._tick, loop, due)

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._lags_ms.append(max(0.0, loop.time() - due) * 1e3)
        self._next(loop)


def lag_metrics(prefix: str, lags_ms: Iterable[float]) -> dict[str, float]:
    """`<prefix>lag_ms_p50`, `_p99` and `_max`; nothing where nothing was measured."""
    lags = np.fromiter(lags_ms, dtype=np.float64)
    if not len(lags):
        return {}
    p50, p99 = np.percentile(lags, [50, 99])
    return {
        f"{prefix}lag_ms_p50": float(p50),
        f"{prefix}lag_ms_p99": float(p99),
        f"{prefix}lag_ms_max": float(lags.max()),
    }
