"""Classic environments (verifiers up to 0.3.1), collected where that version is installed."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest
from playing import check, make, play, text

from spmd_rl.envs.adapters.verifiers import environment_class
from spmd_rl.rollouts.types import Reward, RewardError
from tests.envs.fakes import Said

RENDERERS = ["template", "qwen3"]


def classic(**args):
    return make("offline_classic", **args)


@pytest.mark.parametrize("renderer", RENDERERS)
def test_one_turn(renderer):
    env = classic(renderer=renderer)
    task = env.task(0, "train")
    episode, policy = play(env, [task.data["row"]["answer"]])
    assert isinstance(episode.reward, Reward) and episode.reward.value == 1.0 and episode.status == "ok"
    assert episode.reward.parts["exact"] == 1.0
    assert np.array_equal(env.prompt(task), policy.heard[0][0]) and "Reverse." in text(policy.heard[0][0])
    check(episode.samples, policy)


def test_tasks():
    env = classic()
    words = {split: {env.task(i, split).data["row"]["question"] for i in range(20)} for split in ("train", "heldout")}
    assert not words["train"] & words["heldout"] and len(words["train"] | words["heldout"]) == 8
    assert json.loads(json.dumps(env.task(0, "train").data)) == env.task(0, "train").data


@pytest.mark.parametrize("renderer", RENDERERS)
def test_several_turns_are_one_sample(renderer):
    episode, policy = play(classic(options={"kind": "game"}, renderer=renderer), ["a", Said("bc", "length"), "c"])
    assert len(episode.samples) == 1 and len(policy.heard) == 3 and episode.status == "truncated"
    check(episode.samples, policy)


def test_another_conversation_is_another_sample():
    episode, policy = play(classic(options={"kind": "forgetful"}), ["a", "b", "c"])
    assert len(episode.samples) == 3
    check(episode.samples, policy)


@pytest.mark.parametrize("renderer", RENDERERS)
def test_tools(renderer):
    call = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>'
    episode, policy = play(classic(options={"kind": "tool"}, renderer=renderer), [call + "<tool_call>{", "42"])
    assert "42" in text(policy.heard[1][0]) and episode.reward.parts["add_calls"] == 1
    check(episode.samples, policy)


def test_what_is_not_a_reward():
    episode, _ = play(classic(options={"kind": "breaks"}), ["x"])
    assert isinstance(episode.reward, RewardError) and "the reward's own mistake" in episode.reward.why
    episode, _ = play(classic(), [Said("x", "aborted")])
    assert isinstance(episode.reward, RewardError) and episode.status == "failed"
    episode, _ = play(classic(), ["x"], seq_len=5)
    assert isinstance(episode.reward, RewardError)


def test_no_room_for_another_reply():
    env = classic(options={"kind": "game"})
    room = len(env.prompt(env.task(0, "train"))) + 8
    episode, policy = play(env, ["abc", "never"], seq_len=room)
    assert episode.status == "truncated" and isinstance(episode.reward, Reward) and len(policy.heard) == 1


def test_refused():
    with pytest.raises(ValueError, match="whole groups"):
        classic(options={"kind": "group"})
    with pytest.raises(ValueError, match="unexpected keyword"):
        classic(options={"kinds": "x"})
    with pytest.raises(ValueError, match="did you mean 'offline_classic'"):
        make("offline_clasic")
    with pytest.raises(ImportError, match=r"taskset for verifiers 0\.4"):
        environment_class("playing")


def test_signals_stay_this_programs():
    def handler(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        classic()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
