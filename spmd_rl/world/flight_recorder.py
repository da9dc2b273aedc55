"""NCCL's flight recorder: the last collectives of every rank, written into the output folder when a run fails.

torch keeps them in a ring buffer of its own; here is only when and where they are written. The files are those that
torch itself would write at a time-out, so that its `torchfrtrace FOLDER -p rank_` reads them.

It refuses to know what a verdict is. Invariants: writing takes no longer than `WRITE_S`, or it ends the process, also
when it hangs inside of the driver with Python's lock held; it never raises. So whoever calls it has said before what
must be said.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import torch

ENTRIES = 2000  # collectives per rank; the oldest make room
WRITE_S = 10.0
FOLDER, PREFIX = "flight_recorder", "rank_"


def arm(output_dir: str) -> None:
    """Before the first process group: torch reads its environment once. What is set there already stays."""
    older = os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", older or str(ENTRIES))
    older = os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    prefix = str(Path(output_dir).resolve() / FOLDER / PREFIX)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", older or prefix)


class FlightRecorder:
    """What this rank's process groups did, of which some are NCCL's.

    Args:
        rank: in the file's name.
    """

    def __init__(self, rank: int) -> None:
        prefix = Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"])
        self.path = prefix.with_name(f"{prefix.name}{rank}")
        self.path.parent.mkdir(parents=True, exist_ok=True)  # torch's own writer needs it too

    def write(self, write_s: float = WRITE_S) -> None:
        """Write the file. A failure is said on stderr; a hang ends this process with code 1."""
        # A timer of the interpreter's own, in C: no thread of Python's would run while a call into torch has the lock.
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(write_s, exit=True, file=nowhere)
            try:
                entries = torch._C._distributed_c10d._dump_nccl_trace(
                    includeCollectives=True, includeStackTraces=True, onlyActive=False
                )
                part = self.path.with_name(f"part_{self.path.name}")  # which no reader takes for a rank's
                part.write_bytes(entries)
                part.rename(self.path)
            except Exception as error:
                print(f"no flight recorder: {type(error).__name__}: {error}", file=sys.stderr)
            finally:
                faulthandler.cancel_dump_traceback_later()
