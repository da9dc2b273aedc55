"""Sampling noise, without an engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.inference.noise import draw, uniforms

SEEDS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20)
POSITIONS = st.integers(0, 2**31 - 1)


def one(seed: int, position: int) -> float:
    return float(uniforms(np.array([seed], dtype=np.uint64), np.array([position]))[0])


@settings(max_examples=100, deadline=None)
@given(SEEDS, POSITIONS)
def test_a_uniform_depends_on_its_own_seed_and_position_alone(seeds, position):
    batch = uniforms(np.array(seeds, dtype=np.uint64), np.full(len(seeds), position))
    assert batch.tolist() == [one(seed, position) for seed in seeds]
    assert ((batch >= 0) & (batch < 1)).all()
    assert (batch * 2.0**53 == np.floor(batch * 2.0**53)).all()


def test_the_values_stay_as_they_are():
    """Any change here changes the rollouts of every seeded run."""
    values = [one(seed, position) for seed, position in [(0, 0), (1, 0), (0, 1), (2**63 - 1, 2**31 - 1)]]
    assert values == [0.28176129772258496, 0.8628561488610587, 0.6131064842878083, 0.4952732780990359]


def test_53_bits_are_used():
    """Every one of the 53 bits is as often 1 as 0."""
    values = uniforms(np.arange(4096, dtype=np.uint64), np.zeros(4096, dtype=np.int64))
    bits = (values * 2.0**53).astype(np.uint64)[:, None] >> np.arange(53, dtype=np.uint64) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 4 * 0.5 / 64  # four standard deviations


@pytest.mark.parametrize("axis", ["seeds", "positions", "both"])
def test_uniforms_are_uniform_and_independent(axis):
    """Chi-square over pairs of neighbours: 16 × 16 cells, the one sample is fixed, the bound is its 99.9 % quantile."""
    n = 2**16
    counter, zeros = np.arange(n), np.zeros(n, dtype=np.int64)
    seeds, positions = {"seeds": (counter, zeros), "positions": (zeros, counter), "both": (counter, counter)}[axis]
    values = uniforms(seeds.astype(np.uint64), positions)
    cells = (values[:-1] * 16).astype(int) * 16 + (values[1:] * 16).astype(int)
    counts = np.bincount(cells, minlength=256)
    chi_square = ((counts - (n - 1) / 256) ** 2 / ((n - 1) / 256)).sum()
    assert chi_square < 330.5  # 255 degrees of freedom


def test_draws_follow_the_distribution():
    probs_V = torch.tensor([0.5, 0.0, 0.25, 0.2, 0.05])
    n = 20_000
    u = torch.from_numpy(uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, dtype=np.int64)))
    counts = torch.bincount(draw(probs_V.repeat(n, 1), u), minlength=5).double()
    assert counts[1] == 0
    kept = probs_V > 0
    expected = n * probs_V[kept].double()
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom, 99.9 %


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-38, 1e-20, 1e-3, 0.3, 1.0]), min_size=1, max_size=40).filter(any),
    st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-53]) | st.floats(0, 1, exclude_max=True),
)
def test_a_token_of_probability_zero_is_never_drawn(weights, u):
    probs_BV = torch.tensor([weights])
    token = int(draw(probs_BV, torch.tensor([u], dtype=torch.float64)))
    assert 0 <= token < len(weights)
    assert weights[token] > 0


def test_the_ends_of_the_interval_draw_the_first_and_the_last_possible_token():
    probs_BV = torch.tensor([[0.0, 0.3, 0.7, 0.0]]).repeat(2, 1)
    assert draw(probs_BV, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)).tolist() == [1, 2]
