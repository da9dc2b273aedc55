"""Classes whose methods are tools: what is said, what is called, and what comes of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from spmd_rl.envs.adapters.methods import Methods
from spmd_rl.rollouts.types import Episode, RewardError
from tests.envs.adapters.own_classes import Counter
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

CLASSES = "tests.envs.adapters.own_classes"
ROW = [{"goal": 3}]


def make(name: str = "Counter", **args: object) -> Methods:
    return Methods(byte_tokenizer(), 3, f"{CLASSES}:{name}", **args)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(env: Methods, says) -> tuple[Episode, ScriptedPolicy]:
    policy = ScriptedPolicy(byte_tokenizer(), says)
    return asyncio.run(env.rollout(env.task(0, "train"), policy)), policy


def test_methods_are_called_and_rewarded() -> None:
    env, alive = make(rows=ROW), Counter.alive
    episode, policy = play(env, [call("add", amount=2) + call("add", amount=1), call("value"), "done"])
    assert episode.reward.value == 1.5 and episode.status == "ok" and len(episode.samples) == 1
    assert episode.reward.parts == {"turns": 3.0, "calls": 3.0, "bad_calls": 0.0, "near": 0.5, "there": 1.0}
    assert "Count to 3." in policy.prompts[0] and "how much" in policy.prompts[0]
    assert not any(f'"name": "{name}"' in policy.prompts[0] for name in ("reset", "reward", "tasks", "close", "hidden"))
    assert np.array_equal(env.prompt(env.task(0, "train")), policy.asked[0][0]) and Counter.alive == alive


def test_what_a_tool_raises_is_read_by_the_model() -> None:
    episode, policy = play(make(rows=ROW), [call("add", amount=-1), call("reset", goal=0), call("add", amount=3), "ok"])
    assert "error: ValueError: only up" in policy.prompts[1] and "no tool 'reset'" in policy.prompts[2]
    assert episode.reward.parts["there"] == 1 and episode.reward.parts["bad_calls"] == 1


def test_instances_are_of_one_attempt() -> None:
    env = make(rows=ROW, options={"start": 1})
    for _ in range(2):
        assert play(env, [call("add", amount=2), "done"])[0].reward.parts["there"] == 1


def test_rows_of_the_class_and_of_a_table(tmp_path: Path) -> None:
    own = make(heldout=0.3)
    goals = {side: {own.task(i, side).data["row"]["goal"] for i in range(20)} for side in ("train", "heldout")}
    assert goals["train"] | goals["heldout"] == set(range(1, 21)) and not goals["train"] & goals["heldout"]
    (tmp_path / "rows.jsonl").write_text('{"goal": 4}\n')
    read = make("Silent", data=str(tmp_path / "rows.jsonl"))
    assert read.task(7, "train").data == {"row": {"goal": 4}}


def test_prompts_of_rows() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Begin."}]
    _, policy = play(make(rows=[{"goal": 3, "prompt": messages}]), ["done"])
    assert "Be brief." in policy.prompts[0] and "Begin.\nCount to 3." in policy.prompts[0]
    episode, policy = play(make("Silent", rows=[{"prompt": "Hello"}]), ["done"])
    assert "Hello" in policy.prompts[0] and episode.reward.value == 1


def test_a_reward_by_import_path() -> None:
    episode, _ = play(make(rows=ROW, reward=f"{CLASSES}:grade"), [call("add", amount=3), "done"])
    assert episode.reward.value == 2


@pytest.mark.parametrize("name", ["Failing", "Silent"])
def test_a_reward_that_is_none_is_never_a_zero(name: str) -> None:
    episode, _ = play(make(name, rows=[{"prompt": "x", "worth": "much"}]), ["done"])
    assert isinstance(episode.reward, RewardError) and not episode.valid
    assert ("KeyError" if name == "Failing" else "finite number, not 'much'") in episode.reward.why


def test_an_aborted_reply_has_no_reward() -> None:
    episode, _ = play(make(rows=ROW), [Said("do", "aborted")])
    assert episode.status == "failed" and isinstance(episode.reward, RewardError)


def test_a_reset_that_fails_fails_the_episode_and_closes() -> None:
    env, alive = make(rows=[{"gaol": 3}]), Counter.alive
    with pytest.raises(TypeError, match=r"goal.*the row has gaol"):
        play(env, ["done"])
    assert Counter.alive == alive
    with pytest.raises(ValueError, match="nothing to ask"):
        play(make("Silent", rows=ROW), ["done"])


@pytest.mark.parametrize(
    ("name", "args", "error", "says"),
    [
        ("NoTools", {"rows": ROW}, TypeError, "has no tools"),
        ("NoReward", {"rows": ROW}, ValueError, "has no reward"),
        ("Silent", {}, ValueError, "rows from one place"),
        ("Silent", {"rows": []}, ValueError, "has no rows"),
        ("Silent", {"rows": [{"x": object()}]}, ValueError, "row 0 is no plain JSON"),
        ("Counter", {"options": {"stop": 1}}, TypeError, "stop"),
        ("Nothing", {}, ValueError, "has no 'Nothing'"),
    ],
)
def test_mistakes_are_answered_with_the_way_out(name, args, error, says) -> None:
    with pytest.raises(error, match=says):
        make(name, **args)
