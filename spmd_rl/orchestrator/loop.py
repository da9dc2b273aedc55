"""The main loop: what one run does, in order. This file is the algorithm as rank 0 sees it.

    warm-up → publish version 0 → evaluate → (batch → train → publish) × max_steps → evaluate → export

Training and sampling never wait for each other here: a batch is ordered as soon as the window gives one, its result
is published with the same breath, and the book-keeping of a step (`_finish`) runs beside the next one. A run that is
taken up again begins at its checkpoint instead of the warm-up (`take_up.py`).

It refuses to know about torch, processes and vLLM; it speaks through a `Link`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmd_rl.algorithms import resolve, resolve_sources, supervised
from spmd_rl.algorithms.types import Memory
from spmd_rl.config.tree import Config
from spmd_rl.envs.protocol import Environment
from spmd_rl.orchestrator.batch import Batch, make_batch
from spmd_rl.orchestrator.book import Book, Taken
from spmd_rl.orchestrator.evaluate import evaluate
from spmd_rl.orchestrator.guard import ADVICE, Collapse, Guard
from spmd_rl.orchestrator.lessons import Lessons
from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.lockstep import Lockstep
from spmd_rl.orchestrator.past import Past, common
from spmd_rl.orchestrator.records import (
    Began,
    Checkpointed,
    Evaluated,
    NoLog,
    RolledBack,
    Steered,
    Stepped,
    Took,
    timeless,
)
from spmd_rl.orchestrator.report import Report
from spmd_rl.orchestrator.sampler import Sampler, Services
from spmd_rl.orchestrator.seeds import seed_of
from spmd_rl.orchestrator.sources import make_sources
from spmd_rl.orchestrator.steering import Steering, parse
from spmd_rl.orchestrator.trainers import Trainers
from spmd_rl.orchestrator.versions import Versions
from spmd_rl.rollouts.packing import Cost, Packed, pack
from spmd_rl.rollouts.types import TrainSample
from spmd_rl.world.checkpoints import folder_of, step_of
from spmd_rl.world.journal import Journal
from spmd_rl.world.messages import Partial, Trained
from spmd_rl.world.wire import encode

AHEAD = 2  # steps ordered and not yet booked; one trains while the next one waits in its queue
REMEMBERED = 100  # checkpoints that a rollback may go back to
PAUSE_S = 5.0  # how often a paused run says that it is alive
PAUSED = -1  # stands at the gate for a run that is paused, so that in lockstep no tick passes


class Collapsed(RuntimeError):
    """The run fell apart, and the config says to stop."""


@dataclass
class Loop:
    """One run of training."""

    config: Config
    link: Link
    services: Services
    envs: list[Environment]
    versions: Versions
    report: Report
    teacher: Services | None = None  # whose engines sample for training, where it is not the policy itself
    journal: Journal | NoLog = field(default_factory=NoLog)
    lockstep: Lockstep | None = None
    steering: Steering | None = None
    past: Past | None = None  # what the run is taken up from
    span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()  # of the timeline
    tokenizer: Any = None  # of environments that demonstrate
    cost: Cost | None = None  # of training on documents, so that ranks wait little for each other; None: tokens

    def __post_init__(self) -> None:
        self.stopped_at = -1  # the step at which somebody stopped the run
        self.sources = make_sources(self.config, self.envs)
        self._book = Book(self.config, lambda source, index: self.envs[source].task(index, "train"), self.journal)
        self._algorithm, self._memory = resolve(self.config.orchestrator.algorithm), Memory()
        self._of_sources = resolve_sources(self.config.orchestrator)
        self.trainers = Trainers(self.link, self._on_saved)
        self._guard = Guard(self.config.guard)
        self._collapse: Collapse | None = None  # seen, and not yet acted on
        self._rollbacks = 0
        self._lr = -1.0  # below 0: as the schedule has it
        self._saved: list[tuple[int, str]] = []  # (step, folder) of complete checkpoints, oldest first
        self._booked: list[asyncio.Task[None]] = []
        self._evaluated: set[int] = set()  # steps
        self.link.log = self.journal

    async def run(self) -> None:
        """The whole run."""
        async with asyncio.TaskGroup() as self._tasks:
            self._sampler = Sampler(self.teacher or self.services, self.sources, self._book, self._tasks)
            if self.steering:
                self.steering.heard = self._sampler.wake
            step = await self._begin() if self.past is None else await self._take_up(self.past)
            await self._learn(step + 1)
            self._sampler.stop()
        if self.stopped_at >= 0:
            return
        if self.config.max_steps:
            await self._evaluate(self.config.max_steps)
        await self._export("hf")

    async def _begin(self) -> int:
        """A run that is new, up to version 0."""
        self.journal.append(Began(common(self.config), self._layout()))
        await self._warm_up()
        self.versions.publish(0)
        self.report.start("rl", await self.versions.report(0))
        await self._evaluate(0)
        if self.config.ckpt.interval:
            await self._save(0)
        self._sampler.admit(version=0)
        return 0

    async def _warm_up(self) -> None:
        """Supervised steps on the teachers' answers; what comes out is version 0."""
        self.report.start("warmup")
        lessons = Lessons(self.config, self.sources, self.tokenizer)
        ordered: list[asyncio.Future[Trained]] = []
        for step in range(1, self.config.warmup.steps + 1):
            if len(ordered) >= AHEAD:
                self.report.warmup_step(await ordered.pop(0))
            learned = supervised.learned(await lessons.step(step))
            ordered.append(self.trainers.train("warmup", step, [self._pack(learned)]))
        for future in ordered:
            self.report.warmup_step(await future)
        if self.config.warmup.steps:
            self.trainers.begin_rl()

    async def _learn(self, first: int) -> None:
        """Reinforcement learning, from step `first` to step max_steps."""
        for step in range(first, self.config.max_steps + 1):
            taken: Taken | None = None
            while taken is None:
                if await self._steer(step):
                    return
                taken = await self._sampler.next_batch(step, self._interrupted)
            if self._collapse is not None and self.config.guard.on_collapse == "rollback":
                await self._roll_back(step, taken)
                continue
            if len(self._booked) >= AHEAD:
                await self._booked[-AHEAD]
            with self.span("make a batch"):
                batch, packed = self._make(taken)
                self.journal.sync()  # what is trained on will be known, whatever happens
            trained = self.trainers.train("rl", step, packed, self._lr)
            self.versions.publish(step)
            previous = self._booked[-1] if self._booked else None
            finish = self._tasks.create_task(self._finish(step, batch, packed, trained, previous))
            self._booked = [*self._booked, finish][-AHEAD:]
            every = self.config.ckpt.interval
            if every and (step % every == 0 or step == self.config.max_steps):
                await self._save(step)

    def _layout(self) -> list[int]:
        return [self.link.trainers, self.link.replicas, self.link.frozen]

    def _make(self, taken: Taken) -> tuple[Batch, list[Packed]]:
        """What the trainer ranks get of a batch."""
        o, step = self.config.orchestrator, taken.step
        oldest = step - 1 - o.max_token_lag if o.max_token_lag else 0
        seed = seed_of(self.config.seed, "shuffle", step)
        batch = make_batch(
            taken.groups, taken.dropped, o, self._algorithm, self._memory, seed, oldest, self._of_sources
        )
        packed = [self._pack(samples) for samples in batch.minibatches]
        if self.services.routes is not None:
            batch.stats.update(self.services.routes.send(step, packed))
        return batch, packed

    def _pack(self, samples: Sequence[TrainSample]) -> Packed:
        return pack(samples, self.link.data_ranks, self.config.seq_len, self.cost)

    async def _finish(
        self,
        step: int,
        batch: Batch,
        packed: list[Packed],
        trained: asyncio.Future[Trained],
        previous: asyncio.Task[None] | None,
    ) -> None:
        """Free the slots of a step as soon as its weights serve; book it when all that belongs to it is known."""
        await self.versions.wait_everywhere(step)
        batch.stats.update(self._sampler.release([group.id for group in batch.groups], step))
        batch.stats.update(self.services.rollouts.errors())
        if previous is not None:
            await previous
        collapse = self._book_step(step, batch, packed, await trained, await self.versions.report(step))
        if collapse is not None:
            self._on_collapse(collapse)
        every = self.config.ckpt.export_interval
        if self._eval_is_due(step):
            await self._evaluate(step)
        if every and step % every == 0 and step < self.config.max_steps:
            await self._export(f"hf_step_{step:06d}")

    def _book_step(
        self, step: int, batch: Batch, packed: list[Packed], result: Trained, pull: dict[str, float]
    ) -> Collapse | None:
        self.journal.append(Stepped(step, result.phase, timeless(result.metrics)))
        collapse = self._guard.watch(step, result.metrics | batch.stats)
        self.report.rl_step(step, batch, packed, result, pull, collapse)
        return collapse

    def _on_collapse(self, collapse: Collapse) -> None:
        """Stop now, or let the next step take the weights back."""
        guard = self.config.guard
        if guard.on_collapse == "warn" or self._collapse is not None:
            return
        good = self._good_checkpoint(collapse.step)
        if guard.on_collapse == "stop" or good is None or self._rollbacks >= guard.max_rollbacks:
            tried = f" after {self._rollbacks} rollbacks" if self._rollbacks else ""
            last = f" The last good checkpoint is {good[1]}." if good else ""
            raise Collapsed(f"step {collapse.step}{tried}: {collapse.why}; {ADVICE}.{last}")
        self._collapse = collapse

    def _good_checkpoint(self, step: int) -> tuple[int, str] | None:
        """The newest checkpoint from before the steps that the guard judged by."""
        good = [saved for saved in self._saved if saved[0] <= step - 2 * self.config.guard.window]
        return good[-1] if good else None

    async def _roll_back(self, step: int, taken: Taken) -> None:
        """Step `step` does not train: its version is the last good checkpoint's weights.

        Versions are counted up and never used twice. What the collapsed policy sampled is dropped, for it would be
        trained on as if it were a little stale; the batch at hand too.
        """
        assert self._collapse is not None
        good = self._good_checkpoint(self._collapse.step)
        assert good is not None
        self.journal.append(RolledBack(step, good[1]))
        self.trainers.restore(good[1])
        self.versions.publish(step)
        dropped = self._sampler.discard(after=good[0])
        await self.versions.wait_everywhere(step)
        self._sampler.release([group.id for group in taken.groups], step)
        self.report.rolled_back(step, good[1], dropped + len(taken.groups), await self.versions.report(step))
        self._forget_after(good[0])

    def _forget_after(self, step: int) -> None:
        self._guard.forget_after(step)
        self._saved = [saved for saved in self._saved if saved[0] <= step]
        self._collapse, self._rollbacks = None, self._rollbacks + 1

    # --- checkpoints, and a run that is taken up again ---------------------------------------------------------------

    async def _save(self, step: int) -> asyncio.Event:
        """A checkpoint after this step, written beside what follows.

        In lockstep it is a fence: all that belongs to the step is finished, and requests in flight begin anew, so
        that going on and being taken up again are the same.
        """
        partials: list[Partial] = []
        if self.lockstep:
            if self._booked:
                await self._booked[-1]
            partials = await self.lockstep.fence()
            self._sampler.drop_routes()
        self.journal.append(Checkpointed(step))
        self.journal.sync()
        folder = str(folder_of(self.config.output_dir, step))
        state = {"command": "rl", "step": step, "run": common(self.config)}
        snapshot = encode(self._snapshot({partial.id: partial for partial in partials}))
        return self.trainers.save(folder, state, snapshot)

    def _on_saved(self, folder: str) -> None:
        self._saved = [*self._saved, (step_of(folder), folder)][-REMEMBERED:]

    def _parts(self) -> dict[str, Any]:
        """Everything on rank 0 that has a state."""
        parts = {"book": self._book, "link": self.link, "rollouts": self.services.rollouts}
        return parts | {"guard": self._guard, "report": self.report}

    def _snapshot(self, partials: dict[int, Partial]) -> dict[str, Any]:
        services = [self.services, *([self.teacher] if self.teacher else [])]
        return {
            "journal": self.journal.position,
            "tick": self.lockstep.tick if self.lockstep else 0,
            "parts": {name: part.state() for name, part in self._parts().items()},
            "routers": [service.router.state() for service in services],
            "calls": self._sampler.calls(partials),
            "memory": dict(self._memory),
            "lr": self._lr,
            "rollbacks": self._rollbacks,
            "saved": self._saved,
            "evaluated": sorted(self._evaluated),
        }

    async def _take_up(self, past: Past) -> int:
        """Be where the run was; the step whose version serves. Batches behind the checkpoint are trained on again."""
        self.trainers.begin_rl()
        self.trainers.restore(past.folder)
        self._restore(past)
        rolled_back = {record.step for record in past.records if isinstance(record, RolledBack)}
        step = past.step
        for record in past.records:
            taken = self._book.follow(record)
            match record:
                case Took():
                    step = record.step
                    if taken is not None and step not in rolled_back:
                        batch, packed = self._make(taken)
                        self._book_step(
                            step, batch, packed, await self.trainers.train("rl", step, packed, self._lr), {}
                        )
                case RolledBack():
                    self.trainers.restore(record.folder)
                    self._forget_after(step_of(record.folder))
                case Steered():
                    self._set(record.command)
                case Evaluated():
                    self._evaluated.add(record.step)
        if not self.lockstep:
            self.journal.append(Began(common(self.config), self._layout(), past.step))
        self.versions.publish(step)
        pull = await self.versions.report(step)
        if left := self._book.window.in_training():
            self._book.release(left, step)
        self.report.taken_up(past.folder, past.step, step, pull)
        if self.lockstep:
            self.lockstep.go_on_from(past.snapshot["tick"])
        self._sampler.take_up(past.snapshot["calls"], step)
        if self._eval_is_due(step) and step not in self._evaluated:  # it was under way when the run ended
            self._booked = [self._tasks.create_task(self._evaluate(step))]
        return step

    def _restore(self, past: Past) -> None:
        snapshot = past.snapshot
        for name, part in self._parts().items():
            part.restore(snapshot["parts"][name])
        services = [self.services, *([self.teacher] if self.teacher else [])]
        for service, state in zip(services, snapshot["routers"], strict=True):
            if self.lockstep and len(state["depth"]) == len(service.router.depth):
                service.router.restore(state)
        self._memory.update(snapshot["memory"])
        self._lr, self._rollbacks = snapshot["lr"], snapshot["rollbacks"]
        self._saved = [*map(tuple, snapshot["saved"]), (past.step, past.folder)]
        self._evaluated = set(snapshot["evaluated"])

    # --- steering -----------------------------------------------------------------------------------------------------

    async def _steer(self, step: int) -> bool:
        """Do what was asked for before step `step`; True when the run shall stop."""
        paused = False
        while self.steering is not None:
            for command in self.steering.take(step):
                self.journal.append(Steered(step, command))
                self.report.steered(step, command)
                word = self._set(command)
                if word in ("pause", "resume"):
                    paused = word == "pause"
                elif word == "save":
                    await self._save(step - 1)
                elif word == "eval":
                    await self._evaluate(step - 1)
                elif word == "stop":
                    await self._stop(step - 1)
                    return True
            if not paused:
                break
            self.services.gate.enter(PAUSED)
            await self.steering.changed(PAUSE_S)
            self.link.heard += 1  # a pause is no stall
            self.services.gate.leave(PAUSED)
        return False

    def _set(self, command: str) -> str:
        """Change what a command sets; its first word."""
        word, key, number = parse(command)
        if key == "lr":
            self._lr = number
        return word

    async def _stop(self, step: int) -> None:
        """A checkpoint, and then the end."""
        if self._booked:
            await self._booked[-1]
        written = await self._save(step)
        await written.wait()
        self.stopped_at = step

    def _interrupted(self) -> bool:
        return self.steering is not None and self.steering.stopping

    # --- what a step may bring besides --------------------------------------------------------------------------------

    def _eval_is_due(self, step: int) -> bool:
        interval = self.config.orchestrator.eval.interval
        return bool(interval) and step % interval == 0 and 0 < step < self.config.max_steps

    async def _evaluate(self, step: int) -> None:
        if self.config.orchestrator.eval.tasks:
            evaluation = await evaluate(self.services, self.sources, step)
            self._evaluated.add(step)
            self.journal.append(Evaluated(step, timeless(evaluation.metrics)))
            self.report.evaluation(evaluation)

    async def _export(self, name: str) -> None:
        await self.trainers.export(str((Path(self.config.output_dir) / name).resolve()))
