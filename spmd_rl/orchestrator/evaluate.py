"""Evaluation on held-out tasks, on the engines that train: some sampled rollouts per task, and a greedy one.

Every token carries its policy version, so the result says which versions it speaks of; outside a pull that is one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spmd_rl.orchestrator.policy import RolloutPolicy
from spmd_rl.orchestrator.sampler import Services
from spmd_rl.orchestrator.scores import TaskScore, scores
from spmd_rl.orchestrator.seeds import seed_of
from spmd_rl.orchestrator.sources import Source, for_evaluation
from spmd_rl.rollouts.types import Episode, Task

EVAL_IDS = 1 << 40  # ids of evaluation groups and rollouts start here, apart from training


@dataclass(frozen=True)
class Evaluation:
    """One evaluation. `shown` holds one episode per task: the greedy one, where there is one."""

    step: int
    metrics: dict[str, float]
    tasks: list[TaskScore]
    by_source: dict[str, dict[str, float]]  # `scores` of each source
    shown: list[Episode]
    k: int  # sampled attempts per task

    def plain(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "step": self.step,
            "k": self.k,
            "metrics": self.metrics,
            "sources": self.by_source,
            "tasks": [
                {"source": t.source, "index": t.index, "rewards": t.rewards, "greedy": t.greedy, "versions": t.versions}
                for t in self.tasks
            ],
        }


async def evaluate(services: Services, sources: list[Source], step: int) -> Evaluation:
    """One evaluation. RuntimeError when no rollout came to a reward."""
    started = time.monotonic()
    config = services.config.orchestrator.eval
    tasks = [(source, source.env.task(i, "heldout")) for source in sources for i in range(config.tasks)]
    per_task = config.samples + config.greedy

    async def run(number: int, place: int) -> Episode:
        source, task = tasks[number]
        sampling = for_evaluation(source.sampling, config)
        if config.greedy and place == 0:
            sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)

        def policy(retry: int) -> RolloutPolicy:
            name = ("eval", step, task.source, task.index, place, *([retry] if retry else []))
            return services.policy(
                sampling,
                group=EVAL_IDS + number,
                rollout=EVAL_IDS + number * per_task + place,
                seed=seed_of(services.config.seed, *name),
            )

        return await services.attempt(source, task, policy)

    jobs = [run(number, place) for number in range(len(tasks)) for place in range(per_task)]
    episodes = await asyncio.gather(*jobs)
    for number in range(len(tasks)):
        services.router.forget_group(EVAL_IDS + number)
    attempts = [episodes[i : i + per_task] for i in range(0, len(episodes), per_task)]
    scored = [
        _score(source.name, task, own, config.greedy) for (source, task), own in zip(tasks, attempts, strict=True)
    ]
    names = [source.name for source in sources]
    by_source = {name: scores([s for s in scored if s.source == name], config.pass_reward) for name in names}
    metrics = _metrics(episodes, scores(scored, config.pass_reward), by_source)
    metrics["time/eval_s"] = time.monotonic() - started
    return Evaluation(step, metrics, scored, by_source, episodes[::per_task], config.samples)


def _score(source: str, task: Task, attempts: list[Episode], greedy: bool) -> TaskScore:
    rewards = [e.reward.value if e.valid else None for e in attempts]
    versions = _versions(attempts)
    span = (int(versions.min()), int(versions.max())) if len(versions) else (-1, -1)
    return TaskScore(source, task.index, rewards[greedy:], rewards[0] if greedy else None, span)


def _versions(episodes: list[Episode]) -> np.ndarray:
    """Policy versions of all sampled tokens."""
    stamps = [s.versions[s.mask == 1] for e in episodes for s in e.samples]
    return np.concatenate(stamps) if stamps else np.zeros(0, np.int32)


def _metrics(
    episodes: list[Episode], whole: dict[str, float], by_source: dict[str, dict[str, float]]
) -> dict[str, float]:
    if not any(episode.valid for episode in episodes):
        raise RuntimeError("no rollout of the evaluation came to a reward")
    whole.setdefault("reward", whole.get("greedy", 0.0))  # without sampled rollouts the greedy ones are the evaluation
    stamped = _versions(episodes)
    metrics = {f"eval/{name}": value for name, value in whole.items()}
    if len(by_source) > 1:
        metrics |= {f"eval/{s}/{name}": value for s, found in by_source.items() for name, value in found.items()}
    return metrics | {
        "eval/rollouts": float(len(episodes)),
        "eval/failed": float(sum(not e.valid for e in episodes)),
        "eval/truncated": float(sum(e.status == "truncated" for e in episodes)),
        "eval/tokens": len(stamped) / len(episodes),
        "eval/version_min": float(stamped.min()),
        "eval/version_max": float(stamped.max()),
    }
