"""Keep groups of rollouts open, as many as the window admits, and hand out batches of finished ones.

Which groups may be open and consumed is the window's decision (`window.py`); this file runs their rollouts. A group of
which no episode is valid is dropped and replaced, and so is one that teaches nothing (equal rewards, where the group is
the baseline), up to a number per batch. Nothing else is ever thrown away.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import numpy as np

from spmd_rl.algorithms import resolve
from spmd_rl.algorithms.lengths import sampled_tokens
from spmd_rl.algorithms.weigh import zero_variance
from spmd_rl.config.tree import Config, OrchestratorConfig
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
    first_replica: int = 0  # what the router calls replica 0

    def policy(self, sampling, *, group: int, rollout: int, seed: int) -> RolloutPolicy:
        """A policy for one rollout."""
        return RolloutPolicy(
            self.link,
            self.router,
            sampling,
            self.stop_token_ids,
            self.config.seq_len,
            first_replica=self.first_replica,
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
        self._wanted = services.config.max_steps * orchestrator.groups_per_batch
        self._refill_limit = self._refills = int(refill_limit(orchestrator))  # left before the next batch
        self._dropped: list[Group] = []  # of equal rewards, since the last batch
        self._running: dict[int, asyncio.Task] = {}  # by group
        self._groups = self._tokens = 0  # finished so far, and what they sampled
        self._ratios = [source.ratio for source in orchestrator.source]
        self._drawn = [0] * len(envs)  # tasks drawn per source: the data cursors
        self._hints = resolve(orchestrator.algorithm).teacher == "hint"
        self._version = 0  # on the engines
        self._finished: dict[int, Group] = {}
        self._changed = asyncio.Event()

    def admit(self, version: int) -> None:
        """Open as many groups as the window has room for, with `version` on the engines."""
        self._version = version
        if self._services.config.orchestrator.batch_unit == "tokens":
            self._window.expect(self._expected_groups())
        while self._wanted > 0 and self._window.can_admit() > 0:
            self._wanted -= 1
            group = self._window.admit(version)
            self._running[group] = self._tasks.create_task(self._run_group(group, version))

    async def next_batch(self) -> tuple[list[Group], list[Group]]:
        """The groups of the next optimizer step, as soon as the window lets them go.

        And the groups of equal rewards that were dropped since the last batch, without their tokens.
        """
        while (ids := self._window.take(self._enough)) is None:
            self.admit(self._version)  # a batch counted in tokens may need more groups than expected
            self._changed.clear()
            await self._changed.wait()
        dropped, self._dropped = self._dropped, []
        self._refills = self._refill_limit
        return [self._finished.pop(id) for id in ids], dropped

    def stop(self) -> None:
        """No batch is wanted any more: give up what still runs."""
        self._wanted = 0
        for task in self._running.values():
            task.cancel()

    def discard(self, after: int) -> int:
        """Give up groups that no batch holds yet and that were opened under versions above `after`; how many."""
        late = [id for id in (*self._running, *self._finished) if self._window.version_of(id) > after]
        for id in late:
            if id in self._running:
                self._running.pop(id).cancel()
            else:
                del self._finished[id]
            self._drop(id)
        return len(late)

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
        del self._running[id]
        group = Group(id, task, tuple(episodes), version)
        self._groups, self._tokens = self._groups + 1, self._tokens + group_tokens(group)
        if not any(episode.valid for episode in episodes):
            self._replace(id)
        elif self._refills > 0 and zero_variance(group):
            self._refills -= 1
            self._dropped.append(without_tokens(group))
            self._replace(id)
        else:
            self._finished[id] = group
            self._window.finish(id)
        self._changed.set()

    def _expected_groups(self) -> int:
        """Groups that make a batch counted in tokens, by their mean size so far.

        Before the first one is known, as if every rollout hit its limit: that opens too few groups, not too many.
        """
        orchestrator = self._services.config.orchestrator
        size = self._group_size * orchestrator.sampling.max_tokens
        if self._groups:
            size = max(1, self._tokens // self._groups)
        return -(-orchestrator.batch_size // size)

    def _replace(self, id: int) -> None:
        self._drop(id)
        self.admit(self._version)

    def _drop(self, id: int) -> None:
        self._window.drop(id)
        self._wanted += 1

    def _enough(self, batch: list[int]) -> bool:
        """Batches counted in tokens are complete with fewer groups than the window's number."""
        orchestrator = self._services.config.orchestrator
        if orchestrator.batch_unit != "tokens":
            return False
        return sum(group_tokens(self._finished[id]) for id in batch) >= orchestrator.batch_size

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


def refill_limit(config: OrchestratorConfig) -> float:
    """How many groups of equal rewards may be dropped per batch; 0 where they teach something, or shall be kept."""
    algorithm = resolve(config.algorithm)
    compares = algorithm.baseline == "group" and algorithm.learns == "advantages"
    keep = config.algorithm.zero_variance == "keep" or not compares
    return 0.0 if keep else config.algorithm.max_refill * config.groups_per_batch


def group_tokens(group: Group) -> int:
    """Sampled tokens that may be trained on."""
    return sum(sampled_tokens(episode) for episode in group.episodes if episode.valid)


def without_tokens(group: Group) -> Group:
    """The group's rewards and statuses alone."""
    return replace(group, episodes=tuple(replace(episode, samples=()) for episode in group.episodes))


def with_hint(episode: Episode, hint: np.ndarray) -> Episode:
    """The episode with a hinted prompt, int32[H], in all its samples."""
    samples = tuple(replace(sample, hint=np.asarray(hint, dtype=np.int32)) for sample in episode.samples)
    return replace(episode, samples=samples)
