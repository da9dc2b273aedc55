"""The main loop: what one run does, in order. This file is the algorithm as rank 0 sees it.

    warm-up → publish version 0 → evaluate → (batch → train → publish) × max_steps → evaluate → export

Training and sampling never wait for each other here: a batch is ordered as soon as the window gives one, its result
is published with the same breath, and the book-keeping of a step (`_finish`) runs beside the next one.

It refuses to know about torch, processes and vLLM; it speaks through a `Link`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from spmd_rl.algorithms import resolve, supervised
from spmd_rl.algorithms.types import Memory
from spmd_rl.config.tree import Config
from spmd_rl.envs.protocol import Environment
from spmd_rl.orchestrator.batch import Batch, make_batch
from spmd_rl.orchestrator.evaluate import evaluate
from spmd_rl.orchestrator.guard import ADVICE, Collapse, Guard
from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.report import Report
from spmd_rl.orchestrator.sampler import Sampler, Services
from spmd_rl.orchestrator.seeds import seed_of
from spmd_rl.orchestrator.versions import Versions
from spmd_rl.orchestrator.window import Window
from spmd_rl.rollouts.packing import Packed, pack
from spmd_rl.rollouts.types import Group, Row
from spmd_rl.world.messages import Export, Exported, FreshOptimizer, Restore, Save, Saved, Train, Trained

AHEAD = 2  # steps ordered and not yet booked; one trains while the next one waits in its queue


class Collapsed(RuntimeError):
    """The run fell apart, and the config says to stop."""


class Stalled(RuntimeError):
    """Nothing happened for too long."""


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

    def __post_init__(self) -> None:
        self._trained: dict[tuple[str, int], asyncio.Future[Trained]] = {}
        self._exported: dict[str, asyncio.Event] = {}
        self._guard = Guard(self.config.guard)
        self._collapse: Collapse | None = None  # seen, and not yet acted on
        self._rollbacks = 0
        self._saved: list[tuple[int, str]] = []  # (step, folder) of complete checkpoints, oldest first
        self.link.listen(Trained, lambda event: self._trained[event.phase, event.step].set_result(event))
        self.link.listen(Saved, lambda event: self._saved.append((step_of(event.folder), event.folder)))
        self.link.listen(Exported, lambda event: self._exported[event.folder].set())

    async def run(self) -> None:
        """The whole run."""
        await self._warm_up()
        self.versions.publish(0)
        self.report.start("rl", await self.versions.report(0))
        await self._evaluate(0)
        await self._learn()
        if self.config.max_steps:
            await self._evaluate(self.config.max_steps)
        await self._export("hf")

    async def _warm_up(self) -> None:
        """Supervised steps on the teachers' answers; what comes out is version 0."""
        self.report.start("warmup")
        ordered: list[asyncio.Future[Trained]] = []
        for step in range(1, self.config.warmup.steps + 1):
            if len(ordered) >= AHEAD:
                self.report.warmup_step(await ordered.pop(0))
            pairs = [self._teach(step, i) for i in range(self.config.warmup.batch_size)]
            packed = [pack(supervised.train_samples(pairs), self.link.trainers, self.config.seq_len)]
            ordered.append(self._order_training("warmup", step, packed))
        for future in ordered:
            self.report.warmup_step(await future)
        if self.config.warmup.steps:
            self.link.order_all(FreshOptimizer("rl"))

    def _teach(self, step: int, i: int) -> tuple[np.ndarray, np.ndarray]:
        number = (step - 1) * self.config.warmup.batch_size + i
        env = self.envs[number % len(self.envs)]
        rng = np.random.default_rng(seed_of(self.config.seed, "teacher", number))
        return env.teacher(env.task(number // len(self.envs), "train"), rng)

    async def _learn(self) -> None:
        """Reinforcement learning, from version 0 to version max_steps."""
        o = self.config.orchestrator
        window = Window(o.groups_per_batch, o.max_lag, o.window_fraction, o.order)
        algorithm, memory = resolve(o.algorithm), Memory()
        async with asyncio.TaskGroup() as tasks:
            sampler = Sampler(self.teacher or self.services, self.envs, window, tasks)
            sampler.admit(version=0)
            booked: list[asyncio.Task] = []
            for step in range(1, self.config.max_steps + 1):
                groups, dropped = await sampler.next_batch()
                if self._collapse is not None and self.config.guard.on_collapse == "rollback":
                    await self._roll_back(step, groups, sampler)
                    continue
                if len(booked) >= AHEAD:
                    await booked[-AHEAD]
                batch = make_batch(groups, dropped, o, algorithm, memory, seed_of(self.config.seed, "shuffle", step))
                packed = [pack(samples, self.link.trainers, self.config.seq_len) for samples in batch.minibatches]
                trained = self._order_training("rl", step, packed)
                self.versions.publish(step)
                self._save(step)
                previous = booked[-1] if booked else None
                booked.append(tasks.create_task(self._finish(step, batch, packed, trained, sampler, previous)))
            sampler.stop()

    async def _finish(
        self,
        step: int,
        batch: Batch,
        packed: list[Packed],
        trained: asyncio.Future[Trained],
        sampler: Sampler,
        previous: asyncio.Task | None,
    ) -> None:
        """Free the slots of a step as soon as its weights serve; book it when all that belongs to it is known."""
        await self.versions.wait_everywhere(step)
        sampler.release(batch.groups, step)
        if previous is not None:
            await previous
        result, pull = await trained, await self.versions.report(step)
        collapse = self._guard.watch(step, result.metrics | batch.stats)
        self.report.rl_step(step, batch, packed, result, pull, collapse)
        if collapse is not None:
            self._on_collapse(collapse)
        o, every = self.config.orchestrator, self.config.ckpt.export_interval
        if o.eval.interval and step % o.eval.interval == 0 and step < self.config.max_steps:
            await self._evaluate(step)
        if every and step % every == 0 and step < self.config.max_steps:
            await self._export(f"hf_step_{step:06d}")

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

    async def _roll_back(self, step: int, groups: list[Group], sampler: Sampler) -> None:
        """Step `step` does not train: its version is the last good checkpoint's weights.

        Versions are counted up and never used twice. What the collapsed policy sampled is dropped, for it would be
        trained on as if it were a little stale; the batch at hand too.
        """
        assert self._collapse is not None
        good = self._good_checkpoint(self._collapse.step)
        assert good is not None
        self.link.order_all(Restore(good[1]))
        self.versions.publish(step)
        dropped = sampler.discard(after=good[0])
        await self.versions.wait_everywhere(step)
        sampler.release(groups, step)
        self.report.rolled_back(step, good[1], dropped + len(groups), await self.versions.report(step))
        self._guard.forget_after(good[0])
        self._saved = [saved for saved in self._saved if saved[0] <= good[0]]
        self._collapse, self._rollbacks = None, self._rollbacks + 1

    def _save(self, step: int) -> None:
        """A checkpoint of the trainer after this step, written beside what follows."""
        every = self.config.ckpt.interval
        if every and step % every == 0:
            folder = Path(self.config.output_dir).resolve() / "checkpoints" / f"step_{step:06d}"
            self.link.order_all(Save(str(folder), {"command": "rl", "step": step}))

    def _order_training(self, phase: str, step: int, packed: list[Packed]) -> asyncio.Future[Trained]:
        future: asyncio.Future[Trained] = asyncio.get_running_loop().create_future()
        self._trained[phase, step] = future
        future.add_done_callback(lambda _: self._trained.pop((phase, step)))
        ranks = range(self.link.trainers)
        rows = [[[_columns(row) for row in minibatch.rows[rank]] for minibatch in packed] for rank in ranks]
        self.link.order([Train(step, phase, rows[rank]) for rank in ranks])
        return future

    async def _evaluate(self, step: int) -> None:
        if self.config.orchestrator.eval.tasks:
            metrics, episodes = await evaluate(self.services, self.envs, step)
            self.report.evaluation(step, metrics, episodes)

    async def _export(self, name: str) -> None:
        folder = str((Path(self.config.output_dir) / name).resolve())
        done = self._exported[folder] = asyncio.Event()
        self.link.order_all(Export(folder))
        await done.wait()


async def watch_progress(link: Link, stall_s: float, beat, period_s: float = 0.1) -> None:
    """Tell the watchdog that the event loop turns; raise `Stalled` when nothing at all came in for `stall_s`."""
    clock = asyncio.get_running_loop()
    heard, at = link.heard, clock.time()
    while True:
        await asyncio.sleep(period_s)
        beat()
        if link.heard != heard:
            heard, at = link.heard, clock.time()
        elif clock.time() - at > stall_s:
            raise Stalled(
                f"no rollout, no step and no pull for {stall_s:g} s (deadlines.stall_s); "
                f"{link.waiting} generations are outstanding"
            )


def step_of(folder: str) -> int:
    """The step in a checkpoint's name."""
    return int(folder.rpartition("_")[2])


def _columns(row: Row) -> dict[str, np.ndarray]:
    columns = {field.name: getattr(row, field.name) for field in fields(Row)}
    return {name: column for name, column in columns.items() if column is not None}
