"""Pieces that do not fit together are errors that name keys and the way out; every algorithm fits by itself."""

from __future__ import annotations

import pytest

from spmd_rl.algorithms import ALGORITHMS
from spmd_rl.algorithms.check import check_algorithm
from spmd_rl.config import ConfigError, load

A = "--orchestrator.algorithm."
TEACHER = f"{A}reference x --deployment.teacher-ranks 1"
NEEDS = {"opd": f"{A}reference x", "sft": TEACHER}


def check(flags: str) -> None:
    check_algorithm(load(["--model.name", "x", *flags.split()]))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_fits_by_itself(name):
    check(f"{A}type {name} {NEEDS.get(name, '')}")


GOOD = [
    f"{A}type ppo {A}proximal {A}correction.ratio-cap 2",
    f"{A}correction.sequence-cap 2",
    f"{A}correction.icepop-low 0.5 {A}correction.icepop-high 5 {A}correction.ipo 0",
    f"{A}kl.coef 0.01 {A}kl.place reward {A}kl.estimator k1",
    f"{A}kl.coef 0.01 {A}reference x",
    f"{A}type reinforce_pp --orchestrator.group-size 1",
    f"{A}type ppo {A}minibatches 8",
    "--orchestrator.batch-unit tokens --orchestrator.batch-size 9999",
]


@pytest.mark.parametrize("flags", GOOD)
def test_good(flags):
    check(flags)


BAD = {
    "--orchestrator.group-size 1": ["group_size = 1 with", "type = grpo", "2 or more", "reinforce_pp"],
    f"{A}type rloo --orchestrator.group-size 1": ["type = rloo"],
    f"{A}type per_agent {A}zero-variance refill": ["zero_variance = refill with type = per_agent", "auto"],
    f"{A}minibatches 9": ["minibatches = 9 with 8 groups per batch"],
    f"{A}clip.high 0.3": ["clip.high with type = grpo", "ppo"],
    f"{A}proximal": ["proximal with type = grpo"],
    f"{A}type dapo {A}correction.ratio-cap 2": ["ratio_cap or sequence_cap with type = dapo", "proximal = true"],
    f"{A}correction.ratio-cap 2 {A}correction.sequence-cap 2": ["both truncate the same ratio"],
    f"{A}type sft {TEACHER} {A}correction.ipo 0.1": ["correction.ipo with type = sft"],
    f"{A}correction.ipo -0.5": ["correction.ipo = -0.5", "0 (off) or more, or -1"],
    f"{A}correction.icepop-low 1.5": ["icepop_low = 1.5", "must hold the ratio 1"],
    f"{A}correction.geometric-high 0.5": ["geometric_high = 0.5", "must hold the ratio 1"],
    f"{A}baseline-decay 1": ["baseline_decay = 1.0"],
    f"{A}critic.gamma 1.5": ["critic.gamma = 1.5"],
    f"{A}type opd": ["type = opd needs a teacher", "reference"],
    f"{A}type sft {A}reference x": ["teacher_ranks = 0 with", "needs engines for its teacher"],
    "--deployment.teacher-ranks 1": ["teacher_ranks = 1 with", "has no teacher that samples"],
    f"{A}type sft --deployment.teacher-ranks 1": ["type = sft needs a teacher"],
    f"{A}reference x": ["reference = x is not used", "kl.coef"],
    f"{A}type opd {A}reference x {A}kl.coef 0.1": ["kl.coef = 0.1 with type = opd"],
    f"{A}type ppo_critic {A}kl.coef 0.1 {A}kl.place reward": ["critic does not see"],
    f"{A}kl.coef 0.1 {A}kl.estimator k1": ["k1 with place = loss"],
    f"{A}type opd {A}reference x {A}advantage json:dumps": ["advantage with type = opd"],
    f"{A}type sft {TEACHER} {A}loss json:dumps": ["loss with type = sft"],
    f"{A}loss json:dumps {A}correction.ipo 0.1": ["loss replaces the surrogate", "correction.ipo"],
    f"{A}overlong-buffer 999": ["overlong_buffer = 999", "max_tokens = 256"],
    f"{A}type opd {A}reference x {A}length-penalty 0.1": ["length_penalty or overlong_buffer with type = opd"],
    f"{A}advantage nowhere.py:f": ["orchestrator.algorithm.advantage", "nowhere.py does not exist"],
    f"{A}loss nowhere.py:f": ["orchestrator.algorithm.loss", "nowhere.py does not exist"],
    f"{A}advantage nonsense": ["'nonsense'", "file.py:name"],
}


@pytest.mark.parametrize("flags", BAD)
def test_bad(flags):
    with pytest.raises(ConfigError) as error:
        check(flags)
    for part in BAD[flags]:
        assert part in str(error.value), str(error.value)


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as error:
        check(f"--orchestrator.group-size 1 {A}proximal {A}overlong-buffer 999")
    assert len(error.value.problems) == 3
