"""Evaluation on held-out tasks, on the engines that train: one greedy and some sampled rollouts per task.

Every token carries its policy version, so the result says which versions it speaks of; outside a pull that is one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np

from spmd_rl.envs.protocol import Environment
from spmd_rl.orchestrator.sampler import Services
from spmd_rl.orchestrator.seeds import seed_of
from spmd_rl.rollouts.types import Episode

EVAL_IDS = 1 << 40  # ids of evaluation groups and rollouts start here, apart from training


async def evaluate(services: Services, envs: list[Environment], step: int) -> tuple[dict[str, float], list[Episode]]:
    """Metrics of one evaluation, and its greedy episodes. RuntimeError when no rollout came to a reward."""
    started = time.monotonic()
    config = services.config.orchestrator
    sampled = config.sampling
    greedy = replace(sampled, temperature=0.0)
    tasks = [(env, env.task(i, "heldout")) for env in envs for i in range(config.eval.tasks)]

    async def run(number: int, sample: int, sampling) -> Episode:
        env, task = tasks[number]
        seed = seed_of(services.config.seed, "eval", step, task.source, task.index, sample)
        rollout = EVAL_IDS + number * (config.eval.samples + 1) + sample
        policy = services.policy(sampling, group=EVAL_IDS + number, rollout=rollout, seed=seed)
        return await services.attempt(env, task, policy)

    samplings = [greedy] + [sampled] * config.eval.samples
    jobs = [run(n, i, sampling) for n in range(len(tasks)) for i, sampling in enumerate(samplings)]
    episodes = await asyncio.gather(*jobs)
    for number in range(len(tasks)):
        services.router.forget_group(EVAL_IDS + number)
    metrics = _metrics(episodes, len(samplings))
    return metrics | {"time/eval_s": time.monotonic() - started}, episodes[:: len(samplings)]


def _metrics(episodes: list[Episode], per_task: int) -> dict[str, float]:
    greedy = [e.reward.value for e in episodes[::per_task] if e.valid]
    sampled = [e.reward.value for i, e in enumerate(episodes) if i % per_task and e.valid]
    if not greedy and not sampled:
        raise RuntimeError("no rollout of the evaluation came to a reward")
    stamped = np.concatenate([s.versions[s.mask == 1] for e in episodes for s in e.samples])
    metrics = {
        "eval/rollouts": float(len(episodes)),
        "eval/failed": float(sum(not e.valid for e in episodes)),
        "eval/version_min": float(stamped.min()),
        "eval/version_max": float(stamped.max()),
    }
    if greedy:
        metrics["eval/greedy"] = float(np.mean(greedy))
    # Without sampled rollouts the greedy ones are the evaluation.
    metrics["eval/reward"] = float(np.mean(sampled)) if sampled else metrics["eval/greedy"]
    return metrics
