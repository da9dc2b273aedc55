"""Games with reset and step, of all three shapes: rewards, wrong actions, seeds, and what is no reward."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.envs.adapters.gym import Gym
from spmd_rl.envs.adapters.gym_texts import as_text
from spmd_rl.envs.demonstrate import demonstration
from spmd_rl.rollouts.types import Episode, RewardError
from tests.envs.adapters import games
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

GAMES = "tests.envs.adapters.games"


def make(name: str, **args: object) -> Gym:
    return Gym(byte_tokenizer(), 3, f"{GAMES}:{name}", **args)


def play(env: Gym, says, index: int = 0) -> tuple[Episode, ScriptedPolicy]:
    policy = ScriptedPolicy(byte_tokenizer(), says)
    return asyncio.run(env.rollout(env.task(index, "train"), policy)), policy


def hidden(env: Gym, index: int = 0) -> int:
    return random.Random(env.task(index, "train").data["seed"]).randint(1, 5)


def test_rewards_are_added_and_the_episode_ends() -> None:
    env = make("Find")
    right = hidden(env)
    wrong = right % 5 + 1
    episode, policy = play(env, [str(wrong), f"<think>no</think>{right}"])
    assert episode.reward.value == 0.5 and episode.status == "ok"
    assert episode.reward.parts == {"turns": 2.0, "invalid": 0.0, "done": 1.0}
    assert "[0, 0]\nAnswer with a whole number from 1 to 5." in policy.prompts[0]
    assert f"[{wrong}, {right}]" in policy.prompts[1]
    assert len(episode.samples) == 1 and np.array_equal(env.prompt(env.task(0, "train")), policy.asked[0][0])


@pytest.mark.parametrize("junk", ["0", "6", "²", "١", "1.0", "+1", "", "1 2", "\ud800", "9" * 5000, "z" * 50_000])
def test_what_is_no_action_is_answered(junk: str) -> None:
    env = make("Find")
    episode, policy = play(env, [junk.encode("utf-8", "replace").decode(), str(hidden(env))])
    assert episode.reward.value == 0.75 and episode.reward.parts["invalid"] == 1
    assert "error: Answer with a whole number from 1 to 5." in policy.prompts[1]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30))
def test_whatever_is_said_gets_a_reward(text: str) -> None:
    env = make("Find", max_turns=2)
    text = text.encode("utf-8", "replace").decode()
    assert play(env, lambda _: text)[0].valid


def test_turns_are_limited_and_instances_are_closed() -> None:
    env = make("Find", max_turns=3)
    before = games.Find.open_now
    episode, _ = play(env, ["0"] * 3)
    assert episode.reward.parts == {"turns": 3.0, "invalid": 3.0, "done": 0.0} and games.Find.open_now == before


def test_the_older_shape_and_its_texts() -> None:
    env = make("Old")
    seed = env.task(0, "train").data["seed"]
    episode, policy = play(env, ["abc", "end"])
    assert episode.reward.value == 6 and f"seed {seed}" in policy.prompts[0] and "you said abc" in policy.prompts[1]


def test_openenv_observations_and_async_methods() -> None:
    threads = threading.active_count()
    episode, policy = play(make("Open"), ["x", "end"])
    assert threading.active_count() == threads  # none is left behind per step
    assert episode.reward.value == 2 and "more" in policy.prompts[1]


def test_tasks_are_the_same_and_disjoint() -> None:
    one, two = make("Old", heldout=0.5), make("Old", heldout=0.5)
    sides = [[one.task(i, side).data["seed"] for i in range(50)] for side in ("train", "heldout")]
    assert sides[0] == [two.task(i, "train").data["seed"] for i in range(50)]
    assert not set(sides[0]) & set(sides[1]) and len(set(sides[0])) == 50


def test_a_reply_that_is_cut_ends_the_game_with_what_was_earned() -> None:
    episode, _ = play(make("Old"), ["abc", Said("en", "length")])
    assert episode.reward.value == 3 and episode.status == "truncated"
    failed, _ = play(make("Old"), [Said("en", "aborted")])
    assert failed.status == "failed" and isinstance(failed.reward, RewardError)


def test_what_the_game_does_wrong_is_never_a_zero() -> None:
    episode, _ = play(make("Broken"), ["x"])
    assert isinstance(episode.reward, RewardError) and "finite" in episode.reward.why and not episode.valid
    before = games.Crashes.closed
    with pytest.raises(RuntimeError, match="the game crashed"):
        play(make("Crashes"), ["x"])
    assert games.Crashes.closed == before + 2  # one of them was asked for its spaces


def test_own_actions() -> None:
    env = make("Wide", action=f"{GAMES}:pair")
    episode, policy = play(env, ["three", str(hidden(env))])
    assert episode.reward.value == 0.75 and "could not convert" in policy.prompts[1]


def test_a_teacher_of_ones_own() -> None:
    env = make("Find", solve=f"{GAMES}:solve")
    made = asyncio.run(demonstration(byte_tokenizer(), env, env.task(0, "train"), np.random.default_rng(0)))
    assert len(made) == 1 and made[0][1].sum() == 2  # a digit and the end


@pytest.mark.parametrize(
    ("name", "args", "error", "says"),
    [
        ("Unseeded", {}, TypeError, "can't be seeded"),
        ("Wide", {}, TypeError, "its actions are a Box.*`action`"),
        ("Nothing", {}, ValueError, "has no 'Nothing'"),
        ("Seen", {"options": {"text": "x"}}, TypeError, "no reset and step"),
        ("Find", {"max_turns": 0}, ValueError, "max_turns"),
    ],
)
def test_mistakes_are_answered_with_the_way_out(name, args, error, says) -> None:
    with pytest.raises(error, match=says):
        make(name, **args)


@dataclass
class Two:
    a: object
    b: int = 2
    done: bool = False


def test_observations_as_text() -> None:
    assert as_text("\x1b[41mS\x1b[0mFF") == "[S]FF"
    assert as_text({"x": np.float32(0.5), "y": (1, None)}) == '{"x": 0.5, "y": [1, null]}'
    assert as_text(Two(np.arange(2))) == '{"a": [0, 1], "b": 2}'
    assert as_text({(1, 2): 3}) == "{(1, 2): 3}"
