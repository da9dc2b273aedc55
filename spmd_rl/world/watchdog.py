"""Liveness, apart from the clock (which would tick on beside a main thread that hangs).

Every process has one watchdog thread with its own client of torchrun's store. It posts a heartbeat: a counter, the main
thread's progress and stage, who and where it is. Rank 0 judges all, all judge rank 0. The first rank that
finds a reason writes the verdict with one compare-and-set; every rank reads it, writes the torchelastic error file
with the *same* message and traceback, and leaves with code 1, so that the first failure is what the screen ends with.

A cut link leaves a wait for the store without an answer and without an error: a second thread notices that.

Invariants: exactly one verdict per attempt; a process that only waits for others declares a stage without deadline and
is never blamed for the wait; a watchdog that was itself asleep forgives before it judges.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

from torch.distributed import DistError, TCPStore

from spmd_rl.world.error_file import write_error_file

PERIOD_S = 0.25
HURRY_S = 3.0
EXIT_CODE = 1


class Ended(RuntimeError):
    """A signal came while there was nothing to save."""


@dataclass(frozen=True)
class Verdict:
    """Why the run ends, as every rank reports it."""

    rank: int  # who failed
    by: int  # who says so
    role: str
    host: str
    pid: int
    stage: str
    message: str
    traceback: str = ""

    def render(self) -> str:
        """For people: the traceback first, the reason last."""
        where = f"rank {self.rank} ({self.role}) on {self.host}, pid {self.pid}, stage '{self.stage}'"
        return f"{self.traceback}\n{where}: {self.message}".strip()


@dataclass
class _Seen:
    """What is known of another rank's heartbeat, by this process's own clock."""

    beat: dict | None
    beat_at: float
    progress_at: float


class Watchdog:
    """One per process; `start()` once the store is up.

    Args:
        heartbeat_s: a process silent for this long is dead.
        start_s: a process that has not shown up after this long never will.

    `on_verdict` is called with the rendered verdict before the process ends; by default rank 0 prints it. `span` makes
    the context of a stage that works, `tick` is told of ticks, and `last_words` is called when the verdict is out, just
    before the end; by default they do nothing.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        role: str,
        heartbeat_s: float,
        start_s: float = 600.0,
    ) -> None:
        self.rank, self.world_size, self.role, self.heartbeat_s = rank, world_size, role, heartbeat_s
        self._start_s, self._patience_s = start_s, heartbeat_s
        self.on_verdict: Callable[[str], object] = lambda text: print(text, file=sys.stderr) if rank == 0 else None
        self.span: Callable[[str], contextlib.AbstractContextManager[None]] = lambda name: contextlib.nullcontext()
        self.tick: Callable[[int, int], object] = lambda start_ns, end_ns: None
        self.last_words: Callable[[], object] = lambda: None
        self._stage, self._deadline_s, self._progress = "start", None, 0
        self._host, self._pid, self._count = socket.gethostname(), os.getpid(), 0
        self._prefix = f"spmd_rl/watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store: TCPStore | None = None
        self._besides: list[Beside] = []
        self.on_signal: Callable[[str], object] = lambda name: self.fail(Ended(name))  # of rank 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._answered_at = time.monotonic()  # when the store last answered
        self._guard = threading.Thread(target=self._watch_the_store, name="watchdog-guard", daemon=True)

    def start(self) -> None:
        """Connect to the store that torchrun serves and begin to post."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=max(5.0, self.heartbeat_s)))
        self._answered_at = time.monotonic()
        self._thread.start()
        self._guard.start()

    def close(self) -> None:
        """The run is over and went well: others no longer judge this rank."""
        if self._store is not None:
            self._closed.set()
            self._thread.join()
            with contextlib.suppress(Exception):  # the agent may already have taken its store down
                self._post(closed=True)

    def heed_signals(self, rank: int) -> None:
        """SIGTERM and SIGUSR1 are for rank 0, which ends the run in good order; before it can, it just ends it.

        torchrun tells every rank, also when one of them has died. The others go on until rank 0 lets them go, and find
        out soon who is gone.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1):
            if rank:
                signal.signal(number, lambda number, frame: self.hurry())
            else:
                signal.signal(number, lambda number, frame: self.on_signal(signal.Signals(number).name))

    def hurry(self) -> None:
        """The run ends, perhaps because somebody is dead: from now on silence is noticed within `HURRY_S`."""
        self._patience_s = min(self._patience_s, HURRY_S)

    # --- what the main thread says ------------------------------------------------------------------------------

    def beat(self, stage: str = "") -> None:
        """The main thread got somewhere; inside a stage it may say where."""
        if stage:
            self._stage = stage
        self._progress += 1

    @contextlib.contextmanager
    def stage(self, name: str, deadline_s: float | None = None, whole: bool = False) -> Iterator[None]:
        """A named stage of the main thread; it must beat or end within `deadline_s` (None: it waits for others).

        What is no wait, and not the whole of a role, is handed to `span`: the timeline of this rank.
        """
        before = (self._stage, self._deadline_s)
        self._stage, self._deadline_s = name, deadline_s
        self._progress += 1
        waits = deadline_s is None
        try:
            with contextlib.nullcontext() if waits or whole else self.span(name):
                yield
        finally:
            # A failed stage keeps its name, so that the verdict says where it happened.
            if sys.exc_info()[0] is None:
                self._stage, self._deadline_s = before
            self._progress += 1

    def beside(self, role: str) -> Beside:
        """A second thread of this rank, with a role of its own, is to be watched too."""
        self._besides.append(Beside(self, role))
        return self._besides[-1]

    def fail(self, error: BaseException, role: str = "", stage: str = "") -> NoReturn:
        """This rank failed: tell everybody, then leave. Callable from any thread.

        The error of a collective says that a peer is gone, so the judges first get the time to name that one.
        """
        text = "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {error}"
        if _is_of_a_collective(error) and self._thread.is_alive():
            self._deadline_s = None
            self._thread.join(self.heartbeat_s + 4 * PERIOD_S)  # which ends this process when there is a verdict
        self._condemn_self(role or self.role, stage or self._stage, message, text)

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        now = time.monotonic()
        seen = {rank: _Seen(None, now, now) for rank in self._judged()}
        last = now
        while not self._closed.is_set():
            try:
                self._post()
                if self._store.check([f"{self._prefix}/verdict"]):
                    self._leave(Verdict(**json.loads(self._store.get(f"{self._prefix}/verdict"))))
                now = time.monotonic()
                if now - last > self.heartbeat_s / 2:  # this process was stopped: forgive what it could not see
                    seen = {rank: _Seen(s.beat, now, now) for rank, s in seen.items()}
                    for thread in self._besides:
                        thread.beat()
                last = now
                for rank, known in seen.items():
                    self._judge(rank, known, now)
                for thread in self._besides:
                    if message := thread.overdue():
                        self._condemn_self(thread.role, thread.name, message)
            except Exception as error:
                if self._closed.is_set():
                    return
                self._leave(self._lost_store(f"{type(error).__name__}: {error}; its agent is gone"))
            self._answered_at = time.monotonic()
            self._closed.wait(PERIOD_S)

    def _watch_the_store(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(PERIOD_S):
            now = time.monotonic()
            if now - last > self.heartbeat_s / 2:  # this process was stopped
                self._answered_at = now
            last, silent = now, now - self._answered_at
            if silent > self.heartbeat_s + 4 * PERIOD_S:
                where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                why = f"no answer from {where} for {silent:.1f} s: that host is gone, or the link to it is cut"
                self._leave(self._lost_store(why))

    def _judged(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != 0] if self.rank == 0 else [0]

    def _judge(self, rank: int, known: _Seen, now: float) -> None:
        key = f"{self._prefix}/beat/{rank}"
        if not self._store.check([key]):
            if now - known.beat_at > self._start_s:
                self._condemn(Verdict(rank, self.rank, "unknown role", "unknown host", -1, "start", "never showed up"))
            return
        beat = json.loads(self._store.get(key))
        if beat["closed"]:
            known.beat_at = known.progress_at = now
            return
        if known.beat is None or beat["count"] != known.beat["count"]:
            known.beat_at = now
        if known.beat is None or beat["progress"] != known.beat["progress"]:
            known.progress_at = now
        known.beat = beat
        silent, stuck, deadline = now - known.beat_at, now - known.progress_at, beat["deadline_s"]
        if silent > self._patience_s:
            self._accuse(rank, beat, f"no sign of life for {silent:.1f} s")
        elif deadline is not None and stuck > deadline:
            self._accuse(rank, beat, f"no progress for {stuck:.1f} s (deadline {deadline:g} s)")

    def _accuse(self, rank: int, beat: dict, message: str) -> NoReturn:
        self._condemn(Verdict(rank, self.rank, beat["role"], beat["host"], beat["pid"], beat["stage"], message))

    def _post(self, closed: bool = False) -> None:
        self._count += 1
        beat = {
            "count": self._count,
            "progress": self._progress,
            "stage": self._stage,
            "deadline_s": self._deadline_s,
            "role": self.role,
            "host": self._host,
            "pid": self._pid,
            "closed": closed,
        }
        self._store.set(f"{self._prefix}/beat/{self.rank}", json.dumps(beat))

    def _lost_store(self, why: str) -> Verdict:
        message = f"lost torchrun's store ({why})"
        return Verdict(self.rank, self.rank, self.role, self._host, self._pid, self._stage, message)

    def _condemn_self(self, role: str, stage: str, message: str, text: str = "") -> NoReturn:
        self._condemn(Verdict(self.rank, self.rank, role, self._host, self._pid, stage, message, text))

    # --- the end ------------------------------------------------------------------------------------------------

    def _condemn(self, verdict: Verdict) -> NoReturn:
        """Propose a verdict; the first one wins and is what everybody reports."""
        if self._store is not None:
            with contextlib.suppress(Exception):  # without the store, report what this rank knows
                text = self._store.compare_set(f"{self._prefix}/verdict", "", json.dumps(asdict(verdict)))
                verdict = Verdict(**json.loads(text))
        self._leave(verdict)

    def _leave(self, verdict: Verdict) -> NoReturn:
        with self._lock:  # never released: two threads must not report twice
            write_error_file(verdict.render(), first=self.rank == verdict.rank)
            with contextlib.suppress(Exception):  # whatever the screen thinks of it, this process ends here
                self.on_verdict(verdict.render())
            with contextlib.suppress(Exception):  # before a rank that hangs is killed: its last words matter most
                self.last_words()
            # torchrun ends all ranks of a host when the first one is gone; until then all have read the verdict.
            time.sleep(4 * PERIOD_S)
            accused = verdict.by != verdict.rank and verdict.pid not in (-1, self._pid)
            if accused and verdict.host == self._host:  # a rank that hangs does not read its verdict
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(verdict.pid, signal.SIGKILL)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_CODE)


def _is_of_a_collective(error: BaseException | None) -> bool:
    """True when torch.distributed raised this error or its cause. gloo's errors have no type of their own."""
    marks = ("/gloo/", "monitoredBarrier")  # its source files; its barrier under TORCH_DISTRIBUTED_DEBUG=DETAIL
    while error is not None:
        if isinstance(error, DistError) or any(mark in str(error) for mark in marks):
            return True
        error = error.__cause__ or error.__context__
    return False


class Beside:
    """What the second thread of a rank says, as its main thread says it to the watchdog; that judges it in place.

    If the whole process hangs or dies, the other ranks find out by its heartbeat.
    """

    def __init__(self, watchdog: Watchdog, role: str) -> None:
        self.role, self.name = role, "start"
        self._watchdog, self._deadline_s, self._beat_at = watchdog, None, time.monotonic()
        self.span, self.tick, self.hurry = watchdog.span, watchdog.tick, watchdog.hurry

    def beat(self, stage: str = "") -> None:
        """It got somewhere."""
        self.name, self._beat_at = stage or self.name, time.monotonic()

    @contextlib.contextmanager
    def stage(self, name: str, deadline_s: float | None = None, whole: bool = False) -> Iterator[None]:
        """As `Watchdog.stage`."""
        before = (self.name, self._deadline_s)
        self.name, self._deadline_s, self._beat_at = name, deadline_s, time.monotonic()
        with contextlib.nullcontext() if deadline_s is None or whole else self.span(name):
            yield
        self.name, self._deadline_s = before
        self._beat_at = time.monotonic()

    def overdue(self) -> str:
        """Why it failed; empty as long as it has not."""
        silent = time.monotonic() - self._beat_at
        if self._deadline_s is None or silent <= self._deadline_s:
            return ""
        return f"no progress for {silent:.1f} s (deadline {self._deadline_s:g} s)"

    def fail(self, error: BaseException) -> NoReturn:
        """As `Watchdog.fail`."""
        self._watchdog.fail(error, self.role, self.name)

    @property
    def on_signal(self) -> Callable[[str], object]:
        """As the watchdog's: signals come to the main thread."""
        return self._watchdog.on_signal

    @on_signal.setter
    def on_signal(self, heard: Callable[[str], object]) -> None:
        self._watchdog.on_signal = heard
