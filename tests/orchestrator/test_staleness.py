"""What staleness does to what is trained on: nothing is lost to it by default, and limits say what they cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spmd_rl.algorithms import resolve
from spmd_rl.config.tree import AlgorithmConfig, OrchestratorConfig
from spmd_rl.orchestrator.batch import make_batch
from spmd_rl.rollouts.types import Episode, Group, Reward, Sample, Task
from tests.orchestrator.fake_cluster import Delays
from tests.orchestrator.fake_run import FakeEnvironment, make_config, train

STEPS = 24


class Mixed(FakeEnvironment):
    """Every fourth task takes five turns, and long; the others one."""

    def __init__(self, slow_s: float = 12.0) -> None:
        super().__init__(turns=1)
        self.slow = FakeEnvironment(turns=5, pause=lambda task: slow_s)

    @staticmethod
    def is_long(index: int) -> bool:
        return index % 4 == 0

    async def attempt(self, task, policy):
        return await (self.slow.attempt if self.is_long(task.index) else super().attempt)(task, policy)


def lengths(groups) -> list[int]:
    return [int(sample.mask.sum()) for group in groups for e in group.episodes for sample in e.samples]


@pytest.mark.parametrize("order", ["fifo", "window"])
def test_long_and_short_tasks_are_trained_on_as_they_are_sampled(order):
    """At any time: what was trained on so far has the lengths of what was begun so far."""
    config = make_config(groups=4, max_steps=STEPS, max_lag=2, order=order)
    made = train(config, [Mixed()], delays=Delays(train=0.5))
    by_step = [batch.groups for _, batch in sorted(made.report.batches.items())]
    for part in (by_step[: STEPS // 2], by_step):
        groups = [group for batch in part for group in batch]
        share = np.mean([Mixed.is_long(group.task.index) for group in groups])
        assert share == pytest.approx(0.25, abs=0.07)
    everything = lengths(group for batch in by_step for group in batch)
    assert sum(everything) == sum(len(answer.tokens) for answer in made.cluster.answers.values())


def test_completion_trains_on_short_tasks_first_and_on_the_long_ones_in_the_end():
    config = make_config(groups=4, max_steps=STEPS, max_lag=2, order="completion")
    made = train(config, [Mixed(slow_s=60.0)], delays=Delays(train=0.5))
    shares = [
        np.mean([Mixed.is_long(group.task.index) for group in batch.groups])
        for _, batch in sorted(made.report.batches.items())
    ]
    assert np.mean(shares[: STEPS // 4]) < 0.15 and np.mean(shares) == pytest.approx(0.25)


def test_a_hard_limit_drops_what_runs_too_long_and_says_so():
    config = make_config(groups=4, max_steps=STEPS, max_lag=2, order="completion", max_off_policy_steps=2)
    made = train(config, [Mixed(slow_s=1e6)], delays=Delays(train=0.5))
    stats = [batch.stats for _, batch in sorted(made.report.batches.items())]
    assert all({"stale/groups", "stale/tokens"} <= set(s) for s in stats)
    dropped, tokens = (sum(s[name] for s in stats) for name in ("stale/groups", "stale/tokens"))
    assert dropped >= 3
    early = [batch for step, batch in made.report.batches.items() if step <= STEPS - 4]  # then nothing else is left
    trained = [group for batch in early for group in batch.groups]
    assert not any(Mixed.is_long(group.task.index) for group in trained)
    # What it cost: the dropped groups were the long ones, and the figures show it.
    assert tokens / dropped > 2 * np.mean([sum(lengths([group])) for group in trained])
    assert made.loop._book.fates["stale"] == dropped
    assert sum(len(documents) for documents in made.cluster.trained()) == STEPS * 4 * 2


def sample(versions: list[int]) -> Sample:
    """A prompt of one token and a token of each version."""
    count = len(versions) + 1
    ones = np.ones(count, np.float32)
    mask = np.asarray([0, *[1] * len(versions)], np.uint8)
    return Sample(np.arange(count, dtype=np.int32), mask, -ones, np.asarray([-1, *versions], np.int32), ones)


def batch(oldest: int, **options):
    task = Task("t", 0, {})
    rolls = [([3, 4, 5], 1.0), ([5, 5, 5], 0.0), ([2, 2, 2], 1.0)]
    group = Group(0, task, tuple(Episode(task, (sample(v),), Reward(r)) for v, r in rolls), 2)
    config = OrchestratorConfig(algorithm=AlgorithmConfig(type="grpo"), max_token_lag=1, **options)
    return make_batch([group], [], config, resolve(config.algorithm), {}, 0, oldest)


def test_old_tokens_are_not_trained_on_and_count_all_the_same():
    """Neither the baseline nor a denominator knows that they were masked."""
    everything, masked = batch(0), batch(4)
    assert [g.episodes[0].samples[0].advantages for g in everything.groups] == [
        g.episodes[0].samples[0].advantages for g in masked.groups
    ]
    before, after = (b.minibatches[0] for b in (everything, masked))
    weight = before[0].pg_weight
    np.testing.assert_allclose(after[0].pg_weight, np.float32([0, 0, weight, weight]))
    assert after[1].pg_weight == before[1].pg_weight
    np.testing.assert_array_equal(after[2].pg_weight, np.zeros(4, np.float32))
    assert masked.stats["lag/masked"] == pytest.approx(4 / 9) and everything.stats["lag/masked"] == 0
    for name in ("tokens", "mask", "logprobs"):
        assert all(np.array_equal(getattr(a, name), getattr(b, name)) for a, b in zip(before, after, strict=True))


def test_a_teachers_tokens_have_no_age():
    group = batch(0).groups[0]
    frozen = replace(group.episodes[0].samples[0], versions=np.full(4, -1, np.int32))
    group = replace(group, episodes=(replace(group.episodes[0], samples=(frozen,)), *group.episodes[1:]))
    config = OrchestratorConfig(max_token_lag=1)
    made = make_batch([group], [], config, resolve(config.algorithm), {}, 0, 9)
    assert isinstance(made.minibatches[0][0].pg_weight, float)
