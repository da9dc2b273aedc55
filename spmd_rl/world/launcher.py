"""Start torchrun for this machine, and pass on a request to end as a run understands it.

torchrun answers SIGTERM by killing its ranks after 30 s and exits with 1, whatever they return. So it is made deaf to
it (clusters send it to every process), and SIGTERM and SIGUSR1 become a file in the output folder, on which the run
writes a checkpoint and ends by itself, with 0. It refuses to know what the program does.
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
from spmd_rl.world.meeting import Met, Node

NPROC = "--nproc-per-node"
STOP_FILE = "stop"  # in the output folder
JOB_FOLDER = "job"  # in the output folder: what a job of the cluster was made of
HURRY = signal.SIGUSR1  # what torchrun heeds in place of SIGTERM: its ranks have 30 s to end
_PR_SET_PDEATHSIG = 1


def take_nproc(argv: list[str]) -> tuple[list[str], int]:
    """Split off `--nproc-per-node N`; 0 = not given."""
    if NPROC not in argv:
        return argv, 0
    at = argv.index(NPROC)
    if at + 1 >= len(argv) or not argv[at + 1].isdigit():
        raise ConfigError([f"{NPROC} needs a number after it"], "command line")
    return argv[:at] + argv[at + 2 :], int(argv[at + 1])


def launch(
    program: str, argv: Sequence[str], processes: int, output_dir: str, node: Node | None = None, met: Met | None = None
) -> int:
    """Run `program` on so many processes of this machine, and wait; torchrun's exit code.

    node, met: this machine is one of several, which have met.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    world = ["--standalone"]
    if node and met:
        world = ["--nnodes", str(node.count), "--node-rank", str(node.rank)]
        world += ["--master-addr", node.address, "--master-port", str(node.port)]
        if met.interface:
            for back_end in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{back_end}_SOCKET_IFNAME", met.interface)
    if not (node and node.rank):  # of an earlier run; a new request is not to be missed
        (Path(output_dir) / STOP_FILE).unlink(missing_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *world, "--nproc-per-node", str(processes)]
    torchrun += ["--signals-to-handle", f"{HURRY.name},SIGINT,SIGHUP,SIGQUIT"]
    child = subprocess.Popen([*torchrun, program, *argv], preexec_fn=_deaf_to_sigterm)

    def ask(number: int, frame: FrameType | None) -> None:
        folder = Path(output_dir)
        if (folder / "config.toml").exists():
            (folder / STOP_FILE).touch()
        else:  # nothing has begun that could be saved
            child.send_signal(HURRY)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, ask)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:  # the terminal told torchrun as well, which ends its ranks
            continue


def _deaf_to_sigterm() -> None:
    """In torchrun's process, which hurries when this one dies. Ranks hear the signal again (`hear_sigterm`)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, HURRY)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def hear_sigterm() -> None:
    """In a rank, which inherits torchrun's deafness: until it has something to save, the signal ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
