"""What goes wrong in a rollout becomes data, is counted, and ends the run only when there is too much of it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.envs.protocol import PromptTooLong
from spmd_rl.orchestrator.rollouts import TooManyFailures
from spmd_rl.orchestrator.stall import Stalled, watch_progress
from spmd_rl.orchestrator.window import Window
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Task
from spmd_rl.world.messages import Cancel, EngineLoad, Pulled
from tests.orchestrator.fake_cluster import Delays, Misbehaviour
from tests.orchestrator.fake_run import PROMPT, FakeEnvironment, make_config, prepare, train
from tests.orchestrator.virtual_time import run


class Broken(RuntimeError):
    """The environment's own error."""


async def boom(number: int, task: Task) -> None:
    raise Broken(f"attempt {number} exploded")


def root(error: BaseException) -> BaseException:
    """The first error inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def one_episode(env: FakeEnvironment, **options) -> Episode:
    """The episode of one attempt at task 0, with one replica and one rollout in flight."""

    async def main() -> Episode:
        config = options.pop("config", make_config())
        made = await prepare(config, [env], **options)
        made.loop.versions.publish(0)
        await made.loop.versions.wait_everywhere(0)
        policy = made.services.policy(config.orchestrator.sampling, group=0, rollout=0, seed=0)
        episode = await made.services.rollouts.run(env, env.task(0, "train"), policy, config.deadlines.env_s)
        assert made.services.router.depth == [0]
        await asyncio.sleep(1)  # a Cancel arrives with a tick
        assert not any(made.cluster.misbehaviour.silent(r) for r in made.cluster.requests.values()) or any(
            isinstance(decision, Cancel) for _, decision in made.cluster.decisions
        )
        await made.cluster.close()
        return episode

    return run(main())


def failing_every(n: int):
    async def act(number: int, task: Task) -> None:
        if number % n == n - 1:
            raise Broken(f"attempt {number} exploded")

    return act


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_finite_number_is_an_error_and_never_a_zero(value: float) -> None:
    async def act(number: int, task: Task) -> Episode:
        return Episode(task, (), Reward(value))

    episode = one_episode(FakeEnvironment(act=act))
    assert episode.status == "failed"
    assert episode.reward == RewardError(f"the reward is {value}", "not_finite")


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (False, "TypeError: the environment returned bool, not an Episode"),
        (3.5, "TypeError: the environment returned float, not an Episode"),
        (Reward(1.0), "TypeError: the environment returned Reward, not an Episode"),
        (Episode(Task("x", 0, {}), (), 1.0), "TypeError: the episode's reward is float; return Reward(number)"),
        (Episode(Task("x", 0, {}), (), None), "TypeError: the episode's reward is NoneType"),
        (Episode(Task("x", 0, {}), (), Reward("1")), "TypeError"),
        (Episode(Task("x", 0, {}), (), Reward(None)), "TypeError"),
    ],
)
def test_an_environment_that_returns_something_else_is_told_what_to_return(returned, why: str) -> None:
    async def act(number: int, task: Task):
        return returned

    episode = one_episode(FakeEnvironment(act=act))
    assert (episode.status, episode.task.source) == ("failed", "fake")
    assert why in episode.reward.why


def test_an_environment_that_returns_nothing_is_told_so() -> None:
    env = FakeEnvironment()
    env.attempt = lambda task, policy: asyncio.sleep(0)
    assert "the environment returned NoneType, not an Episode" in one_episode(env).reward.why


def test_an_episode_belongs_to_the_task_that_was_given() -> None:
    episode = one_episode(with_samples(lambda sample: (sample,)))
    assert episode.valid
    assert episode.task == Task("fake", 0, {"split": "train"})


def test_a_reward_error_of_the_environment_is_kept() -> None:
    async def act(number: int, task: Task) -> Episode:
        return Episode(task, (), RewardError("the judge is asleep"))

    episode = one_episode(FakeEnvironment(act=act))
    assert episode.reward == RewardError("the judge is asleep")
    assert not episode.valid


async def hang(number: int, task: Task) -> None:
    await asyncio.Event().wait()


def test_a_rollout_that_hangs_meets_its_deadline() -> None:
    episode = one_episode(FakeEnvironment(act=hang), config=make_config(env_s=30.0))
    assert episode.status == "timeout"
    assert episode.reward == RewardError("no result within 30 s (deadlines.env_s, source.rollout_s)", "deadline")
    assert episode.seconds == pytest.approx(30)


def test_an_engine_that_never_answers_is_told_to_forget_the_request() -> None:
    silent = Misbehaviour(silent=lambda request: True)
    episode = one_episode(FakeEnvironment(), config=make_config(env_s=30.0), misbehaviour=silent)
    assert episode.status == "timeout"


def test_a_timeout_inside_the_environment_is_its_own_failure_and_not_the_deadline() -> None:
    async def act(number: int, task: Task) -> None:
        raise TimeoutError("the sandbox did not come up")

    episode = one_episode(FakeEnvironment(act=act))
    assert episode.status == "failed"
    assert "the sandbox did not come up" in episode.reward.why


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


def test_a_prompt_that_fills_the_sequence_names_the_key_to_change() -> None:
    env = FakeEnvironment()
    env.prompt = lambda task: np.full(64, 5, np.int32)
    why = one_episode(env).reward.why
    assert PromptTooLong.__name__ in why
    assert "a prompt of 64 tokens leaves no room in seq_len = 64: raise seq_len" in why


def test_no_generation_grows_beyond_the_sequence() -> None:
    env = FakeEnvironment()
    env.prompt = lambda task: np.full(62, PROMPT, np.int32)
    episode = one_episode(env)
    assert episode.valid
    assert len(episode.samples[0].tokens) <= 64


def test_a_request_that_the_engine_refuses_fails_its_rollout_alone() -> None:
    refusing = Misbehaviour(refuse=lambda request: request.id % 10 == 9)
    made = train(make_config(max_steps=5, groups=2, group_size=5), misbehaviour=refusing)
    failed = [e for batch in made.report.batches.values() for e in batch.episodes if not e.valid]
    assert len(failed) == 5
    assert all("RefusedError: ValueError: the prompt is not to my taste" in e.reward.why for e in failed)
    assert made.services.router.depth == [0]


def with_samples(change) -> FakeEnvironment:
    """An environment whose samples are changed by `change(sample)`, and that says it tried another task."""
    env = FakeEnvironment()
    attempt = env.attempt

    async def changed(task, policy) -> Episode:
        episode = await attempt(task, policy)
        return replace(episode, task=Task("another", 7, {}), samples=change(episode.samples[0]))

    env.attempt = changed
    return env


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: (), "no sampled token"),
        (lambda s: (replace(s, mask=0 * s.mask),), "no sampled token"),
        (lambda s: (replace(s, logprobs=s.logprobs[1:]),), "logprobs"),
        (lambda s: (s, replace(s, versions=s.versions[1:])), "versions"),
        (lambda s: (replace(s, mask=s.mask | 1),), "first token"),
        (lambda s: (s, replace(s, **{k: np.resize(v, 65) for k, v in columns(s).items()})), "seq_len = 64"),
        (lambda s: (replace(s, logprobs=s.logprobs * np.nan),), "logprobs"),
        (lambda s: ("text",), "str"),
    ],
)
def test_samples_that_could_not_be_trained_on_fail_their_rollout_and_not_the_run(change, why: str) -> None:
    episode = one_episode(with_samples(change))
    assert episode.status == "failed"
    assert why in episode.reward.why


def columns(sample) -> dict[str, np.ndarray]:
    return {name: column for name, column in vars(sample).items() if column is not None}


class Heard:
    """The part of a link that the progress watch looks at."""

    heard, waiting = 0, 3


def test_nothing_heard_for_too_long_is_an_error_that_says_what_is_outstanding() -> None:
    beats = []

    async def main() -> None:
        link = Heard()
        watch = asyncio.create_task(watch_progress(link, 60.0, lambda: beats.append(asyncio.get_running_loop().time())))
        for _ in range(10):
            await asyncio.sleep(50)
            link.heard += 1
        await watch

    with pytest.raises(Stalled, match=r"60 s \(deadlines.stall_s\); 3 generations are outstanding"):
        run(main())
    assert beats[-1] == pytest.approx(560, abs=0.3)
    assert max(np.diff(beats)) < 0.2


def test_counters_of_an_idle_engine_are_no_progress() -> None:
    async def main() -> tuple[int, int]:
        made = await prepare(make_config())
        link = made.loop.link
        link.deliver(1, EngineLoad(2, 1, 1.0, 1, 1.0))
        await asyncio.sleep(1)
        before = link.heard
        made.loop.versions.publish(0)
        link.deliver(1, Pulled(2, 0, 1, 0.1, 0.1, 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        after = link.heard
        await made.cluster.close()
        return before, after

    assert run(main()) == (0, 1)


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
