"""A wish to end that reaches a host whose output folder rank 0 does not see.

The launcher of every host turns SIGTERM into a stop file in its output folder; the run looks for that file on rank 0's
host alone. Where folders are not shared, the keeper of each of the others passes its file on through torchrun's store,
and rank 0 puts it where the run looks.

It refuses to know what follows from the wish. Invariant: a file that is older than the run is no wish.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from spmd_rl.world.launcher import STOP_FILE

LOOK_S = 0.5


class StopRelay:
    """One end of it, on rank 0 or on the keeper of another folder, on a thread that ends with the process.

    Args:
        began: wishes from before are not passed on; as `time.time()`.
        deadline_s: for torchrun's store to answer.
    """

    def __init__(self, rank: int, folder: str | Path, began: float, deadline_s: float) -> None:
        self._file, self._began = Path(folder) / STOP_FILE, began
        self._key = f"spmd_rl/stop_relay/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A connection of its own: one that another thread waits on lets nobody else through.
        self._store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=deadline_s))
        self._look = self._deliver if rank == 0 else self._pass_on
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stop-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No wish matters any more."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._done.wait(LOOK_S):
                self._look()
        except RuntimeError:  # the store is gone, and with it the run: the watchdog's business
            return

    def _pass_on(self) -> None:
        if self._file.exists():
            wished = self._file.stat().st_mtime
            self._file.unlink()
            if wished >= self._began:
                self._store.set(self._key, "")

    def _deliver(self) -> None:
        if self._store.check([self._key]):
            self._store.delete_key(self._key)
            self._file.touch()
