"""Start the whole program by torchrun, as users do, and say how it ended and what it left behind.

Every launch carries a mark in its environment, which its processes inherit: so all of them are found again, also those
that torchrun started in sessions of their own, or that somebody stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from spmd_rl.observe.metrics import read_metrics

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs/quickstart.toml")
MARK = "SPMD_RL_TEST_LAUNCH"
SHARED_MEMORY = Path("/dev/shm")
TIMEOUT_S = 240.0
LEFT_S = 10.0  # that shared memory which nobody uses may be there
# A gigabyte of zeros for a KV cache, vLLM's least, takes an engine 2 s of a processor; no test fills these 64 MiB.
SMALL_CACHE = ["--inference.vllm.num_gpu_blocks_override", "2048"]


@dataclass(frozen=True)
class Run:
    """A launch that ended."""

    returncode: int
    output: str  # what the screen showed
    folder: Path  # output_dir
    records: list[dict[str, Any]]  # of metrics.jsonl

    def phase(self, name: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["phase"] == name]

    @property
    def versions(self) -> list[dict[str, Any]]:
        """One record per policy version: what its pull and its probe showed."""
        return self.phase("start") + self.phase("rl")

    def last_lines(self, count: int = 8) -> str:
        """The end of the screen, without empty lines."""
        return "\n".join([line for line in self.output.splitlines() if line.strip()][-count:])


class Launch:
    """A run in progress; leaving the context kills whatever is left of it.

    args: of `main.py rl` (or another `command`), without the output folder. wrap: a command that runs the command.
    restarts: how often torchrun may start again. torchrun: False lets the program start it by itself. program: in
    place of `main.py`. small_cache: as in `SMALL_CACHE`, unless args say otherwise.
    """

    def __init__(
        self,
        folder: Path,
        args: list[str],
        nproc: int = 3,
        env: dict[str, str] | None = None,
        wrap: tuple = (),
        command: str = "rl",
        restarts: int = 0,
        torchrun: bool = True,
        program: Path = ROOT / "spmd_rl/main.py",
        small_cache: bool = True,
    ) -> None:
        self.folder, self._mark = folder, uuid.uuid4().hex
        start = [sys.executable]
        if torchrun:
            start += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
            start += ["--nproc-per-node", str(nproc), "--max-restarts", str(restarts)]
        whole = [
            *start,
            str(program),
            command,
            *(SMALL_CACHE if small_cache else ()),
            *args,
            "--output-dir",
            str(folder),
        ]
        whole += [] if torchrun else ["--nproc-per-node", str(nproc)]
        self._screen = folder.with_name(f"{folder.name}-screen.txt")
        self._shared_memory = set(os.listdir(SHARED_MEMORY))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "VLLM_", "SPMD_RL"))}
        with open(self._screen, "wb") as screen:
            self._process = subprocess.Popen(
                [*wrap, *whole],
                env=environment | {"OMP_NUM_THREADS": "1", MARK: self._mark} | (env or {}),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def terminate(self) -> None:
        """SIGTERM to whoever was started: torchrun, or the program that started it."""
        self._process.terminate()

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()  # it does not carry its mark yet when it has only just begun
        self._process.wait()

    def wait(self, timeout_s: float = TIMEOUT_S) -> Run:
        """The end of the run. AssertionError when it does not come, or leaves processes or shared memory behind."""
        try:
            returncode = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {timeout_s:g} s; the screen shows:\n{self.output[-4000:]}") from None
        assert not self.processes(), f"still there: {self.processes()}; the screen shows:\n{self.output[-4000:]}"
        assert not (left := self._left_behind()), f"shared memory left behind: {left}"
        return Run(returncode, self.output, self.folder, self._records())

    @property
    def ended(self) -> bool:
        """Whether whoever was started has ended."""
        return self._process.poll() is not None

    @property
    def output(self) -> str:
        return self._screen.read_text(errors="replace")

    def wait_for_step(self, step: int, timeout_s: float = TIMEOUT_S) -> None:
        """Until this step of training is in the metrics."""
        deadline = time.monotonic() + timeout_s
        while not any(record["phase"] in ("rl", "sft") and record["step"] >= step for record in self._records()):
            assert self._process.poll() is None, f"ended before step {step}; the screen shows:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"no step {step} within {timeout_s:g} s:\n{self.output[-4000:]}"
            time.sleep(0.1)

    def _records(self) -> list[dict[str, Any]]:
        metrics = self.folder / "metrics.jsonl"
        return list(read_metrics(metrics)) if metrics.exists() else []

    def _left_behind(self) -> set[str]:
        """Shared memory that was not there before, and stays: what a launch beside this one just makes is soon used."""
        deadline = time.monotonic() + LEFT_S
        while (left := _orphans() - self._shared_memory) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def processes(self) -> list[int]:
        """Every live process of this launch."""
        mark = f"{MARK}={self._mark}".encode()
        return [pid for pid, environ in _environments() if mark in environ.split(b"\0")]

    def pid_of(self, rank: int) -> int:
        """The process of a rank, as soon as torchrun has started it."""
        wanted = {f"{MARK}={self._mark}".encode(), f"RANK={rank}".encode()}
        while not (pids := [pid for pid, environ in _environments() if wanted <= set(environ.split(b"\0"))]):
            assert self._process.poll() is None, f"ended before rank {rank} was there:\n{self.output[-4000:]}"
            time.sleep(0.02)
        return pids[0]


def run(
    folder: Path,
    args: list[str],
    nproc: int = 3,
    timeout_s: float = TIMEOUT_S,
    env: dict[str, str] | None = None,
    wrap: tuple = (),
    command: str = "rl",
    small_cache: bool = True,
) -> Run:
    """Launch and wait."""
    with Launch(folder, args, nproc, env, wrap, command, small_cache=small_cache) as launch:
        return launch.wait(timeout_s)


def _environments() -> Iterator[tuple[int, bytes]]:
    """Process id and environment of what this user may look into; a process that has ended has none."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            yield int(environ.parent.name), environ.read_bytes()


def _orphans() -> set[str]:
    """Shared memory that no live process uses."""
    names = set(os.listdir(SHARED_MEMORY))
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text()
            names -= {name for name in names if f"{SHARED_MEMORY}/{name}" in text}
    return names
