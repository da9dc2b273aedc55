"""Start torchrun for this machine, and pass on a request to end as a run understands it.

torchrun answers SIGTERM by killing its ranks after 30 s and exits with 1, whatever they return. So it never gets one:
SIGTERM and SIGUSR1 become a file in the output folder, on which the run writes a checkpoint and ends by itself, with 0.
It refuses to know what the program does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from spmd_rl.config.errors import ConfigError

NPROC = "--nproc-per-node"
STOP_FILE = "stop"  # in the output folder
_PR_SET_PDEATHSIG = 1


def take_nproc(argv: list[str]) -> tuple[list[str], int]:
    """Split off `--nproc-per-node N`; 0 = not given."""
    if NPROC not in argv:
        return argv, 0
    at = argv.index(NPROC)
    if at + 1 >= len(argv) or not argv[at + 1].isdigit():
        raise ConfigError([f"{NPROC} needs a number after it"], "command line")
    return argv[:at] + argv[at + 2 :], int(argv[at + 1])


def launch(program: str, argv: Sequence[str], processes: int, output_dir: str) -> int:
    """Run `program` on so many processes of this machine, and wait; torchrun's exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    child = subprocess.Popen([*torchrun, program, *argv], preexec_fn=_die_with_parent)

    def ask(number: int, frame: FrameType | None) -> None:
        folder = Path(output_dir)
        if (folder / "config.toml").exists():
            (folder / STOP_FILE).touch()
        else:  # nothing has begun that could be saved
            child.terminate()

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, ask)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:  # the terminal told torchrun as well, which ends its ranks
            continue


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
