"""Keep groups of rollouts open, as many as the window admits, and hand out batches of finished ones.

Which groups may be open and consumed is the window's decision (`window.py`); this file runs their rollouts. A group of
which no episode is valid is dropped and replaced. Nothing else is ever thrown away.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import numpy as np

from spmd_rl.algorithms import resolve
from spmd_rl.config.tree import Config
from spmd_rl.envs.protocol import Environment
from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.policy import RolloutPolicy
from spmd_rl.orchestrator.rollouts import Rollouts
from spmd_rl.orchestrator.router import Router
from spmd_rl.orchestrator.seeds import seed_of
from spmd_rl.orchestrator.window import Window
from spmd_rl.rollouts.types import Episode, Group


@dataclass(frozen=True)
class Services:
    """What every rollout of the run needs."""

    config: Config
    link: Link
    router: Router
    rollouts: Rollouts
    stop_token_ids: list[int]

    def policy(self, sampling, *, group: int, rollout: int, seed: int) -> RolloutPolicy:
        """A policy for one rollout."""
        return RolloutPolicy(
            self.link,
            self.router,
            sampling,
            self.stop_token_ids,
            self.config.seq_len,
            group=group,
            rollout=rollout,
            seed=seed,
        )


class Sampler:
    """Training rollouts.

    Args:
        envs: one environment per source, in the config's order.
        tasks: the asyncio task group in which rollouts run; the first exception ends the run.
    """

    def __init__(self, services: Services, envs: list[Environment], window: Window, tasks: asyncio.TaskGroup) -> None:
        self._services, self._envs, self._window, self._tasks = services, envs, window, tasks
        orchestrator = services.config.orchestrator
        self._group_size = orchestrator.group_size
        self._wanted = services.config.max_steps * (orchestrator.batch_size // orchestrator.group_size)
        self._ratios = [source.ratio for source in orchestrator.source]
        self._drawn = [0] * len(envs)  # tasks drawn per source: the data cursors
        self._hints = resolve(orchestrator.algorithm).teacher == "hint"
        self._version = 0  # on the engines
        self._finished: dict[int, Group] = {}
        self._changed = asyncio.Event()

    def admit(self, version: int) -> None:
        """Open as many groups as the window has room for, with `version` on the engines."""
        self._version = version
        while self._wanted > 0 and self._window.can_admit() > 0:
            self._wanted -= 1
            group = self._window.admit(version)
            self._tasks.create_task(self._run_group(group, version))

    async def next_batch(self) -> list[Group]:
        """The groups of the next optimizer step, as soon as the window lets them go."""
        while (ids := self._window.take()) is None:
            self._changed.clear()
            await self._changed.wait()
        return [self._finished.pop(id) for id in ids]

    def release(self, groups: list[Group], version: int) -> None:
        """The step that used these groups is on the engines as `version`: their slots are free."""
        self._window.release([group.id for group in groups])
        self.admit(version)

    async def _run_group(self, id: int, version: int) -> None:
        source = self._draw()
        env, index = self._envs[source], self._drawn[source] - 1
        task = env.task(index, "train")
        episodes = await asyncio.gather(*(self._run_rollout(env, task, id, i) for i in range(self._group_size)))
        self._services.router.forget_group(id)
        if any(episode.valid for episode in episodes):
            self._finished[id] = Group(id, task, tuple(episodes), version)
            self._window.finish(id)
        else:
            self._window.drop(id)
            self._wanted += 1
            self.admit(self._version)
        self._changed.set()

    async def _run_rollout(self, env: Environment, task, group: int, sample: int) -> Episode:
        services = self._services
        seed = seed_of(services.config.seed, "rollout", task.source, task.index, sample)
        rollout = group * self._group_size + sample
        policy = services.policy(services.config.orchestrator.sampling, group=group, rollout=rollout, seed=seed)
        try:
            episode = await services.rollouts.run(env, task, policy)
            return with_hint(episode, env.hint(task)) if self._hints else episode
        finally:
            services.router.forget_rollout(group, rollout)

    def _draw(self) -> int:
        """The source that is furthest behind its ratio; ties go to the first."""
        source = min(range(len(self._envs)), key=lambda s: (self._drawn[s] + 1) / self._ratios[s])
        self._drawn[source] += 1
        return source


def with_hint(episode: Episode, hint: np.ndarray) -> Episode:
    """The episode with a hinted prompt, int32[H], in all its samples."""
    samples = tuple(replace(sample, hint=np.asarray(hint, dtype=np.int32)) for sample in episode.samples)
    return replace(episode, samples=samples)
