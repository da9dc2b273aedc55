"""A pool of worker processes: functions and environments that are heavy, that hang or that crash run there.

A `Pool` may be used from any thread and any event loop: its crew lives on the event loop of a thread of its own, which
also answers while its owner is busy. It refuses to know what rewards and rollouts are.

Invariants: every wait has a deadline; a pool that is closed, collected or left behind at the interpreter's end leaves
no process behind, and neither does one whose process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from spmd_rl.envs.pool import messages, wire
from spmd_rl.envs.pool.crew import START_TRIES, Crew
from spmd_rl.envs.pool.errors import PoolClosed, Raised, RaisedValueError
from spmd_rl.envs.pool.jobs import Env, Job, Limits
from spmd_rl.envs.pool.lag import lag_metrics
from spmd_rl.envs.pool.mailbox import Mailbox, Mailboxes
from spmd_rl.envs.pool.process import REAP_S
from spmd_rl.envs.pool.spec import EnvironmentSpec

T = TypeVar("T")
ASK_S = 10.0  # for the pool's own thread to answer, which never waits for a worker


class Pool:
    """Worker processes. Nothing is started before it is needed.

    Args:
        workers: processes for environments, each with many rollouts at once.
        call_workers: processes for calls, each with one at a time.
        memory_mb: what one process may allocate; beyond it a MemoryError is raised there. 0 = no limit.
        hang_s: a process that runs rollouts and gives no sign of life for so long is ended and replaced.
        grace_s: what a job gets to end after its deadline or cancellation; after that its process is ended.
        start_s: what a process gets to start, and to build an environment.
        log: gets what workers print, line by line, and why they were replaced. It is called on the pool's thread.

    ValueError for numbers that can't work.
    """

    def __init__(
        self,
        workers: int = 2,
        call_workers: int = 2,
        *,
        memory_mb: int = 0,
        hang_s: float = 10.0,
        grace_s: float = 1.0,
        start_s: float = 120.0,
        name: str = "pool",
        log: Callable[[str], object] = print,
    ) -> None:
        counts = {"workers": workers, "call_workers": call_workers, "memory_mb": memory_mb}
        seconds = {"hang_s": hang_s, "grace_s": grace_s, "start_s": start_s}
        wrong = [f"{key} = {value}" for key, value in counts.items() if value < 0]
        wrong += [f"{key} = {value}" for key, value in seconds.items() if value <= 0]
        if wrong:
            raise ValueError(f"a pool can't have {', '.join(wrong)}: counts are 0 or more, seconds more than 0")
        self.limits = Limits(workers, call_workers, memory_mb, hang_s, grace_s, start_s)
        self.mailboxes = Mailboxes()  # of the loops that use this pool
        self._ids = itertools.count()
        self._backstage = _Backstage(Crew(name, self.limits, log), name)
        self._finalizer = weakref.finalize(self, self._backstage.close)

    async def call(self, function: str | Callable[..., Any], arguments: dict[str, Any], deadline_s: float) -> Any:
        """function(**arguments), awaited where that can be, alone in its process and on its main thread.

        `function` is picklable, or an import path (`package.module:name`, `file.py:name`). The result is made of
        numbers, text, lists, dicts and numpy arrays. The deadline begins when a process begins with the call.

        Raises Raised (what the function raised, a TypeError for what can't travel), DeadlinePassed, WorkerDied or
        PoolClosed; TypeError for a function or arguments that can't be pickled.
        """
        if not self.limits.call_workers:
            raise ValueError("this pool has no processes for calls: make it with call_workers of 1 or more")
        name = function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__name__)
        path = function if isinstance(function, str) else ""
        code = b"" if path else wire.pickled(function, f"the function {name}")
        given = wire.pickled(arguments, f"the arguments of {name}")
        job = self.submit(f"the call of {name}", lambda id: messages.Call(id, path, code, given), deadline_s)
        return value_of(await self.mailboxes.wait(job.future))

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, what is now, and the lag of the workers' event loops since the last call."""
        lags: list[float] = []

        def read() -> dict[str, float]:
            crew = self._backstage.crew
            lags.extend(crew.lags_ms)
            crew.lags_ms.clear()
            return crew.metrics()

        metrics = self._backstage.ask(read)
        return metrics | lag_metrics("pool/", lags)

    def close(self) -> None:
        """End all processes, in good order or by force, and wait for it."""
        self._finalizer()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for environments of this pool ----------------------------------------------------------------------------

    def build(self, spec: EnvironmentSpec) -> tuple[int, list[str]]:
        """(id, optional methods that it has) of an environment that all workers have built; this blocks.

        Raises RaisedValueError for what can't be made, WorkerDied, PoolClosed, TypeError for what can't be pickled.
        """
        if not self.limits.workers:
            raise ValueError("this pool has no processes for environments: make it with workers of 1 or more")
        id = next(self._ids)
        pickled = wire.pickled(spec, f"the tokenizer or the arguments of the environment {spec.label}")
        env = Env(id, spec.label, wire.frame(messages.Build(id, pickled)))
        self._backstage.post(self._backstage.crew.build, env)
        try:
            return id, env.offers.result(self.longest_s(0.0))
        except TimeoutError:
            raise PoolClosed(
                f"no worker has built the environment {spec.label}, and the pool does not say why"
            ) from None

    def submit(
        self,
        what: str,
        message: Callable[[int], messages.Message],
        deadline_s: float,
        env: int | None = None,
        ask: Callable[[messages.Generate | messages.Withdrawn], None] | None = None,
    ) -> Job:
        """Begin a job; `message` makes its message from its id. TypeError or ValueError for what can't travel.

        Cancelling its future cancels the job. `ask` is called on the pool's thread.
        """
        id = next(self._ids)
        job = Job(id, what, wire.frame(message(id)), deadline_s, env, ask)
        crew, post = self._backstage.crew, self._backstage.post

        def done(future: Future[Any]) -> None:
            if future.cancelled():
                with contextlib.suppress(PoolClosed):
                    post(crew.cancel, job)

        job.future.add_done_callback(done)
        post(crew.submit, job)
        return job

    def longest_s(self, deadline_s: float) -> float:
        """After so many seconds a job with this deadline has ended, unless the pool itself hangs."""
        return deadline_s + START_TRIES * (self.limits.start_s + REAP_S) + self.limits.grace_s

    def tell(self, job: Job, message: messages.Message) -> None:
        """Send a message to the worker that has the job. TypeError or ValueError for what can't travel."""
        data = wire.frame(message)
        with contextlib.suppress(PoolClosed):
            self._backstage.post(self._backstage.crew.tell, job, data)


class _Backstage:
    """A crew on the event loop of a thread of its own, which starts with the first thing to do."""

    def __init__(self, crew: Crew, name: str) -> None:
        self.crew = crew
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailbox: Mailbox | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call it there. PoolClosed when there is no there any more."""
        with self._lock:
            if self._closed:
                raise PoolClosed("the pool is closed")
            if self._mailbox is None:
                self._loop = asyncio.new_event_loop()
                self._mailbox = Mailbox(self._loop)
                # A daemon: what ends the interpreter must not wait for it; the finalizer of the pool does.
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            self._mailbox.post(function, *arguments)

    def ask(self, function: Callable[[], T]) -> T:
        """What it returns there. PoolClosed, or TimeoutError after `ASK_S`."""
        answer: Future[T] = Future()
        self.post(lambda: answer.set_result(function()))
        return answer.result(ASK_S)

    def close(self) -> None:
        """Close the crew and wait for it, unless this is its own thread: a pool may be collected on any."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed or self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(self.crew.limits.grace_s + 2 * REAP_S)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        loop.run_until_complete(self.crew.close())
        loop.close()


def value_of(message: messages.Done | messages.Failed) -> Any:
    """The value of a job. Raised for what it raised."""
    if isinstance(message, messages.Done):
        return message.value
    error = RaisedValueError if message.is_value_error else Raised
    raise error(message.kind, message.text, message.trace)
