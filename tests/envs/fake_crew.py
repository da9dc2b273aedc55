"""A crew of workers that are none, in virtual time: each has habits, and what a job does is in its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmd_rl.envs.pool import messages, wire
from spmd_rl.envs.pool.crew import Crew
from spmd_rl.envs.pool.jobs import Env, Job, Limits
from spmd_rl.world.wire import decode

LIMITS = Limits(workers=2, call_workers=2, hang_s=5.0, grace_s=1.0, start_s=20.0)
ENV = 1000


@dataclass
class Habits:
    """What a worker does, and how long it takes."""

    start: str = "ready"  # fails, slow, never, dies
    start_s: float = 0.5
    build: str = "built"  # fails, never, dies
    dies_s: float | None = None  # after its start
    quietly: bool = False  # dead, and the connection stays open
    hangs_s: float | None = None  # after its start
    beats: bool = True


@dataclass
class FakeWorker:
    """A process that is none. What a job does is in its function's name: `seconds ending`."""

    name: str
    heard: Callable[[Any], None]
    lost: Callable[[str], None]
    log: Callable[[str], object]
    habits: Habits
    jobs: dict[int, asyncio.TimerHandle | None] = field(default_factory=dict)
    most_at_once: int = 0
    answered: list[int] = field(default_factory=list)
    alive: bool = False
    hangs: bool = False
    was_started: bool = False
    was_ended: bool = False
    last_words: str = "my last words"

    async def start(self, directory: str) -> None:
        self.was_started = True
        if self.habits.start == "fails":
            raise OSError("too many processes")
        self.alive = True
        loop = asyncio.get_running_loop()
        if self.habits.start == "dies":
            loop.call_later(self.habits.start_s, self.die)
        if self.habits.dies_s is not None:
            loop.call_later(self.habits.dies_s, self.die)
        if self.habits.hangs_s is not None:
            loop.call_later(self.habits.hangs_s, setattr, self, "hangs", True)
        if self.habits.beats:
            loop.call_later(1.0, self.beat)

    def send(self, message: messages.Message) -> None:
        self.send_frame(wire.frame(message))

    def send_frame(self, data: bytes) -> None:
        if self.alive:  # the real one answers from its own loop
            asyncio.get_running_loop().call_soon(self.take, decode(data[4:], messages.ToWorker))

    def take(self, message: Any) -> None:
        loop = asyncio.get_running_loop()
        match message:
            case messages.Start():
                if self.habits.start in ("ready", "slow"):
                    loop.call_later(self.habits.start_s, self.say, messages.Ready())
            case messages.Build():
                said = {
                    "built": messages.Built(message.env, ["hint"]),
                    "fails": messages.NotBuilt(message.env, "KeyError", "no such file", ""),
                }.get(self.habits.build)
                if said is not None:
                    loop.call_later(self.habits.start_s, self.say, said)
                if self.habits.build == "dies":
                    loop.call_later(self.habits.start_s, self.die)
            case messages.Call():
                self.begin(message.job, message.path)
            case messages.Method():
                self.begin(message.job, message.name)
            case messages.Cancel() if message.job in self.jobs:
                if self.jobs[message.job] is not None:  # it listens
                    self.finish(message.job, messages.Ended(message.job))

    def begin(self, job: int, what: str) -> None:
        seconds, ending = what.split()
        self.jobs[job] = None
        self.most_at_once = max(self.most_at_once, len(self.jobs))
        said = {
            "done": messages.Done(job, job),
            "raises": messages.Failed(job, "KeyError", str(job), "", False),
            "deaf": messages.Done(job, job),
            "dies": None,
        }[ending]
        timer = asyncio.get_running_loop().call_later(
            float(seconds), *((self.die,) if said is None else (self.finish, job, said))
        )
        if ending != "deaf":
            self.jobs[job] = timer

    def finish(self, job: int, said: messages.Message) -> None:
        if job not in self.jobs or self.hangs or not self.alive:
            return
        if (timer := self.jobs.pop(job)) is not None:
            timer.cancel()
        self.answered.append(job)
        self.say(said)

    def say(self, message: messages.Message) -> None:
        if self.alive and not self.hangs:
            self.heard(message)

    def beat(self) -> None:
        if self.alive:
            self.say(messages.Beat(np.float32([1.0])))
            asyncio.get_running_loop().call_later(1.0, self.beat)

    def die(self) -> None:
        if self.alive:
            self.alive = False
            if not self.habits.quietly:
                self.lost("")

    def ended(self) -> bool:
        return self.was_started and not self.alive

    async def end(self, wait_s: float = 0.0, dump: bool = False) -> str:
        await asyncio.sleep(0.2 if dump else 0.01)
        self.alive, self.was_ended = False, True
        return "it was ended"


class Stage:
    """A crew whose workers have habits, in order of their start; those who come later have none that are bad."""

    def __init__(self, habits: list[Habits] = (), limits: Limits = LIMITS) -> None:
        self.habits, self.workers, self.log, self.ids = list(habits), [], [], 0
        self.crew = Crew("pool", limits, self.log.append, self.make)
        self.jobs: list[Job] = []
        self.env = Env(ENV, "words", wire.frame(messages.Build(ENV, b"")))

    def make(self, *given: Any) -> FakeWorker:
        self.workers.append(FakeWorker(*given, self.habits.pop(0) if self.habits else Habits()))
        return self.workers[-1]

    def submit(self, what: str, deadline_s: float = 10.0, call: bool = True) -> Job:
        id = self.ids = self.ids + 1
        said = messages.Call(id, what, b"", b"") if call else messages.Method(id, ENV, what, b"")
        job = Job(id, f"job {id}", wire.frame(said), deadline_s, None if call else ENV)
        job.future.add_done_callback(lambda future: future.cancelled() and self.crew.cancel(job))
        self.jobs.append(job)
        self.crew.submit(job)
        return job


async def outcome(job: Job) -> Any:
    """What became of it; "cancelled" for its own cancellation."""
    while not job.future.done():
        await asyncio.sleep(0.05)
    if job.future.cancelled():
        return "cancelled"
    return job.future.exception() or job.future.result()
