"""What the trainer adds to an algorithm, on a real model: references, hints, critics, minibatches; and that no layout
changes a loss or a gradient."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.models.packed import Documents
from spmd_rl.models.tiny import make_tiny
from spmd_rl.rollouts.packing import pack
from spmd_rl.trainer.critic import gae
from spmd_rl.trainer.learner import Learner
from spmd_rl.trainer.references import hinted_logprobs
from tests.trainer.algorithm_cases import CASES, CPU, make_learner, make_samples
from tests.trainer.rows import VOCAB


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ff": 48, "init_std": 0.2}
    return [str(make_tiny(tmp_path_factory.mktemp("m"), seed=s, vocab_size=VOCAB, **sizes)) for s in range(2)]


def gradients(learner) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in learner.model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_packing_and_micro_batches_change_neither_loss_nor_gradient(folders, name):
    samples = make_samples(name)
    one_row, short_rows = pack(samples, 1, 64).rows[0], pack(samples[::-1], 1, 20).rows[0]
    assert len(one_row) == 1 and len(short_rows) >= 3
    results = []
    for rows in (one_row, short_rows):
        learner = make_learner(folders, name)
        results.append((learner.step([rows], lr=0.0), gradients(learner)))
    (whole, expected), (parts, found) = results
    for key in set(whole) - {k for k in whole if k.startswith("time/")}:
        assert parts[key] == pytest.approx(whole[key], rel=2e-4, abs=1e-7), key
    for parameter in expected:
        assert (found[parameter] - expected[parameter]).norm() <= 2e-5 * expected[parameter].norm(), parameter
    assert whole["grad_norm"] > 0


def test_minibatches_are_steps_of_their_own(folders):
    rows = [pack(make_samples("grpo", 5)[i : i + 1], 1, 64).rows[0] for i in (3, 4)]
    both, apart = make_learner(folders, "grpo"), make_learner(folders, "grpo")
    metrics = both.step(rows, lr=1e-2)
    parts = [apart.step([row], lr=1e-2) for row in rows]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(both.full_tensors(), apart.full_tensors(), strict=True))
    assert metrics["tokens/trained"] == sum(part["tokens/trained"] for part in parts)
    assert metrics["loss"] == pytest.approx(sum(part["loss"] for part in parts) / 2)


def test_the_reference_is_the_policy_that_rl_starts_from_unless_a_folder_is_named(folders):
    learner = make_learner(folders, "kl in the loss")
    config = learner._config
    algorithm = replace(config.orchestrator.algorithm, reference="")
    own = Learner(replace(config, orchestrator=replace(config.orchestrator, algorithm=algorithm)), None, CPU, None)
    rows = pack(make_samples("kl in the loss"), 1, 64).rows[0]
    assert own.step([rows], lr=1e-2)["reference/k3_mean"] < 1e-12  # the same weights
    assert own.step([rows], lr=0.0)["reference/k3_mean"] > 1e-6
    own.start_rl()
    assert own.step([rows], lr=0.0)["reference/k3_mean"] < 1e-12
    learner.start_rl()
    assert learner.step([rows], lr=0.0)["reference/k3_mean"] > 1e-3


def test_a_hinted_policy_is_scored_at_the_same_tokens(folders):
    learner = make_learner(folders, "opsd")
    samples = make_samples("opsd")
    (row,) = pack(samples, 1, 64).rows[0]
    hinted_T = hinted_logprobs(learner.model, row, CPU)
    for start, end in zip(row.cu_seqlens[:-1].tolist(), row.cu_seqlens[1:].tolist(), strict=True):
        sample = next(s for s in samples if np.array_equal(s.tokens, row.tokens[start:end]))
        first = int(sample.mask.argmax())
        tokens = np.concatenate([sample.hint, sample.tokens[first:]])
        temperatures = torch.full((len(tokens),), 1.0)
        answer = sample.tokens[first:]
        temperatures[-len(answer) - 1 : -1] = torch.from_numpy(sample.temperatures[first:])
        targets = torch.from_numpy(np.append(tokens[1:], 0)).long()
        alone_M, _ = learner.model(
            torch.from_numpy(tokens).long(), Documents.build(np.array([0, len(tokens)])), targets, temperatures
        )
        expected = alone_M[-len(answer) - 1 : -1].detach()
        torch.testing.assert_close(hinted_T[start + first - 1 : end - 1], expected, rtol=1e-4, atol=1e-5)


def test_a_critic_learns_what_rewards_to_expect(folders):
    learner = make_learner(folders, "ppo_critic")
    rows = pack(make_samples("ppo_critic"), 1, 64).rows[0]
    metrics = [learner.step([rows], lr=0.0) for _ in range(30)]
    assert metrics[-1]["critic/loss"] < 0.3 * metrics[0]["critic/loss"]
    assert metrics[-1]["critic/explained_variance"] > max(0.5, metrics[0]["critic/explained_variance"])


def test_only_the_critic_learns_while_it_warms_up(folders):
    learner = make_learner(folders, "ppo_critic")
    before = {name: tensor.clone() for name, tensor in learner.full_tensors()}
    rows = pack(make_samples("ppo_critic"), 1, 64).rows[0]
    learner.step([rows], lr=1e-2, train_policy=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.full_tensors())
    learner.step([rows], lr=1e-2)
    assert not all(torch.equal(tensor, before[name]) for name, tensor in learner.full_tensors())


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.5, 0.0]),
    seed=st.integers(0, 1000),
)
def test_advantages_against_their_definition(lengths, gamma, lam, seed):
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    values, rewards = rng.normal(size=total).astype(np.float32), rng.normal(size=total).astype(np.float32)
    mask, bounds = (rng.random(total) < 0.6).astype(np.uint8), np.cumsum([0, *lengths])
    found = gae(values, rewards, mask, bounds, gamma, lam)
    for start, end in pairwise(bounds.tolist()):
        places = [t for t in range(start, end) if mask[t]]
        after = [float(values[t]) for t in places] + [0.0]
        deltas = [float(rewards[t]) + gamma * after[i + 1] - after[i] for i, t in enumerate(places)]
        for i, t in enumerate(places):
            expected = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
            assert found[t] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert not found[mask == 0].any()
    if gamma == lam == 1.0 and mask[: lengths[0]].any():  # rewards to come, less what was expected
        first = int(mask.argmax())
        to_come = float((rewards * mask)[first : lengths[0]].sum())
        assert found[first] == pytest.approx(to_come - values[first], rel=1e-4, abs=1e-5)
