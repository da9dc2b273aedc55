"""The package's own datasets."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from spmd_rl.envs.adapters.reasoning_gym import ReasoningGym
from tests.envs.fakes import ScriptedPolicy, byte_tokenizer


@pytest.mark.parametrize("name", ["basic_arithmetic", "prime_factorization", "spell_backward", "letter_counting"])
def test_answers_and_junk(name: str) -> None:
    env = ReasoningGym(byte_tokenizer(), 0, name)
    task = env.task(0, "train")
    answer = env.solve(task, [], np.random.default_rng(0))
    policy = ScriptedPolicy(byte_tokenizer(), [answer, "zzz", "", "²"])
    values = [asyncio.run(env.rollout(task, policy)).reward.value for _ in range(4)]
    assert values == [1, 0, 0, 0]


def test_what_has_no_answers_has_no_teacher() -> None:
    assert ReasoningGym(byte_tokenizer(), 0, "graph_color").solve is None


def test_what_rewards_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="nonsense gets the full score"):
        ReasoningGym(byte_tokenizer(), 0, "game_of_life_halting")
