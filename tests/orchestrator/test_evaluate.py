"""An evaluation: one greedy and some sampled rollouts per held-out task, and what is made of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from spmd_rl.config.tree import EvalConfig
from spmd_rl.orchestrator.evaluate import EVAL_IDS, evaluate
from spmd_rl.orchestrator.rollouts import TooManyFailures
from spmd_rl.rollouts.packing import pack
from spmd_rl.rollouts.types import Reward
from tests.orchestrator.fake_cluster import Delays
from tests.orchestrator.fake_run import HELDOUT, FakeEnvironment, make_config, prepare
from tests.orchestrator.virtual_time import run


class Graded(FakeEnvironment):
    """Greedy attempts at task i earn 10 + i, sampled ones their number 1, 2, … within the task; `fails` raise."""

    def __init__(self, fails=lambda task, temperature: False, source: str = "fake") -> None:
        super().__init__(source=source)
        self.fails, self.sampled = fails, Counter()

    async def attempt(self, task, policy):
        if self.fails(task, policy.sampling.temperature):
            raise RuntimeError("broken")
        self.sampled[task.index] += policy.sampling.temperature > 0
        value = self.sampled[task.index] if policy.sampling.temperature else 10 + task.index
        return replace(await super().attempt(task, policy), reward=Reward(float(value)))


def evaluated(envs: list[FakeEnvironment], tasks: int, samples: int, **options):
    """(metrics, greedy episodes, run) of an evaluation at step 7, made of versions 0 …"""

    async def main():
        changes = {name: options.pop(name) for name in ("max_error_rate", "max_retries") if name in options}
        config = make_config(sources=len(envs), **changes)
        held = EvalConfig(tasks, 0, samples, **options.pop("eval", {}))
        config = replace(config, orchestrator=replace(config.orchestrator, eval=held))
        made = await prepare(config, envs, **options)
        made.loop.versions.publish(0)
        await made.loop.versions.wait_everywhere(0)
        evaluation = await evaluate(made.services, made.loop.sources, step=7)
        await made.cluster.close()
        made.evaluation = evaluation
        return evaluation.metrics, evaluation.shown, made

    return run(main())


def test_greedy_and_sampled_rewards_are_averaged_apart() -> None:
    metrics, greedy, made = evaluated([Graded()], tasks=3, samples=4)
    assert metrics["eval/greedy"] == 11
    assert metrics["eval/reward"] == 2.5
    assert metrics["eval/rollouts"] == 15
    assert metrics["eval/failed"] == 0
    assert [(e.task.index, e.reward.value) for e in greedy] == [(0, 10), (1, 11), (2, 12)]
    assert metrics["eval/version_min"] == metrics["eval/version_max"] == 0
    assert made.services.router.depth == [0]


def test_versions_that_change_meanwhile_are_named() -> None:
    async def main():
        config = make_config(eval_tasks=8)
        envs = [FakeEnvironment()]
        made = await prepare(config, envs, delays=Delays(tail=9.0, train=0.3))
        made.loop.versions.publish(0)
        await made.loop.versions.wait_everywhere(0)
        evaluation = asyncio.create_task(evaluate(made.services, made.loop.sources, step=0))
        made.loop.trainers.train("rl", 1, [pack([], 1, config.seq_len)])
        made.loop.versions.publish(1)
        metrics = (await evaluation).metrics
        await made.cluster.close()
        return metrics, np.concatenate([a.versions for a in made.cluster.answers.values()])

    metrics, versions = run(main())
    assert (metrics["eval/version_min"], metrics["eval/version_max"]) == (versions.min(), versions.max()) == (0, 1)


def test_every_source_is_evaluated_on_its_own_held_out_tasks() -> None:
    envs = [Graded(source="a"), Graded(source="b")]
    metrics, greedy, made = evaluated(envs, tasks=2, samples=1)
    assert [(e.task.source, e.task.index) for e in greedy] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert all(request.tokens[0] >= HELDOUT for request in made.cluster.requests.values())
    temperatures = Counter(request.temperature for request in made.cluster.requests.values())
    assert temperatures == {0.0: 4, 1.0: 4}
    assert len({request.seed for request in made.cluster.requests.values()}) == 8
    assert metrics["eval/rollouts"] == 8


def test_failures_are_counted_and_never_a_zero() -> None:
    broken = Graded(fails=lambda task, temperature: task.index == 0 and temperature > 0)
    metrics, _, _ = evaluated([broken], tasks=4, samples=2, max_error_rate=0.5)
    assert metrics["eval/failed"] == 2
    assert metrics["eval/rollouts"] == 12
    assert metrics["eval/reward"] == 1.5
    assert metrics["eval/greedy"] == 11.5


def test_an_attempt_with_a_reward_and_a_failed_status_counts_as_failed() -> None:
    class GaveUp(Graded):
        async def attempt(self, task, policy):
            episode = await super().attempt(task, policy)
            return replace(episode, status="failed") if task.index == 0 else episode

    metrics, _, _ = evaluated([GaveUp()], tasks=2, samples=1, max_error_rate=1.0)
    assert (metrics["eval/failed"], metrics["eval/greedy"], metrics["eval/reward"]) == (2, 11, 1)


def test_without_samples_the_greedy_rollouts_are_the_evaluation() -> None:
    metrics, _, _ = evaluated([Graded()], tasks=3, samples=0)
    assert metrics["eval/reward"] == metrics["eval/greedy"] == 11


def test_without_any_greedy_reward_there_is_no_greedy_mean() -> None:
    metrics, _, _ = evaluated([Graded(lambda task, temperature: temperature == 0)], 2, 2, max_error_rate=1.0)
    assert "eval/greedy" not in metrics
    assert metrics["eval/reward"] == 1.5


def test_an_evaluation_without_any_reward_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no rollout of the evaluation came to a reward"):
        evaluated([Graded(lambda task, temperature: True)], tasks=2, samples=1)
    with pytest.raises(TooManyFailures, match="broken"):
        evaluated([Graded(lambda task, temperature: True)], tasks=4, samples=1)


def test_its_rollouts_have_ids_of_their_own_and_leave_nothing_in_the_router() -> None:
    _, _, made = evaluated([Graded()], tasks=2, samples=1, replicas=2, delays=Delays(generate=0.1))
    assert EVAL_IDS > 10**9
    assert not made.services.router._groups
