"""Each algorithm's advantages and streams, against values worked out by hand or taken from elsewhere."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from spmd_rl.algorithms import ALGORITHMS, lengths, policy_loss
from spmd_rl.algorithms.types import Memory, PolicyLoss
from spmd_rl.config.tree import AlgorithmConfig, ClipConfig, CorrectionConfig, KLConfig
from spmd_rl.rollouts.types import Episode, Reward
from tests.algorithms.batches import (
    MAX_TOKENS,
    TASK,
    advantages,
    episode,
    group,
    rewarded,
    run,
    sample,
    samples,
    seats,
    stream,
    weights,
)

STD = math.sqrt(2 / 9)  # of 1, 0, 0
BATCH_STD = math.sqrt(15 / 64)  # of 1, 0, 0, 1, 0, 0, 0, 1: mean 3/8

EXPECTED = {
    "grpo": [2 / 3, -1 / 3, -1 / 3],
    "dr_grpo": [2 / 3, -1 / 3, -1 / 3],
    "dapo": [(2 / 3) / STD, (-1 / 3) / STD, (-1 / 3) / STD],
    "rloo": [1.0, -0.5, -0.5],
    "gspo": [(2 / 3) / STD, (-1 / 3) / STD, (-1 / 3) / STD],
    "cispo": [(2 / 3) / STD, (-1 / 3) / STD, (-1 / 3) / STD],
    "ppo": [2 / 3, -1 / 3, -1 / 3],
    "max_rl": [2.0, -1.0, -1.0],
    "hierarchical": [2 / 3, -1 / 3, -1 / 3],
    "echo": [2 / 3, -1 / 3, -1 / 3],
    "opd": [0.0, 0.0, 0.0],
    "opsd": [0.0, 0.0, 0.0],
    "sft": [0.0, 0.0, 0.0],
    "ppo_critic": [0.0, 0.0, 0.0],  # made on the trainer
}


@pytest.mark.parametrize("name", EXPECTED)
def test_one_group_of_one_success_in_three(name: str) -> None:
    assert advantages(rewarded(1.0, 0.0, 0.0), type=name, overlong_buffer=0)[0] == pytest.approx(
        EXPECTED[name], abs=1e-4
    )


def test_every_algorithm_is_covered() -> None:
    assert set(EXPECTED) | {"reinforce_pp", "per_agent"} == set(ALGORITHMS)


def test_reinforce_pp_normalises_over_the_batch() -> None:
    made = advantages(rewarded(1.0, 0.0, 0.0), rewarded(1.0, 0.0, 0.0, 0.0, 1.0, id=1), type="reinforce_pp")
    up, down = (1 - 3 / 8) / BATCH_STD, (-3 / 8) / BATCH_STD
    assert made[0] == pytest.approx([up, down, down], abs=1e-4)
    assert made[1] == pytest.approx([up, down, down, down, up], abs=1e-4)


@pytest.mark.parametrize(
    ("rewards", "grpo", "max_rl"),
    [
        ([1.0, 0.0, 1.0, 0.0], [0.5, -0.5, 0.5, -0.5], [1.0, -1.0, 1.0, -1.0]),
        ([1.0, 0.5, 0.8], [0.23333, -0.26667, 0.03333], [0.30435, -0.34783, 0.04348]),
        ([0.0, 0.0, 0.0, 1.0], [-0.25, -0.25, -0.25, 0.75], [-1.0, -1.0, -1.0, 3.0]),
        ([0.0, 0.0], [0.0, 0.0], [0.0, 0.0]),
        ([-1.0, -3.0], [1.0, -1.0], [0.0, 0.0]),
    ],
)
def test_agreement_with_prime_rl(rewards: list[float], grpo: list[float], max_rl: list[float]) -> None:
    """Its `GRPOAlgorithm.score_group` (reward − mean) and `MaxRLAlgorithm.score_group` on the same rewards."""
    assert advantages(rewarded(*rewards), type="grpo")[0] == pytest.approx(grpo, abs=1e-5)
    assert advantages(rewarded(*rewards), type="max_rl")[0] == pytest.approx(max_rl, abs=1e-5)


def test_agreement_with_prime_rl_on_length_penalties() -> None:
    """Its linear penalty with `num_output_tokens_weight = 0.5`: reward − mean · 0.5 · tokens / longest, then centred.

    Rewards 1, 1, 0 with 2, 4, 1 output tokens: penalties 1/6, 1/3, 1/12; shaped 5/6, 2/3, −1/12; mean 17/36.
    """
    made = group(episode(1.0, [0, 1, 1]), episode(1.0, [0, 1, 1, 1, 1]), episode(0.0, [0, 1]))
    assert advantages(made, length_penalty=0.5)[0] == pytest.approx([13 / 36, 7 / 36, -20 / 36])


def test_agreement_with_prime_rl_on_moving_baselines() -> None:
    """Its `RAEAlgorithm` with decay 0.9: each trace against the baseline before its reward moves it, from 0."""
    memory: Memory = {}
    made = advantages(rewarded(1.0, 0.0, 1.0), type="per_agent", baseline_decay=0.9, memory=memory)
    assert made[0] == pytest.approx([1.0, -0.1, 1.0 - 0.09])
    assert memory == {"baseline/reverse/": pytest.approx(0.9 * 0.09 + 0.1)}
    (again,) = advantages(rewarded(0.0), type="per_agent", baseline_decay=0.9, memory=memory)
    assert again == pytest.approx([-0.181])


def test_per_agent_keeps_seats_apart_and_uses_their_own_rewards() -> None:
    memory: Memory = {}
    game = group(seats(("first", 1.0), ("second", -1.0)), seats(("first", 1.0), ("second", -1.0)))
    made = advantages(game, type="per_agent", baseline_decay=0.5, memory=memory)
    assert made == [[1.0, -1.0, 0.5, -0.5]]
    assert memory == {"baseline/reverse/first": 0.75, "baseline/reverse/second": -0.75}


def test_hierarchical_compares_solvers_within_their_episode_and_proposers_within_the_group() -> None:
    """As prime-rl's `HierarchicalGRPOAlgorithm` with `episode_agents = ["solver"]` does on the same traces."""
    easy = seats(("proposer", 0.2), ("solver", 1.0), ("solver", 0.0))
    hard = seats(("proposer", 0.8), ("solver", 0.0), ("solver", 0.0), ("solver", 0.6))
    made = advantages(group(easy, hard), type="hierarchical")
    assert made[0] == pytest.approx([-0.3, 0.5, -0.5, 0.3, -0.2, -0.2, 0.4])


def test_echo_learns_what_the_environment_said_after_the_first_sampled_token() -> None:
    made = group(episode(1.0, [0, 0, 1, 1, 0, 0, 1]), episode(0.0, [0, 1, 0]))  # 3 + 1 sampled tokens
    ce = weights(made, name="ce_weight", type="echo", observation_weight=0.2)
    assert ce[0] == pytest.approx([0, 0, 0, 0, 0.2 / 4, 0.2 / 4, 0])
    assert ce[1] == pytest.approx([0, 0, 0.2 / 4])
    assert weights(made, type="echo") == weights(made, type="grpo")


@pytest.mark.parametrize("name", ["opd", "opsd"])
def test_distillation_weighs_every_sampled_token_alike_and_reads_no_reward(name: str) -> None:
    made = group(episode(1.0, [0, 1, 1]), episode(0.0, [0, 1, 0]))
    assert weights(made, type=name) == [[0, 0, 0], [0, 0, 0]]
    assert weights(made, name="kl_weight", type=name) == [
        [0, pytest.approx(1 / 3), pytest.approx(1 / 3)],
        [0, pytest.approx(1 / 3), 0],
    ]


def test_hints_travel_with_self_distillation_alone() -> None:
    hinted = Episode(TASK, (sample([0, 1], hint=np.arange(5, dtype=np.int32)),), Reward(1.0))
    assert samples(run(group(hinted, hinted), type="opsd"))[0].hint is not None
    assert samples(run(group(hinted, hinted), type="opd"))[0].hint is None


def test_answers_are_imitated_whatever_their_reward() -> None:
    made = group(episode(1.0, [0, 1, 1]), episode(0.0, [0, 1]))
    assert weights(made, name="ce_weight", type="sft") == [
        [0, pytest.approx(1 / 3), pytest.approx(1 / 3)],
        [0, pytest.approx(1 / 3)],
    ]
    assert not any(map(any, weights(made, type="sft")))


def test_a_critic_gets_shares_and_rewards() -> None:
    made = samples(run(group(episode(0.5, [0, 1, 1]), episode(-1.0, [0, 1])), type="ppo_critic"))
    assert [stream(s, "pg_weight") for s in made] == [[0, pytest.approx(1 / 3), pytest.approx(1 / 3)], [0, 1 / 3]]
    assert [s.reward for s in made] == [0.5, -1.0]


def test_other_streams_are_shares_times_their_coefficient() -> None:
    made = group(episode(1.0, [0, 1, 1]), episode(1.0, [0, 1]))
    assert weights(made, name="entropy_weight", entropy_bonus=0.3)[1] == [0, pytest.approx(0.1)]
    assert weights(made, name="kl_weight", kl=KLConfig(coef=0.6))[1] == [0, pytest.approx(0.2)]
    assert not any(map(any, weights(made, name="kl_weight")))


@pytest.mark.parametrize(("tokens", "off"), [(1, 0.0), (6, 0.0), (7, 0.5 / 4), (8, 0.5 / 2), (10, 0.5), (12, 0.5)])
def test_the_soft_overlong_penalty(tokens: int, off: float) -> None:
    """DAPO, eq. 13: from 0 at limit − buffer (10 − 4) to the whole penalty at the limit."""
    assert lengths.overlong(np.array([tokens]), MAX_TOKENS, 4, 0.5)[0] == pytest.approx(off)


def test_dapo_penalises_the_last_quarter_by_default() -> None:
    long, short = episode(1.0, [0] + [1] * MAX_TOKENS), episode(1.0, [0, 1])
    assert advantages(group(long, short), type="dapo")[0] == pytest.approx([-1.0, 1.0], abs=1e-4)
    assert advantages(group(long, short), type="grpo")[0] == [0.0, 0.0]


OWN = """
import numpy as np
def best(rewards, group):
    assert len(rewards) == len(group.episodes)
    return (rewards == rewards.max()).astype(float)
def short(rewards, group):
    return rewards[:-1]
def nan(rewards, group):
    return rewards * np.nan
"""


@pytest.fixture
def own(tmp_path: Path):
    (tmp_path / "mine.py").write_text(OWN)
    return lambda name: str(tmp_path / "mine.py") + ":" + name


def test_an_own_advantage_takes_the_place_of_the_algorithms(own) -> None:
    made = group(episode(1.0), episode(None), episode(3.0))
    assert advantages(made, advantage=own("best")) == [[0.0, 1.0]]


@pytest.mark.parametrize("name", ["short", "nan"])
def test_an_own_advantage_must_return_a_finite_number_per_reward(own, name) -> None:
    with pytest.raises(ValueError, match=r"orchestrator.algorithm.advantage = .*for 2 rewards it returned .*finite"):
        advantages(rewarded(0.0, 1.0), advantage=own(name))


def test_an_own_advantage_that_is_not_there(own) -> None:
    with pytest.raises(ValueError, match=r"orchestrator.algorithm.advantage = .* has no 'wurst'; it has best"):
        advantages(rewarded(0.0, 1.0), advantage=own("wurst"))


def test_the_config_lays_its_numbers_over_the_algorithms() -> None:
    base = PolicyLoss(surrogate="clip", clip_low=0.2, clip_high=0.2, ratio_cap=5.0)
    changed = AlgorithmConfig(clip=ClipConfig(high=0.3), correction=CorrectionConfig(ipo=0.0, icepop_high=2.0))
    made = policy_loss(changed, base)
    assert (made.clip_low, made.clip_high, made.ipo, made.icepop_high, made.ratio_cap) == (0.2, 0.3, 0.0, 2.0, 5.0)
    assert policy_loss(AlgorithmConfig(), base) == base
    by_sequence = policy_loss(AlgorithmConfig(correction=CorrectionConfig(sequence_cap=3.0)), base)
    assert (by_sequence.sequence_cap, by_sequence.ratio_cap) == (3.0, 0.0)
