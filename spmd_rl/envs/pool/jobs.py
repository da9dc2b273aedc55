"""What the crew of a pool keeps in its books: limits, jobs, environments, places of workers, and lives in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from spmd_rl.envs.pool.errors import PoolError
from spmd_rl.envs.pool.messages import Done, Failed, Generate, Withdrawn
from spmd_rl.envs.pool.process import WorkerProcess

Lane = Literal["environments", "calls"]


@dataclass(frozen=True)
class Limits:
    """Of one pool."""

    workers: int = 2  # processes for environments
    call_workers: int = 2  # processes for calls
    memory_mb: int = 0  # private memory of one process; 0 = no limit
    hang_s: float = 10.0  # without a sign of life, while it runs rollouts
    grace_s: float = 1.0  # for a job to end after its deadline or its cancellation
    start_s: float = 120.0  # for a process to be ready, and for one environment to be built in it


@dataclass(eq=False)
class Job:
    """One thing to do."""

    id: int
    what: str  # for messages
    frame: bytes
    deadline_s: float  # from the moment at which a worker has it
    env: int | None = None  # None: a call
    ask: Callable[[Generate | Withdrawn], None] | None = None
    future: Future[Done | Failed] = field(default_factory=Future)
    life: Life | None = None  # who has it
    ending: bool = False  # its future is settled or cancelled, and the worker was told
    timer: asyncio.TimerHandle | None = None

    @property
    def lane(self) -> Lane:
        """Where it runs."""
        return "calls" if self.env is None else "environments"

    @property
    def kind(self) -> str:
        """What it is counted as."""
        if self.env is None:
            return "calls"
        return "questions" if self.ask is None else "rollouts"


@dataclass(eq=False)
class Env:
    """One environment that workers build."""

    id: int
    label: str
    build: bytes  # the frame of its Build
    offers: Future[list[str]] = field(default_factory=Future)
    error: PoolError | None = None  # of the last worker that could not build it
    refused: bool = False  # who wanted it has heard that it can't be had


@dataclass(eq=False)
class Slot:
    """The place of one worker."""

    lane: Lane
    name: str
    life: Life | None = None
    failures: int = 0  # starts that failed one after the other
    retry: asyncio.TimerHandle | None = None
    lives: int = 0


@dataclass(eq=False)
class Life:
    """One worker process in its place."""

    slot: Slot
    since: float  # loop time of its start
    heard: float  # loop time of its last message
    process: WorkerProcess = field(init=False)
    open: bool = False  # it can be sent to
    ready: bool = False
    lost: bool = False
    jobs: dict[int, Job] = field(default_factory=dict)
    building: dict[int, float] = field(default_factory=dict)  # environment: loop time at which it was asked for
    built: set[int] = field(default_factory=set)


def settle(job: Job, outcome: Done | Failed | PoolError) -> None:
    """Tell who waits for the job, if anybody still does; once."""
    if not job.future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, PoolError):
        job.future.set_exception(outcome)
    else:
        job.future.set_result(outcome)


def refuse(env: Env, error: PoolError) -> None:
    """Tell who waits for the environment that it can't be had, unless it was told something already."""
    if not env.offers.done():
        env.refused = True
        env.offers.set_exception(error)
