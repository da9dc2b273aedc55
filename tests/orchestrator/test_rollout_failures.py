"""Rollouts that fail are masked out, counted, replaced and tried again, and end the run when there are too many."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.orchestrator.rollouts import TooManyFailures
from spmd_rl.orchestrator.window import Window
from spmd_rl.rollouts.types import Episode, Reward, Task
from spmd_rl.world.messages import Cancel
from tests.orchestrator.failing import Broken, boom, failing_every, root
from tests.orchestrator.fake_cluster import Delays, Misbehaviour
from tests.orchestrator.fake_run import PROMPT, FakeEnvironment, make_config, prepare, train
from tests.orchestrator.virtual_time import run


def test_a_few_failures_are_masked_out_and_counted() -> None:
    made = train(make_config(max_steps=5, groups=2, group_size=5, max_lag=1), [FakeEnvironment(act=failing_every(10))])
    trained = made.cluster.trained()
    assert [len(documents) for documents in trained] == [
        10 - int(batch.stats["episodes/failed"]) for batch in made.report.batches.values()
    ]
    assert sum(batch.stats["episodes/failed"] for batch in made.report.batches.values()) == 5
    assert made.services.rollouts.statuses["failed"] == 5
    assert [len(batch.episodes) for batch in made.report.batches.values()] == [10] * 5
    failed = [e for batch in made.report.batches.values() for e in batch.episodes if not e.valid]
    assert all("Broken: attempt" in e.reward.why and e.samples == () for e in failed)


async def fail_tasks_1_and_4(number: int, task: Task) -> None:
    if task.index in (1, 4):
        raise Broken


def test_a_group_without_any_valid_episode_is_replaced() -> None:
    config = make_config(max_steps=3, groups=2, group_size=2, max_error_rate=0.5)
    made = train(config, [FakeEnvironment(act=fail_tasks_1_and_4)])
    trained = [Counter(int(d[0]) - PROMPT for d in documents) for documents in made.cluster.trained()]
    assert sum(trained, Counter()) == dict.fromkeys([0, 2, 3, 5, 6, 7], 2)
    assert all(sorted(counts.values()) == [2, 2] for counts in trained)


def test_a_group_that_fails_late_is_replaced_at_the_version_of_that_time() -> None:
    async def task_0_fails_late(number: int, task: Task) -> None:
        if task.index == 0:
            await asyncio.sleep(1000)
            raise Broken

    config = make_config(max_steps=3, groups=4, group_size=2, max_lag=1, window_fraction=0.7, max_error_rate=0.5)
    made = train(config, [FakeEnvironment(act=task_0_fails_late)], delays=Delays(tail=9.0))
    groups = [group for batch in made.report.batches.values() for group in batch.groups]
    assert len(groups) == 12
    assert {group.task.index: group.admitted_version for group in groups}[12] == 1  # the one that came instead


@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 4),
    group_size=st.integers(1, 3),
    max_lag=st.integers(0, 3),
    order=st.sampled_from(["fifo", "window", "completion"]),
    seed=st.integers(0, 10_000),
    share=st.sampled_from([0.1, 0.5, 0.8]),
)
def test_whatever_fails_every_batch_is_whole_and_no_rollout_is_lost(
    groups, group_size, max_lag, order, seed, share
) -> None:
    """Attempts raise before or after their tokens, hang, are refused or never answered: any mixture, at any time."""
    max_steps, rng = 4, np.random.default_rng(seed)

    async def act(number: int, task: Task) -> None:
        if rng.random() < share:
            await asyncio.sleep(rng.pareto(1.0))
            raise [Broken, TimeoutError, asyncio.CancelledError][rng.integers(3)]()

    misbehaviour = Misbehaviour(refuse=lambda r: r.seed % 11 == 0, silent=lambda r: r.seed % 7 == 0)
    config = make_config(
        groups=groups,
        group_size=group_size,
        max_steps=max_steps,
        max_lag=max_lag,
        order=order,
        env_s=50.0,
        window_fraction=0.5,
        max_error_rate=1.0,
    )
    env = FakeEnvironment(turns=2, act=act)
    made = train(config, [env], misbehaviour=misbehaviour, delays=Delays(seed=seed), replicas=2)
    o, batches = made.config.orchestrator, made.report.batches
    bound = Window(groups, max_lag, 0.5, order).bound
    used = [group.task.index for batch in batches.values() for group in batch.groups]
    assert len(used) == len(set(used)) == max_steps * groups
    for step, documents in enumerate(made.cluster.trained(), start=1):
        batch = batches[step]
        assert all(len(group.episodes) == o.group_size for group in batch.groups)
        assert all(any(episode.valid for episode in group.episodes) for group in batch.groups)
        assert len(documents) == sum(episode.valid for episode in batch.episodes)
        assert bound is None or max(step - 1 - group.admitted_version for group in batch.groups) <= bound
        assert batch.lags(step).min() >= 0
    attempts = Counter(task.index for task in env.history)
    assert set(attempts.values()) == {group_size}  # replacements are new tasks
    assert sum(made.services.rollouts.statuses.values()) == len(env.history)
    assert made.services.router.depth == [0, 0]
    assert made.loop.link.waiting == 0


def test_when_everything_fails_the_run_ends_with_the_first_tracebacks() -> None:
    with pytest.raises(BaseException) as caught:
        train(make_config(groups=4, group_size=4), [FakeEnvironment(act=boom, source="my/source")])
    error = root(caught.value)
    assert isinstance(error, TooManyFailures)
    text = str(error)
    assert "8 of the last 8 rollouts failed, more than orchestrator.max_error_rate = 0.2 allows" in text
    assert [f"attempt {i} exploded" in text for i in range(4)] == [True, True, True, False]
    assert text.count("Traceback") == 3
    assert "task my/source #0" in text
    assert 'raise Broken(f"attempt {number} exploded")' in text  # the line of the environment itself


def test_the_rate_is_taken_over_recent_rollouts() -> None:
    """A thousand good ones do not buy a hundred bad ones."""

    async def later(number: int, task: Task) -> None:
        if number >= 200:
            raise Broken

    with pytest.raises(BaseException) as caught:
        train(make_config(max_steps=100, groups=2, group_size=4), [FakeEnvironment(act=later)])
    assert "13 of the last 64 rollouts failed" in str(root(caught.value))


def test_an_environment_that_cancels_itself_fails_and_is_not_lost() -> None:
    async def act(number: int, task: Task) -> None:
        if number == 3:
            helper = asyncio.ensure_future(asyncio.sleep(10))
            helper.cancel()
            await helper

    made = train(make_config(max_steps=3, groups=2, group_size=2), [FakeEnvironment(act=act)])
    assert made.services.rollouts.statuses["failed"] == 1
    assert sum(len(documents) for documents in made.cluster.trained()) == 11


def test_hanging_rollouts_are_cancelled_on_their_engine_and_the_run_goes_on() -> None:
    silent = Misbehaviour(silent=lambda request: request.id % 10 == 9)
    config = make_config(max_steps=5, groups=2, group_size=5, max_lag=1, env_s=30.0)
    made = train(config, misbehaviour=silent, delays=Delays(tail=9.0))
    cancelled = {decision.id for _, decision in made.cluster.decisions if isinstance(decision, Cancel)}
    assert cancelled == {id for id in made.cluster.requests if id % 10 == 9}
    assert len(cancelled) == made.services.rollouts.statuses["timeout"] == 5
    assert {made.cluster.answers[id].stop_reason for id in cancelled} == {"aborted"}
    assert sum(len(documents) for documents in made.cluster.trained()) == 45
    assert made.services.router.depth == [0]


def test_requests_of_a_run_that_ends_in_an_error_are_cancelled() -> None:
    async def act(number: int, task: Task) -> None:
        if number >= 8:
            await asyncio.sleep(5)
            raise Broken

    made = []

    async def main() -> None:
        config = make_config(groups=8, group_size=2, max_lag=0)
        made.append(await prepare(config, [FakeEnvironment(act=act)], misbehaviour=Misbehaviour(silent=bool)))
        await made[0].loop.run()

    with pytest.raises(BaseException) as caught:
        run(main())
    assert isinstance(root(caught.value), TooManyFailures)
    cancelled = [decision.id for _, decision in made[0].cluster.decisions if isinstance(decision, Cancel)]
    assert sorted(cancelled) == sorted(made[0].cluster.requests) == list(range(8))
    assert made[0].services.rollouts.statuses == {"failed": 8}  # who was cancelled did not fail


def test_an_aborted_generation_is_no_attempt() -> None:
    """The engine gave up a request by itself: the episode has a reward, but is neither trained on nor a success."""

    async def act(number: int, task: Task) -> Episode:
        return Episode(task, (), Reward(0.0), status="failed")

    with pytest.raises(BaseException) as caught:
        train(make_config(groups=4, group_size=4), [FakeEnvironment(act=act)])
    assert isinstance(root(caught.value), TooManyFailures)
    assert "the environment gave it the status failed" in str(root(caught.value))


def test_a_request_that_the_engine_refuses_fails_its_rollout_alone() -> None:
    refusing = Misbehaviour(refuse=lambda request: request.id % 10 == 9)
    made = train(make_config(max_steps=5, groups=2, group_size=5), misbehaviour=refusing)
    failed = [e for batch in made.report.batches.values() for e in batch.episodes if not e.valid]
    assert len(failed) == 5
    assert all("RefusedError: ValueError: the prompt is not to my taste" in e.reward.why for e in failed)
    assert made.services.router.depth == [0]


def test_a_rollout_that_failed_is_tried_again_with_another_seed() -> None:
    async def first_try_fails(number: int, task: Task) -> None:
        if number < 4:
            raise Broken

    made = train(
        make_config(max_steps=1, groups=2, group_size=2, max_retries=1), [FakeEnvironment(act=first_try_fails)]
    )
    batch = made.report.batches[1]
    assert batch.stats["episodes/failed"] == 0 and batch.stats["errors/Broken"] == 4
    assert made.services.rollouts.statuses["failed"] == 4
    assert len({request.seed for request in made.cluster.requests.values()}) == 4


def test_retries_end() -> None:
    async def fails(number: int, task: Task) -> None:
        if task.index == 0:
            raise Broken

    made = train(make_config(max_steps=3, max_retries=2, max_error_rate=0.9), [env := FakeEnvironment(act=fails)])
    assert sum(task.index == 0 for task in env.history) == 2 * 3  # group_size × (1 + retries)
    assert 0 not in {group.task.index for batch in made.report.batches.values() for group in batch.groups}


def test_a_rollout_that_missed_its_deadline_is_not_tried_again() -> None:
    async def hangs(number: int, task: Task) -> None:
        if number == 0:
            await asyncio.sleep(1e6)

    config = make_config(max_steps=2, max_retries=5, env_s=30.0)
    made = train(config, [env := FakeEnvironment(act=hangs)])
    counts = Counter(task.index for task in env.history)
    assert set(counts.values()) == {2}
    assert made.services.rollouts.statuses["timeout"] == 1
    assert sum(batch.stats.get("errors/deadline", 0) for batch in made.report.batches.values()) == 1
