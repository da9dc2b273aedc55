"""Gymnasium's own games."""

from __future__ import annotations

import asyncio

import pytest

from spmd_rl.envs.adapters.gym import Gym
from tests.envs.fakes import ScriptedPolicy, byte_tokenizer


def test_frozen_lake_as_text() -> None:
    env = Gym(byte_tokenizer(), 0, "gymnasium:FrozenLake-v1", options={"is_slippery": False})
    policy = ScriptedPolicy(byte_tokenizer(), ["4", *"112212"])
    episode = asyncio.run(env.rollout(env.task(0, "train"), policy))
    assert episode.reward.value == 1 and episode.reward.parts == {"turns": 7.0, "invalid": 1.0, "done": 1.0}
    assert "[S]FFF\nFHFH" in policy.prompts[0] and "whole number from 0 to 3" in policy.prompts[1]


def test_blackjack_has_pairs_for_observations() -> None:
    env = Gym(byte_tokenizer(), 0, "gymnasium:Blackjack-v1")
    policy = ScriptedPolicy(byte_tokenizer(), lambda _: "0")
    first, second = (asyncio.run(env.rollout(env.task(1, "train"), policy)) for _ in range(2))
    assert first.reward == second.reward and first.reward.value in (-1, 0, 1, 1.5)


def test_unknown_names_get_near_ones() -> None:
    with pytest.raises(ValueError, match="did you mean FrozenLake-v1"):
        Gym(byte_tokenizer(), 0, "gymnasium:FrozenLak-v1")
