"""When supervised training ends early: rank 0 is asked, and every rank ends behind the same step.

SIGTERM, SIGUSR1 and the stop file of `world/launcher.py` ask rank 0, a file also while the run starts. Behind step k it
writes down that step k + 1 is the last one, before it begins with it; no rank can complete step k + 1 without rank 0,
so all of them read it in time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Protocol

from spmd_rl.world.launcher import STOP_FILE


class Store(Protocol):
    """Of the process group."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class EarlyStop:
    """Asked by every rank behind every step.

    Args:
        folder: the run's output folder.
        hurry: called when somebody asks with a signal.
    """

    def __init__(self, store: Store, rank: int, folder: str | Path, hurry: Callable[[], None]) -> None:
        self._store, self._rank, self._file = store, rank, Path(folder) / STOP_FILE
        self._key = f"spmd_rl/sft_stop/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._hurry, self._asked, self._last = hurry, False, -1
        self.stopped_at = -1

    def heed_signals(self) -> None:
        """From now on rank 0 hears them."""
        if self._rank == 0:
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, self._ask)

    def __call__(self, step: int) -> bool:
        """Whether `step`, which is complete on this rank, was the last one."""
        if self._last < 0 and self._rank == 0 and (self._asked or self._file.exists()):
            self._file.unlink(missing_ok=True)
            self._last = step + 1
            self._store.set(self._key, str(self._last))
        if self._last < 0 and self._rank and self._store.check([self._key]):
            self._last = int(self._store.get(self._key))
        if 0 <= self._last <= step:
            self.stopped_at = step
        return self.stopped_at >= 0

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self._hurry()
