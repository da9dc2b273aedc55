"""Means, pass rates and their intervals."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.orchestrator.scores import TaskScore, mean_and_half, pass_at, scores


@given(attempts=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_attempts_with_a_pass(attempts: list[bool], data) -> None:
    k = data.draw(st.integers(1, len(attempts)))
    choices = list(combinations(attempts, k))
    assert pass_at(k, len(attempts), sum(attempts)) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_needs_k_attempts() -> None:
    with pytest.raises(ValueError, match="pass@3 can't be told from 2 attempts"):
        pass_at(3, 2, 1)


def test_the_interval_covers_the_mean_in_19_of_20_cases() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(2000):
        mean, half = mean_and_half(rng.random(40))
        inside += abs(mean - 0.5) <= half
    assert 0.92 < inside / 2000 < 0.97


def test_scores_of_tasks() -> None:
    found = scores(
        [TaskScore("a", 0, [1.0, 0.0, 1.0, 0.5], greedy=1.0), TaskScore("a", 1, [0.0, 0.0, None, 0.0], greedy=0.0)], 1.0
    )
    assert found["reward"] == pytest.approx((0.625 + 0) / 2)
    assert found["greedy"] == 0.5
    assert found["pass@1"] == pytest.approx((0.5 + 0) / 2)
    assert found["pass@2"] == pytest.approx((1 - 1 / 6 + 0) / 2)
    assert found["pass@4"] == 1.0, "the task with a failed attempt can't say"
    assert found["pass@4_ci"] == 0.0


def test_what_nothing_is_known_of_is_absent() -> None:
    assert scores([TaskScore("a", 0, [None, None])], 1.0) == {}
    assert set(scores([TaskScore("a", 0, [], greedy=2.0)], 1.0)) == {"greedy", "greedy_ci"}
