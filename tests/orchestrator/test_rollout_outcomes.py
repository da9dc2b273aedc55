"""One attempt that can't be trained on, by fault of the environment, the engine or time: what its episode says."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from spmd_rl.envs.protocol import PromptTooLong
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Task
from tests.orchestrator.failing import one_episode
from tests.orchestrator.fake_cluster import Misbehaviour
from tests.orchestrator.fake_run import PROMPT, FakeEnvironment, make_config


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
