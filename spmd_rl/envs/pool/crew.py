"""The workers of a pool and their jobs: who does what, until when, and what becomes of it when a worker is gone.

There are two lanes. In the lane of environments a worker runs many rollouts at once, and one that has work and gives no
sign of life is hung. In the lane of calls it does one thing at a time, to its end, and only a deadline says that it is
hung. Workers are started when their lane has its first job, and replaced at once when they are lost.

It refuses to know what jobs mean and what they ask a policy. Everything here happens on the thread of one event loop.
Invariants: every job is settled exactly once: with what its worker said, or with a PoolError, or by its own
cancellation; a job whose future is settled keeps nothing but its worker's attention, and that for `grace_s` at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from spmd_rl.envs.pool import messages
from spmd_rl.envs.pool.errors import DeadlinePassed, Death, PoolClosed, PoolError, RaisedValueError, WorkerDied
from spmd_rl.envs.pool.jobs import Env, Job, Lane, Life, Limits, Slot, refuse, settle
from spmd_rl.envs.pool.lag import KEPT
from spmd_rl.envs.pool.process import WorkerProcess

START_TRIES = 3
RETRY_S = 0.2  # before the second try; twice as long before the next one
LOOK_S = 0.25
BEAT_S = 0.5  # between two signs of life of a worker; less where hang_s is small
QUIET_BEATS = 4
OF_JOBS = (messages.Generate, messages.Withdrawn, messages.Done, messages.Failed, messages.Ended)
COUNTED = ("calls", "rollouts", "questions", "deaths", "hangs", "overdue", "restarts")


class Crew:
    """All workers of one pool. `make` makes a worker process; tests bring one that is none."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        log: Callable[[str], object],
        make: Callable[..., WorkerProcess] = WorkerProcess,
    ) -> None:
        self.limits, self._make = limits, make
        self._write = log
        self._directory = os.getcwd()
        counts: dict[Lane, int] = {"environments": limits.workers, "calls": limits.call_workers}
        self._slots: dict[Lane, list[Slot]] = {
            lane: [Slot(lane, f"{name} {lane} {number}") for number in range(count)] for lane, count in counts.items()
        }
        self._queues: dict[Lane, deque[Job]] = {lane: deque() for lane in counts}
        self._envs: dict[int, Env] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self.lags_ms: deque[float] = deque(maxlen=KEPT)
        self._closing = False
        self._look_s, self._beat_s = min(LOOK_S, limits.hang_s / 4), min(BEAT_S, limits.hang_s / 8)
        self._looking: asyncio.TimerHandle | None = None

    # --- what the pool wants --------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Do it."""
        if self._closing:
            return settle(job, PoolClosed(f"{job.what}: the pool is closed"))
        self._queues[job.lane].append(job)
        self._man(job.lane)
        self._dispatch(job.lane)

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more: its future is cancelled."""
        if job.life is not None:
            self._end(job)
        elif job in self._queues[job.lane]:
            self._queues[job.lane].remove(job)

    def tell(self, job: Job, frame: bytes) -> None:
        """Send something to whoever has the job; into the void when nobody has."""
        if job.life is not None and not job.ending:
            job.life.process.send_frame(frame)

    def build(self, env: Env) -> None:
        """Have it built by all workers of the lane of environments; `offers` tells when, or why it can't be."""
        if self._closing:
            return refuse(env, PoolClosed("the pool is closed"))
        self._envs[env.id] = env
        for slot in self._slots["environments"]:
            if slot.life is not None and slot.life.open:
                self._send_build(slot.life, env)
        self._man("environments")

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, and what is now."""
        counts, self._counts = self._counts, Counter()
        lives = [slot.life for slots in self._slots.values() for slot in slots if slot.life is not None]
        return {
            **{f"pool/{name}": float(counts[name]) for name in COUNTED},
            "pool/workers": float(sum(life.ready for life in lives)),
            "pool/in_flight": float(sum(len(life.jobs) for life in lives)),
            "pool/queued": float(sum(len(queue) for queue in self._queues.values())),
        }

    async def close(self) -> None:
        """End everything. Jobs in progress are settled with PoolClosed."""
        self._closing = True
        if self._looking is not None:
            self._looking.cancel()
        slots = [slot for lane in self._slots.values() for slot in lane]
        lives = [slot.life for slot in slots if slot.life is not None]
        for queue in self._queues.values():
            while queue:
                job = queue.popleft()
                settle(job, PoolClosed(f"{job.what}: the pool was closed"))
        for slot in slots:
            if slot.retry is not None:
                slot.retry.cancel()
        for env in self._envs.values():
            refuse(env, PoolClosed("the pool was closed"))
        for life in lives:
            for job in life.jobs.values():
                self._give_back(job, PoolClosed(f"{job.what}: the pool was closed"))
            life.process.send(messages.Stop())
        ends = [life.process.end(wait_s=self.limits.grace_s if life.open else 0.0) for life in lives]
        await asyncio.gather(*ends, *self._tasks, return_exceptions=True)

    # --- workers come and go --------------------------------------------------------------------------------------

    def _man(self, lane: Lane) -> None:
        """Start what the lane needs and has not."""
        slots = self._slots[lane]
        free = [slot for slot in slots if slot.life is None and slot.retry is None]
        if lane == "calls":
            idle = sum(slot.life is not None and not slot.life.jobs for slot in slots)
            free = free[: max(0, len(self._queues[lane]) - idle)]
        for slot in free:
            self._start(slot)

    def _start(self, slot: Slot) -> None:
        slot.retry = None
        self._counts["restarts"] += slot.lives > 0
        slot.lives += 1
        now = self._now()
        life = slot.life = Life(slot, now, now)
        life.process = self._make(slot.name, partial(self._heard, life), partial(self._gone, life), self._log)
        self._task(self._open(life))
        if self._looking is None:
            self._looking = self._loop.call_later(self._look_s, self._look, now + self._look_s)

    async def _open(self, life: Life) -> None:
        if life.lost or self._closing:
            return
        try:
            await life.process.start(self._directory)
        except OSError as error:
            return self._lose(life, "start", f"it could not be started: {error}")
        life.open = True
        life.process.send(messages.Start(self.limits.memory_mb, self._beat_s))
        if life.slot.lane == "environments":
            for env in self._envs.values():
                if not env.refused:
                    self._send_build(life, env)

    def _send_build(self, life: Life, env: Env) -> None:
        life.building[env.id] = self._now()
        life.process.send_frame(env.build)

    def _gone(self, life: Life, why: str) -> None:
        """The connection ended, and the process with it."""
        self._lose(life, "exit" if life.ready and not life.building else "start", why)

    def _look(self, due: float) -> None:
        """Look after everybody; only who was awake itself may blame others for silence."""
        now = self._now()
        asleep = max(0.0, now - due)
        self._looking = self._loop.call_later(self._look_s, self._look, now + self._look_s)
        for life in [slot.life for slots in self._slots.values() for slot in slots if slot.life is not None]:
            life.since, life.heard = life.since + asleep, life.heard + asleep
            life.building = {env: since + asleep for env, since in life.building.items()}
            start_s, hang_s = self.limits.start_s, self.limits.hang_s
            if life.process.ended():
                self._gone(life, "")
            elif not life.ready and now - life.since > start_s:
                self._lose(life, "start", f"it was not ready after start_s = {start_s:g} s")
            elif late := [env for env, since in life.building.items() if now - since > start_s]:
                label = self._envs[late[0]].label
                self._lose(life, "start", f"the environment {label} was not built after start_s = {start_s:g} s")
            elif life.slot.lane == "environments" and life.jobs and not life.building and now - life.heard > hang_s:
                self._lose(life, "hung", f"it gave no sign of life for hang_s = {hang_s:g} s, and was ended")

    def _lose(self, life: Life, kind: Death, why: str) -> None:
        """A worker is gone, or must be: replace it, and see to its jobs when it is buried."""
        if life.lost or self._closing:
            return
        life.lost = True
        slot = life.slot
        slot.life = None
        self._counts[{"hung": "hangs", "deadline": "overdue"}.get(kind, "deaths")] += 1
        if kind != "start":
            self._start(slot)
        else:
            slot.failures += 1
            if slot.failures < START_TRIES:
                slot.retry = self._loop.call_later(RETRY_S * 2 ** (slot.failures - 1), self._start, slot)
        self._task(self._bury(life, kind, why))

    async def _bury(self, life: Life, kind: Death, why: str) -> None:
        own = kind == "exit" or (kind == "start" and not why)
        how = await life.process.end(wait_s=0.5 if own else 0.0, dump=not own)
        if own:
            why = f"{why}: {how}" if why else how
        told = f"the worker process {life.slot.name} is gone: {why}"
        self._log(told)  # where its last lines are already
        if last := life.process.last_words:
            told += f"\nIts last lines:\n{last}"
        for job in list(life.jobs.values()):
            self._give_back(job, WorkerDied(kind, told))
        if life.slot.failures >= START_TRIES and life.slot.life is None and not self._closing:
            life.slot.failures = 0
            for env in list(self._envs.values()):
                self._not_built(env, WorkerDied(kind, told))
            self._despair(life.slot.lane, WorkerDied(kind, told))

    # --- jobs come and go -----------------------------------------------------------------------------------------

    def _dispatch(self, lane: Lane) -> None:
        """Give out what can be given out, in order of arrival."""
        queue = self._queues[lane]
        for _ in range(len(queue)):
            job = queue.popleft()
            able = [life for slot in self._slots[lane] if (life := slot.life) is not None and self._can(life, job)]
            if able:
                self._give(job, min(able, key=self._load))
            elif job.env is not None and not self._hope(job.env):
                settle(job, self._envs[job.env].error or PoolClosed(f"{job.what}: no worker has this environment"))
            else:
                queue.append(job)
                if job.env is None:  # who can do one call can do any
                    queue.rotate(1)
                    return

    def _can(self, life: Life, job: Job) -> bool:
        return life.ready and (not life.jobs if job.env is None else job.env in life.built)

    def _load(self, life: Life) -> tuple[bool, int]:
        """Least is best. Who has been silent for some beats may hang: what it gets would be lost with it."""
        quiet = bool(life.jobs) and self._now() - life.heard > QUIET_BEATS * self._beat_s
        return quiet, len(life.jobs)

    def _hope(self, env: int) -> bool:
        """Whether some worker may yet build it."""
        lives = [slot.life for slot in self._slots["environments"]]
        coming = any(life is not None and (not life.ready or env in life.building) for life in lives)
        return coming or any(slot.retry is not None for slot in self._slots["environments"])

    def _give(self, job: Job, life: Life) -> None:
        if not life.jobs:
            life.heard = self._now()  # it had nothing to say before
        job.life = life
        life.jobs[job.id] = job
        job.timer = self._loop.call_later(job.deadline_s, self._late, job)
        life.process.send_frame(job.frame)

    def _late(self, job: Job) -> None:
        settle(job, DeadlinePassed(f"{job.what}: no result after {job.deadline_s:g} s"))
        self._end(job)

    def _end(self, job: Job) -> None:
        """Have a job end that nobody waits for."""
        if job.ending or job.life is None:
            return
        job.ending = True
        if job.timer is not None:
            job.timer.cancel()
        job.life.process.send(messages.Cancel(job.id))
        job.timer = self._loop.call_later(self.limits.grace_s, self._overdue, job)

    def _overdue(self, job: Job) -> None:
        assert job.life is not None
        why = f"it was ended, because {job.what} went on after its deadline or cancellation"
        self._lose(job.life, "deadline", why)

    def _give_back(self, job: Job, outcome: messages.Done | messages.Failed | PoolError | None) -> None:
        """A worker has it no more."""
        if job.timer is not None:
            job.timer.cancel()
        if not job.ending and outcome is not None:
            settle(job, outcome)
        job.ending, job.life = True, None
        self._counts[job.kind] += 1

    def _despair(self, lane: Lane, error: PoolError) -> None:
        """A worker of the lane can't be started: what waits ends, unless there are others."""
        if any(slot.life is not None or slot.retry is not None for slot in self._slots[lane]):
            return self._dispatch(lane)
        queue = self._queues[lane]
        while queue:
            settle(queue.popleft(), error)

    # --- what workers say -----------------------------------------------------------------------------------------

    def _heard(self, life: Life, message: messages.FromWorker) -> None:
        life.heard = self._now()
        if life.lost and not isinstance(message, OF_JOBS):
            return  # what it was doing may still end well
        match message:
            case messages.Ready():
                life.ready = True
                self._looked_up(life)
            case messages.Beat() if life.slot.lane == "environments":  # a call may block its loop
                self.lags_ms.extend(message.lags_ms.tolist())
            case messages.Built():
                life.building.pop(message.env, None)
                life.built.add(message.env)
                self._built(self._envs[message.env], message.offers)
                self._looked_up(life)
            case messages.NotBuilt():
                life.building.pop(message.env, None)
                error = RaisedValueError(message.kind, message.text, message.trace)
                self._not_built(self._envs[message.env], error)
                self._looked_up(life)
            case messages.Generate() | messages.Withdrawn():
                job = life.jobs.get(message.job)
                if job is not None and job.ask is not None and not job.ending:
                    job.ask(message)
            case messages.Done() | messages.Failed() | messages.Ended():
                job = life.jobs.pop(message.job, None)
                if job is not None:
                    self._give_back(job, None if isinstance(message, messages.Ended) else message)
                    self._dispatch(job.lane)

    def _looked_up(self, life: Life) -> None:
        if not life.building:
            life.slot.failures = 0
        self._dispatch(life.slot.lane)

    def _built(self, env: Env, offers: list[str]) -> None:
        slots = self._slots["environments"]
        everywhere = all(slot.life is not None and env.id in slot.life.built for slot in slots)
        if everywhere and not env.offers.done():
            env.offers.set_result(offers)

    def _not_built(self, env: Env, error: PoolError) -> None:
        env.error = error
        refuse(env, error)

    # --- the log and the loop ---------------------------------------------------------------------------------------

    def _log(self, text: str) -> None:
        with contextlib.suppress(Exception):  # a log that can't be written must not keep a job from ending
            self._write(text)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def _now(self) -> float:
        return self._loop.time()

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
