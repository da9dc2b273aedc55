"""Run the rollouts of training: keep groups open, as many as the book admits, and hand out batches of finished ones.

Which groups there are, which may be consumed and what becomes of one that teaches nothing is the book's business
(`book.py`); this file runs their rollouts. A rollout that runs when the run is taken up again begins anew and hears
what it heard before (`policy.py`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from spmd_rl.algorithms import resolve
from spmd_rl.config.tree import Config, SamplingConfig
from spmd_rl.orchestrator.book import Book, OpenGroup, Taken
from spmd_rl.orchestrator.gate import Gate
from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.policy import Call, RolloutPolicy
from spmd_rl.orchestrator.rollouts import Rollouts
from spmd_rl.orchestrator.router import Router
from spmd_rl.orchestrator.routes import Routes
from spmd_rl.orchestrator.seeds import seed_of
from spmd_rl.orchestrator.sources import Source
from spmd_rl.rollouts.types import Episode, Task
from spmd_rl.world.messages import Partial


@dataclass(frozen=True)
class Services:
    """What every rollout of the run needs."""

    config: Config
    link: Link
    router: Router
    rollouts: Rollouts
    stop_token_ids: list[int]
    gate: Gate = field(default_factory=Gate)
    first_replica: int = 0  # what the router calls replica 0
    routes: Routes | None = None  # of training rollouts, where they are replayed

    def policy(
        self,
        sampling: SamplingConfig,
        *,
        group: int,
        rollout: int,
        seed: int,
        past: list[Call] | None = None,
        routed: Callable[[int, int], None] | None = None,
    ) -> RolloutPolicy:
        """A policy for one rollout."""
        return RolloutPolicy(
            self.link,
            self.router,
            self.gate,
            sampling,
            self.stop_token_ids,
            self.config.seq_len,
            first_replica=self.first_replica,
            group=group,
            rollout=rollout,
            seed=seed,
            past=past,
            routed=routed,
        )

    async def attempt(
        self, source: Source, task: Task, policy: Callable[[int], RolloutPolicy], number: int = 0
    ) -> Episode:
        """One rollout, from its beginning to the moment at which its end counts; tried again when it fails.

        `policy(n)` makes the policy of try n; the first one here is `number`.
        """
        while True:
            made = policy(number)
            async with made.attempt():
                episode = await self.rollouts.run(source.env, task, made, source.rollout_s)
            final = episode.valid or episode.status == "timeout" or made.changed_course
            if final or number >= self.config.orchestrator.max_retries:
                return episode
            number += 1


@dataclass(frozen=True)
class _Try:
    """A rollout in progress."""

    number: int  # how often it was tried before
    policy: RolloutPolicy


@dataclass(frozen=True)
class _Past:
    """What a rollout that is taken up again did before."""

    number: int = 0
    calls: list[Call] = field(default_factory=list)


class Sampler:
    """Training rollouts.

    Args:
        sources: in the config's order.
        tasks: the asyncio task group in which rollouts run; the first exception ends the run.
    """

    def __init__(self, services: Services, sources: list[Source], book: Book, tasks: asyncio.TaskGroup) -> None:
        self._services, self._sources, self._book, self._tasks = services, sources, book, tasks
        orchestrator = services.config.orchestrator
        self._patience = orchestrator.max_off_policy_steps
        self._largest = max(source.group_size for source in sources)
        self._hints = resolve(orchestrator.algorithm).teacher == "hint"
        self._version = 0  # on the engines
        self._stopped = False
        self._running: dict[int, asyncio.Task[None]] = {}  # by group
        self._tries: defaultdict[int, dict[int, _Try]] = defaultdict(dict)  # by group and sample
        self._past: dict[int, dict[int, _Past]] = {}  # of rollouts that are taken up again
        self._changed = asyncio.Event()

    def admit(self, version: int) -> None:
        """Open as many groups as there is room for, with `version` on the engines."""
        self._version = version
        while not self._stopped and (group := self._book.admit(version)) is not None:
            self._start(group)

    async def next_batch(self, step: int, interrupted: Callable[[], bool] = lambda: False) -> Taken | None:
        """The groups of optimizer step `step`, as soon as the window lets them go; None when the wait is `interrupted`.

        Who interrupts calls `wake`.
        """
        while (batch := self._book.take(step)) is None:
            self.admit(self._version)  # a batch counted in tokens may need more groups than expected
            if interrupted():
                return None
            self._changed.clear()
            await self._changed.wait()
        return batch

    def wake(self) -> None:
        """Let `next_batch` look up."""
        self._changed.set()

    def stop(self) -> None:
        """No batch is wanted any more: give up what still runs."""
        self._stopped = True
        for task in self._running.values():
            task.cancel()

    def discard(self, after: int) -> int:
        """Give up groups that no batch holds yet and that were opened under versions above `after`; how many."""
        late = self._book.late(after)
        for id in late:
            self._forget(id, cancel=True)
            self._book.give_up(id, "discarded")
        self._forget_routes(late)
        return len(late)

    def release(self, groups: list[int], version: int) -> dict[str, float]:
        """The step that used these groups is on the engines as `version`: their slots are free.

        Returns what was dropped for running longer than `max_off_policy_steps`, counted from its admission.
        """
        self._book.release(groups, version)
        stale = [g for g in self._book.open.values() if self._patience and version - g.version > self._patience]
        tokens = [sum(self._tokens_so_far(group.id).values()) for group in stale]
        for group in stale:
            self._forget(group.id, cancel=True)
            self._book.give_up(group.id, "stale")
        self._forget_routes([*groups, *(group.id for group in stale)])
        self.admit(version)
        if not self._patience:
            return {}
        return {"stale/groups": float(len(stale)), "stale/tokens": float(sum(tokens))}

    # --- a run that is taken up again -----------------------------------------------------------------------------

    def calls(self, partials: dict[int, Partial]) -> list[Any]:
        """What every rollout in progress asked and heard, as plain data; `partials` by request id."""
        plain = []
        for group in self._book.open.values():
            for sample, running in self._tries[group.id].items():
                for call in running.policy.calls:
                    call.partial = partials.get(call.request) if call.answer is None else None
                heard = [call.plain() for call in running.policy.calls if call.answer or call.partial]
                plain.append([group.id, sample, running.number, heard])
        return plain

    def drop_routes(self) -> None:
        """Give up the routed experts of all that was sampled so far: a run that is taken up from here has none."""
        if self._services.routes is None:
            return
        for running in (t for tries in self._tries.values() for t in tries.values()):
            for call in running.policy.calls:
                call.routes_from = -1 if call.answer else call.routes_from  # what is in flight begins anew
        self._book.drop_routes()
        self._services.routes.forget_all()

    def take_up(self, calls: list[Any], version: int) -> None:
        """Run the rollouts of all open groups that have not ended, with `version` on the engines."""
        self._version = version
        for group, sample, number, heard in calls:
            self._past.setdefault(group, {})[sample] = _Past(number, [Call.of(plain) for plain in heard])
        for open_group in self._book.open.values():
            self._start(open_group)
        self._past = {}

    # --- one group --------------------------------------------------------------------------------------------------

    def _start(self, group: OpenGroup) -> None:
        past = self._past.get(group.id, {})
        self._running[group.id] = self._tasks.create_task(self._run_group(group, past))

    async def _run_group(self, group: OpenGroup, past: dict[int, _Past]) -> None:
        size = self._sources[group.source].group_size
        todo = [sample for sample in range(size) if sample not in group.episodes]
        await asyncio.gather(*(self._run_rollout(group, sample, past.get(sample, _Past())) for sample in todo))
        self._forget(group.id)
        if self._book.close(group.id) != "finished":
            self._forget_routes([group.id])
            self.admit(self._version)
        self._changed.set()

    async def _run_rollout(self, group: OpenGroup, sample: int, past: _Past) -> None:
        services, source, task = self._services, self._sources[group.source], group.task
        name = ("rollout", task.source, task.index, sample)

        def policy(number: int) -> RolloutPolicy:
            made = services.policy(
                source.sampling,
                group=group.id,
                rollout=group.id * self._largest + sample,
                seed=seed_of(services.config.seed, *name, *([number] if number else [])),
                past=past.calls if number == past.number else None,
                routed=partial(services.routes.hold, group.id) if services.routes is not None else None,
            )
            self._tries[group.id][sample] = _Try(number, made)
            return made

        episode = await services.attempt(source, task, policy, past.number)
        made = self._tries[group.id].pop(sample).policy
        if made.changed_course:  # the past is of no use: from the beginning
            return await self._run_rollout(group, sample, _Past())
        if services.routes is not None:
            episode = services.routes.attach(episode, made.calls)
        self._book.rolled(group.id, sample, with_hint(episode, source.env.hint(task)) if self._hints else episode)

    def _forget(self, group: int, cancel: bool = False) -> None:
        self._services.router.forget_group(group)
        self._tries.pop(group, None)
        task = self._running.pop(group, None)
        if cancel and task is not None:
            task.cancel()

    def _forget_routes(self, groups: list[int]) -> None:
        if self._services.routes is not None:
            self._services.routes.forget(groups)

    def _tokens_so_far(self, group: int) -> dict[int, int]:
        """Tokens that were sampled for an open group, by sample; those of requests in flight are not known."""
        ended = {s: sum(int(x.mask.sum()) for x in e.samples) for s, e in self._book.open[group].episodes.items()}
        tries = self._tries[group].items()
        running = {s: sum(len(c.answer.tokens) for c in t.policy.calls if c.answer) for s, t in tries}
        return ended | running


def with_hint(episode: Episode, hint: np.ndarray) -> Episode:
    """The episode with a hinted prompt, int32[H], in all its samples."""
    samples = tuple(replace(sample, hint=np.asarray(hint, dtype=np.int32)) for sample in episode.samples)
    return replace(episode, samples=samples)
