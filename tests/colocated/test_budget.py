"""Too little memory for both roles is said before anything is allocated, with what takes how much."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.colocated.budget import TooLittleMemory, budget, check_room, shortage
from spmd_rl.config.tree import AlgorithmConfig, Config, KLConfig, OrchestratorConfig

BILLION = 10**9


def with_algorithm(**keys) -> Config:
    return Config(orchestrator=OrchestratorConfig(algorithm=AlgorithmConfig(**keys)))


def test_what_takes_how_much():
    """AdamW in float32: 4 bytes of weights, 8 of moments, 4 of gradients per parameter, shared by the ranks."""
    need = budget(Config(), BILLION, ranks=4, engine=30 * BILLION, releases=True)
    assert (need.kept, need.gradients) == (3 * BILLION, BILLION)
    assert (need.infer, need.train) == (33 * BILLION, 4 * BILLION)
    assert budget(Config(), BILLION, 4, 30 * BILLION, releases=False).train == 34 * BILLION
    assert budget(with_algorithm(type="ppo_critic"), BILLION, 4, 0, True).train == 8 * BILLION
    assert budget(with_algorithm(kl=KLConfig(coef=0.1)), BILLION, 4, 0, True).train == 5 * BILLION


@given(st.integers(1, 10**12), st.integers(1, 64), st.integers(0, 10**11), st.integers(1, 10**12), st.booleans())
def test_a_shortage_is_one_exactly_where_a_phase_does_not_fit(parameters, ranks, engine, total, releases):
    need = budget(Config(), parameters, ranks, engine, releases)
    problem = shortage(need, total, "lower it")
    assert bool(problem) == (max(need.infer, need.train) > total)
    assert not problem or ("lower it" in problem and "placement" in problem)


def test_a_model_too_large_for_this_host_is_refused():
    check_room(Config(), 10**6, 1, torch.device("cpu"), 1)
    with pytest.raises(TooLittleMemory, match=r"to infer takes at least .* GB .* VLLM_CPU_KVCACHE_SPACE"):
        check_room(Config(), 10**13, 8, torch.device("cpu"), 1)
