"""What holds for every built-in environment: its teacher, its splits, its samples, and whatever a policy may write."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import SamplingConfig, SourceConfig
from spmd_rl.envs.builtin.arithmetic import Arithmetic
from spmd_rl.envs.builtin.calculator import Calculator
from spmd_rl.envs.builtin.copy import Copy
from spmd_rl.envs.builtin.count import Count
from spmd_rl.envs.builtin.guess import Guess
from spmd_rl.envs.builtin.sort import Sort
from spmd_rl.envs.builtin.tictactoe import TicTacToe
from spmd_rl.envs.builtin.wordle import Wordle
from spmd_rl.envs.demonstrate import Demonstrator, demonstration
from spmd_rl.envs.load import load
from spmd_rl.envs.protocol import Generation, StopReason
from spmd_rl.rollouts.types import Episode, Reward, RewardError
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

END = 258
DENSE = {"reward": "dense"}
SHORT = {"chat": False}
ALL: dict[str, tuple[Any, dict[str, Any]]] = {
    "copy": (Copy, {}),
    "copy, dense, short": (Copy, DENSE | SHORT),
    "copy of repeats": (Copy, {"letters": "ab", "length": 9, "shortest": 2, "repeats": True, "rules": True}),
    "sort": (Sort, {}),
    "sort, dense, short": (Sort, DENSE | SHORT),
    "sort of repeats": (Sort, {"letters": "0123456789", "length": 7, "shortest": 2, "repeats": True}),
    "arithmetic": (Arithmetic, {}),
    "arithmetic, dense, short": (Arithmetic, {"largest": 99, "terms": 4, "operators": "+-*"} | DENSE | SHORT),
    "count": (Count, {}),
    "count, dense, short": (Count, {"length": 20} | DENSE | SHORT),
    "guess": (Guess, {}),
    "guess, dense, short": (Guess, {"numbers": 100, "turns": 7, "ranges": 1} | DENSE | SHORT),
    "wordle": (Wordle, {"rules": True}),
    "wordle of letters, dense, short": (Wordle, {"letters": "abcd", "turns": 9} | DENSE | SHORT),
    "wordle of words": (Wordle, {"words": ["red", "bed", "bad"]}),
    "tictactoe": (TicTacToe, {}),
    "tictactoe, short": (TicTacToe, SHORT),
    "tictactoe against chance": (TicTacToe, {"opponent": "random"}),
    "tictactoe against chance, short": (TicTacToe, {"opponent": "random", "opening": 3} | SHORT),
    "calculator": (Calculator, {}),
    "calculator of three steps": (Calculator, {"steps": 3, "digits": 2, "rules": True}),
    "calculator unseen": (Calculator, {"show_tools": False}),
}
EVERY = pytest.mark.parametrize("name", ALL)
WITH_ANSWER = pytest.mark.parametrize("name", [name for name in ALL if "tictactoe" not in name])


@cache
def made(name: str, seed: int = 0, wrong: float = 0.0) -> Any:
    cls, knobs = ALL[name]
    return cls(byte_tokenizer(), seed, wrong=wrong, **knobs)


def run(env: Any, task: Any, policy: Any) -> Episode:
    """One rollout, as an episode of a run would be."""
    loop = asyncio.new_event_loop()  # asyncio.run prints the result's arrays for itself, which takes long
    try:
        episode = loop.run_until_complete(env.rollout(task, policy))
    finally:
        loop.close()
    assert episode.task == task
    assert all(sample.mask.any() and not sample.mask[0] for sample in episode.samples)
    return episode


def taught(env: Any, task: Any, seed: int = 0) -> Episode:
    return run(env, task, Demonstrator(byte_tokenizer(), env, task, np.random.default_rng(seed)))


class JunkPolicy:
    """Answers with tokens that somebody else drew."""

    def __init__(self, replies: list[tuple[list[int], StopReason]]) -> None:
        self.sampling, self._replies = SamplingConfig(max_tokens=1000), replies
        self.reasons: list[StopReason] = []

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        ids, reason = self._replies[len(self.reasons) % len(self._replies)]
        ids = [*ids, END] if reason == "stop" else [*ids, 0]
        if len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], "length"
        self.reasons.append(reason)
        nothing = np.zeros(len(ids), np.float32)
        return Generation(np.asarray(ids, np.int32), nothing, nothing.astype(np.int32), reason)


NEARLY = ["7", "²", " 7 ", "٣", "1_000", "-1", "crane", "abc", "4\n</think>5", "５", "CRANE", "İabc"]
CALLS = [
    b'{"name": "add", "arguments": {"a": 1, "b": "\\ud800"}}',
    b'{"name": "multiply", "arguments": {"a": 1e400, "b": []}}',
    b'{"name": "multiply", "arguments": {"a": ' + b"9" * 40 + b', "b": 3.0}}',
    b'{"name": "_", "arguments": 7}',
]
JUNK = st.one_of(
    st.lists(st.integers(0, 264), max_size=90),
    st.sampled_from(NEARLY).map(lambda text: list(text.encode())),
    st.lists(st.sampled_from(CALLS), max_size=4).map(lambda calls: [i for call in calls for i in (259, *call, 260)]),
)
REPLIES = st.lists(
    st.tuples(JUNK, st.sampled_from(["stop", "stop", "stop", "stop", "length", "aborted"])), min_size=1, max_size=8
)


@EVERY
@given(replies=REPLIES, index=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_whatever_a_policy_writes_gets_a_reward(name: str, replies: Any, index: int) -> None:
    env, policy = made(name), JunkPolicy(replies)
    episode = run(env, env.task(index, "train"), policy)
    worst = max(policy.reasons, key=["stop", "length", "aborted"].index)
    assert episode.status == {"stop": "ok", "length": "truncated", "aborted": "failed"}[worst], episode.reward
    if worst == "aborted":
        assert episode.reward == RewardError("a reply was aborted")
    else:
        assert isinstance(episode.reward, Reward) and 0 <= episode.reward.value <= 1
        assert all(sample.reward is None or 0 <= sample.reward <= 1 for sample in episode.samples)


@EVERY
def test_a_number_of_more_digits_than_python_reads_is_read(name: str) -> None:
    cls, knobs = ALL[name]
    env = cls(byte_tokenizer(), 0, max_tokens=10**6, **knobs)
    policy = ScriptedPolicy(byte_tokenizer(), lambda prompt: "7" * 5000)
    episode = run(env, env.task(0, "train"), policy)
    assert isinstance(episode.reward, Reward) and episode.reward.value < 0.3


@WITH_ANSWER
@given(index=st.integers(0, 10**6), split=st.sampled_from(["train", "heldout"]))
@settings(max_examples=30, deadline=None)
def test_a_teacher_that_is_never_wrong_gets_everything(name: str, index: int, split: Any) -> None:
    env = made(name)
    episode = taught(env, env.task(index, split), index)
    assert (episode.reward.value, episode.status) == (1.0, "ok"), episode.reward


@pytest.mark.parametrize(
    ("name", "turns"),
    [("copy", 1), ("sort", 1), ("arithmetic", 1), ("count", 1), ("calculator", 2), ("calculator of three steps", 4)],
)
def test_a_teacher_is_wrong_as_often_as_it_says(name: str, turns: int) -> None:
    env = made(name, wrong=0.3)
    exact = [taught(env, env.task(i, "train"), i).reward.value == 1 for i in range(200)]
    assert np.mean(exact) == pytest.approx(0.7**turns, abs=0.1)


@EVERY
def test_a_demonstration_is_the_same_for_the_same_rng(name: str) -> None:
    env = made(name, wrong=0.3)
    for index in range(5):
        task = env.task(index, "train")
        first, second = (
            asyncio.run(demonstration(byte_tokenizer(), env, task, np.random.default_rng(index))) for _ in range(2)
        )
        assert [(t.tolist(), m.tolist()) for t, m in first] == [(t.tolist(), m.tolist()) for t, m in second]


@EVERY
def test_tasks_are_plain_reproducible_and_apart(name: str) -> None:
    env, again, other = made(name), ALL[name][0](byte_tokenizer(), 0, **ALL[name][1]), made(name, 1)
    asked: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for split in ("train", "heldout"):
        for index in [*range(300), 10**9]:
            task = env.task(index, split)
            assert task == again.task(index, split)
            assert json.loads(json.dumps(task.data)) == task.data
            assert task.index == index
            asked[split].add(json.dumps({**task.data, "index": None}, sort_keys=True))
            if split == "heldout":
                assert task == other.task(index, split)
    assert asked["train"] and asked["heldout"] and not asked["train"] & asked["heldout"]


@EVERY
@given(seed=st.integers(0, 1000), index=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_samples_are_what_the_policy_saw_and_said(name: str, seed: int, index: int) -> None:
    """Each prompt extends an earlier one and its answer, and each sample is the last of its line."""
    env = made(name, wrong=0.5)
    task = env.task(index, "train")
    teacher = Demonstrator(byte_tokenizer(), env, task, np.random.default_rng(seed))
    lines: list[list[int]] = []
    starts: list[list[int]] = []

    class Watched:
        sampling = teacher.sampling

        async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
            made = await teacher.generate(tokens, sampling)
            prompt = tokens.tolist()
            before = [line for line in lines if prompt[: len(line)] == line]
            if before:
                lines.remove(max(before, key=len))
            else:
                starts.append(prompt)
            lines.append(prompt + made.tokens.tolist())
            return made

    episode = run(env, task, Watched())
    assert sorted(sample.tokens.tolist() for sample in episode.samples) == sorted(lines)
    assert starts[0] == env.prompt(task).tolist()
    assert len(starts) == len(episode.samples)
    for sample in episode.samples:
        assert set(sample.agent) <= set("xo")
        assert sample.mask[-1] == 1 and sample.tokens[-1] == END


@EVERY
def test_an_attempt_without_an_end_is_truncated_and_over(name: str) -> None:
    env = made(name)
    policy = ScriptedPolicy(byte_tokenizer(), [Said("7", "length")])
    episode = run(env, env.task(0, "train"), policy)
    assert (episode.status, len(policy.asked)) == ("truncated", 1)
    assert isinstance(episode.reward, Reward) and episode.reward.value < 1


@EVERY
def test_a_reply_may_be_as_long_as_the_run_allows_and_no_longer(name: str) -> None:
    env = made(name)
    few = ScriptedPolicy(byte_tokenizer(), lambda prompt: "7", sampling=SamplingConfig(max_tokens=2, temperature=0.5))
    episode = run(env, env.task(0, "train"), few)
    assert all(sampling == few.sampling for _, sampling in few.asked)
    assert isinstance(episode.reward, Reward)
    many = ScriptedPolicy(byte_tokenizer(), lambda prompt: "7", sampling=SamplingConfig(max_tokens=10**6))
    run(env, env.task(0, "train"), many)
    assert all(sampling.max_tokens < 200 for _, sampling in many.asked)


@EVERY
@pytest.mark.parametrize(
    ("knob", "says"),
    [
        ({"wrong": 1.5}, r"wrong = 1\.5 must lie in 0\.\.1"),
        ({"wrong": "no"}, "wrong = 'no' must be a number"),
        ({"heldout": -1.0}, r"heldout = -1\.0 must lie in 0\.\.1"),
        ({"max_tokens": -3}, "max_tokens = -3"),
    ],
)
def test_knobs_that_all_have_are_checked(name: str, knob: dict[str, Any], says: str) -> None:
    cls, knobs = ALL[name]
    with pytest.raises(ValueError, match=says):
        cls(byte_tokenizer(), 0, **knobs | knob)


@EVERY
def test_nothing_held_out_is_an_error_when_it_is_asked_for(name: str) -> None:
    cls, knobs = ALL[name]
    env = cls(byte_tokenizer(), 0, **knobs | {"heldout": 0.0})
    env.task(0, "train")
    with pytest.raises(ValueError, match=r"is held out; make .* orchestrator\.eval\.tasks = 0"):
        env.task(0, "heldout")


@EVERY
def test_a_source_of_a_config_makes_it(name: str) -> None:
    cls, knobs = ALL[name]
    env = load(SourceConfig(env=f"{cls.__module__}:{cls.__name__}", args=knobs), byte_tokenizer(), 3)
    assert env.task(5, "train") == made(name, 3).task(5, "train")
    with pytest.raises(TypeError, match=r"args may hold .*wrong=0\.0, heldout=0\.1"):
        load(SourceConfig(env=f"{cls.__module__}:{cls.__name__}", args={"wrogn": 1}), byte_tokenizer(), 3)
