"""Start worker scripts as the ranks of a world, and never leave one behind.

`start_ranks` starts them bare, with a store that this process serves: nobody ends the others when one of them dies.
`torchrun` starts them as users do. Both are context managers that end everything they started; workers under torchrun
have sessions of their own, so they put their pids into files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass
class Started:
    """Processes, their output, and the folder where they leave results."""

    folder: Path
    processes: list[subprocess.Popen] = field(default_factory=list)

    def wait(self, timeout_s: float) -> list[int]:
        """Exit codes, once all have ended; an error with everything they said when they do not."""
        try:
            return [process.wait(timeout_s) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output()}") from None

    def output(self) -> str:
        """Everything on every screen."""
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("screen_*.txt")))

    def pids(self) -> list[int]:
        """Of workers that said so."""
        return [int(path.read_text()) for path in sorted(self.folder.glob("pid_*"))]

    def alive(self) -> list[int]:
        """Workers that still exist."""
        return [pid for pid in self.pids() if Path(f"/proc/{pid}").exists()]

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """One more process in a session of its own."""
        with open(self.folder / f"screen_{len(self.processes)}.txt", "w") as screen:
            self.processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=screen, stderr=subprocess.STDOUT, start_new_session=True
                )
            )

    def end(self) -> None:
        """Nothing stays behind."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | more


@contextlib.contextmanager
def start_ranks(script: str, size: int, folder: Path, *arguments: str) -> Iterator[Started]:
    """`script FOLDER ARGUMENTS...` once per rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    started = Started(folder)
    try:
        for rank in range(size):
            (folder / f"error_{rank}").mkdir()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": store.port}
            variables = environment(
                MASTER_ADDR="127.0.0.1",
                TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 is not to serve a store of its own
                TORCHELASTIC_ERROR_FILE=str(folder / f"error_{rank}" / "error.json"),
                **{name: str(value) for name, value in place.items()},
            )
            started.start([sys.executable, str(HERE / script), str(folder), *arguments], variables)
        yield started
    finally:
        started.end()


@contextlib.contextmanager
def torchrun(
    script: str, nproc: int, folder: Path, *arguments: str, options: tuple[str, ...] = ()
) -> Iterator[Started]:
    """`torchrun --nproc-per-node NPROC script FOLDER ARGUMENTS...`; torchrun's own logs land in folder/logs."""
    started = Started(folder)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
    launcher += [*(options or ("--standalone", "--local-addr", "127.0.0.1")), "--log-dir", str(folder / "logs")]
    try:
        started.start([*launcher, str(HERE / script), str(folder), *arguments], environment())
        yield started
    finally:
        started.end()
