"""Surrogates, corrections and references, piece by piece, against values worked out by hand or taken from elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algorithms import ALGORITHMS
from spmd_rl.algorithms.types import PolicyLoss
from spmd_rl.config.tree import KLConfig
from tests.trainer.row_losses import column, evaluate, make_inputs, make_loss

CLIP = PolicyLoss(surrogate="clip", clip_low=0.2, clip_high=0.28)


@pytest.mark.parametrize(
    ("ratio", "weight", "loss", "slope"),
    [
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.28, 0.0),  # clipped from above
        (0.5, 1.0, -0.5, -0.5),  # a good token that became unlikely is not held back
        (0.5, -1.0, 0.8, 0.0),  # clipped from below
        (1.5, -1.0, 1.5, 1.5),
        (6.0, -1.0, 6.0, 6.0),  # unbounded without dual clip
    ],
)
def test_the_clipped_surrogate(ratio, weight, loss, slope):
    value, gradient, metrics = evaluate([math.log(ratio) - 3.0], [-3.0], bounds=CLIP, pg=[weight])
    assert value == pytest.approx(loss)
    assert gradient.item() == pytest.approx(slope)
    assert metrics["clipped_fraction"] == (slope == 0)


def test_dual_clip_bounds_bad_tokens_that_became_likely():
    dual = PolicyLoss(surrogate="clip", clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert evaluate([math.log(6.0) - 3], [-3.0], bounds=dual, pg=[-0.5])[:2] == (pytest.approx(1.5), column([0.0]))
    assert evaluate([math.log(2.0) - 3], [-3.0], bounds=dual, pg=[-0.5])[0] == pytest.approx(1.0)
    assert evaluate([math.log(6.0) - 3], [-3.0], bounds=dual, pg=[0.5])[0] == pytest.approx(-0.6)


def test_the_sequence_ratio_is_the_geometric_mean_over_sampled_tokens():
    """GSPO by hand: two documents, s = exp(mean log ratio), slope A/n · s for sampled tokens of the unclipped one."""
    gspo = PolicyLoss(surrogate="clip", ratio="sequence", clip_low=0.2, clip_high=0.2)
    log_ratios = [0.3, -0.1, 9.0, 0.9, 0.1]
    columns = {"mask": [1, 1, 0, 1, 1], "pg": [0.5, 0.5, 0.0, 0.5, 0.5], "lengths": [3, 2]}
    loss, gradient, metrics = evaluate([x - 4 for x in log_ratios], [-4.0] * 5, bounds=gspo, **columns)
    first = math.exp(0.1)
    assert loss == pytest.approx(-first - 1.2)  # the second document's ratio e^0.5 is clipped
    torch.testing.assert_close(gradient, column([-0.5 * first, -0.5 * first, 0, 0, 0]))
    assert metrics["clipped_fraction"] == 0.5


def test_decoupled_ppo_clips_around_the_start_of_the_batch_and_corrects_for_the_rest():
    decoupled = PolicyLoss(surrogate="clip", clip_low=0.2, clip_high=0.2, proximal=True, ratio_cap=2.0)
    behaviour, proximal, current = [-3.0, -3.0], [-2.5, -1.0], [-2.4, -1.9]
    loss, gradient, _ = evaluate(current, behaviour, bounds=decoupled, pg=[1.0, -1.0], proximal=proximal)
    first, second = math.exp(0.5) * math.exp(0.1), 2.0 * 0.8  # the second is capped, and clipped at 0.8
    assert loss == pytest.approx(-first + second)
    torch.testing.assert_close(gradient, column([-first, 0.0]))


def test_truncation_by_sequence():
    by_sequence = PolicyLoss(sequence_cap=3.0)
    logprobs = [-1.0, -1.0, -1.0, -1.0]
    behaviour = [-1.2, -1.3, -3.0, -1.5]  # products e^0.5 and e^2.5, which is capped
    _, gradient, _ = evaluate(logprobs, behaviour, bounds=by_sequence, pg=[1.0] * 4, lengths=[2, 2])
    torch.testing.assert_close(gradient, column([-math.exp(0.5)] * 2 + [-3.0] * 2))


MASKS = {
    # name: (policy, [(p, mu, weight, kept)]), each token a document of its own
    "ipo": (PolicyLoss(ipo=0.3), [(0.7, 0.5, 1, True), (0.9, 0.5, 1, False), (0.1, 0.5, 1, False)]),
    "dppo_tv": (
        PolicyLoss(dppo_tv=0.3),
        [(0.9, 0.5, 1, False), (0.1, 0.5, 1, True), (0.1, 0.5, -1, False), (0.9, 0.5, -1, True), (0.7, 0.5, 1, True)],
    ),
    # KL of (0.5, 0.5) from (0.9, 0.1) is 0.5108, from (0.6, 0.4) is 0.0204
    "dppo_kl": (
        PolicyLoss(dppo_kl=0.3),
        [(0.9, 0.5, 1, False), (0.9, 0.5, -1, True), (0.1, 0.5, -1, False), (0.6, 0.5, 1, True)],
    ),
    "fallen": (PolicyLoss(fallen=0.2), [(0.2, 0.5, 1, False), (0.2, 0.5, -1, False), (0.9, 0.5, 1, True)]),
    "icepop": (
        PolicyLoss(icepop_low=0.5, icepop_high=2.0),
        [(0.3, 0.2, 1, True), (0.5, 0.2, 1, False), (0.1, 0.3, -1, False)],
    ),
    "geometric": (
        PolicyLoss(geometric_low=0.5, geometric_high=2.0),
        [(0.3, 0.2, 1, True), (0.5, 0.2, 1, False), (0.1, 0.3, -1, False)],
    ),
    "negative_sequence": (
        PolicyLoss(negative_sequence=0.5),
        [(0.1, 0.3, -1, False), (0.1, 0.3, 1, True), (0.3, 0.1, -1, True), (0.2, 0.3, -1, True)],
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_a_mask_drops(name):
    policy, tokens = MASKS[name]
    p, mu, weight, kept = zip(*tokens, strict=True)
    logs = [[math.log(x) for x in column_] for column_ in (p, mu)]
    _, gradient, metrics = evaluate(*logs, bounds=policy, pg=list(map(float, weight)), lengths=[1] * len(tokens))
    assert (gradient != 0).tolist() == list(kept)
    assert metrics["masked_fraction"] == pytest.approx(1 - sum(kept) / len(kept))


def test_sequence_masks_take_the_mean_over_sampled_tokens_of_the_document():
    policy = PolicyLoss(geometric_high=2.0)
    # Mean log ratios 0.6 (kept, although its second token is above) and 0.8 (dropped); the given token counts nowhere.
    log_ratios, mask = [0.1, 1.1, 50.0, 0.8, 0.8], [1, 1, 0, 1, 1]
    columns = {"mask": mask, "pg": [1.0, 1.0, 0.0, 1.0, 1.0], "lengths": [3, 2]}
    _, gradient, _ = evaluate([x - 60 for x in log_ratios], [-60.0] * 5, bounds=policy, **columns)
    assert (gradient != 0).tolist() == [True, True, False, False, False]


def test_masks_add_up():
    both = PolicyLoss(ipo=0.3, icepop_low=0.5)
    logs = [[math.log(x) for x in (0.9, 0.01, 0.4)], [math.log(x) for x in (0.5, 0.1, 0.5)]]
    _, gradient, _ = evaluate(*logs, bounds=both, pg=[1.0] * 3)
    assert (gradient != 0).tolist() == [False, False, True]


def test_kl_in_the_loss():
    current, reference = [-1.0, -2.0], [-1.5, -1.0]
    for estimator, values, slopes in (
        ("k2", [0.125, 0.5], [0.5, -1.0]),
        ("k3", [math.exp(-0.5) - 0.5, math.e - 2], [1 - math.exp(-0.5), 1 - math.e]),
    ):
        loss = make_loss(kl=KLConfig(coef=0.1, estimator=estimator))
        value, gradient, metrics = evaluate(current, current, loss=loss, kl=[0.5, 0.25], reference=reference)
        assert value == pytest.approx(0.5 * values[0] + 0.25 * values[1])
        torch.testing.assert_close(gradient, column([0.5 * slopes[0], 0.25 * slopes[1]]))
        k3 = [math.exp(-0.5) - 0.5, math.e - 2]
        assert metrics["reference/k3_mean"] == pytest.approx(sum(k3) / 2)


def test_kl_in_the_reward_charges_every_token_for_itself_and_what_follows():
    loss = make_loss(policy=PolicyLoss(), kl=KLConfig(coef=0.1, estimator="k1", place="reward"))
    current, reference = [-1.0, -2.0, -1.0, -1.0], [-1.5, -1.0, -3.0, -1.0]
    weights = {"pg": [1.0] * 4, "kl": [0.1, 0.1, 0.1, 0.1], "reference": reference, "lengths": [3, 1]}
    _, gradient, _ = evaluate(current, current, loss=loss, **weights)
    costs = [0.1 * (p - q) for p, q in zip(current, reference, strict=True)]
    to_go = [sum(costs[0:3]), sum(costs[1:3]), costs[2], costs[3]]
    torch.testing.assert_close(gradient, column([-(1.0 - cost) for cost in to_go]))


def test_distillation_moves_every_token_towards_the_teacher():
    """−w · sg(min(ρ, cap)) · (log p_teacher − log p) is the gradient; agrees with prime-rl's `ref_kl` loss up to its
    squared log-ratio term: for (p, μ, teacher) = (0.5, 0.4, 0.8) its policy term has the slope −1.25 · ln 1.6."""
    loss = make_loss(policy=PolicyLoss(fallen=0.2, ratio_cap=5.0), teacher=True)
    logs = [[math.log(x) for x in row] for row in ([0.5, 0.1], [0.4, 0.4], [0.8, 0.9])]
    _, gradient, metrics = evaluate(logs[0], logs[1], loss=loss, kl=[1.0, 1.0], reference=logs[2])
    torch.testing.assert_close(gradient, column([-1.25 * math.log(1.6), 0.0]))  # the second has fallen by 0.3
    assert metrics["tokens/trained"] == 2 and metrics["masked_fraction"] == 0.5


def test_agreement_with_prime_rl_on_the_ipo_loss():
    """Its `ipo_loss_fn` with ipo_threshold 0.3, adv_tau 1, kl_tau 0 on three tokens: −Σ keep · A · ρ over 3 tokens.

    Tokens (p, μ, A): (0.5, 0.4, 1), (0.9, 0.5, 2) masked, (0.2, 0.25, −1): its loss is −(1.25 − 0.8) / 3, and the
    gradient by log p is −keep · A · ρ / 3, as ours.
    """
    logs = [[math.log(x) for x in row] for row in ([0.5, 0.9, 0.2], [0.4, 0.5, 0.25])]
    _, gradient, metrics = evaluate(*logs, pg=[1 / 3, 2 / 3, -1 / 3])
    torch.testing.assert_close(gradient, column([-1.25 / 3, 0.0, 0.8 / 3]))
    assert metrics["masked_fraction"] == pytest.approx(1 / 3)


def test_agreement_with_prime_rl_on_its_default_loss():
    """Its `default_loss_fn` with both bounds 0.2 and kl_tau 0 is our `dppo_tv = 0.2`: same tokens, same slopes."""
    p, mu, advantage = [0.5, 0.9, 0.2, 0.7, 0.1], [0.4, 0.5, 0.25, 0.4, 0.5], [1.0, 2.0, -1.0, -1.0, -1.0]
    logs = [[math.log(x) for x in row] for row in (p, mu)]
    _, gradient, _ = evaluate(*logs, bounds=PolicyLoss(dppo_tv=0.2), pg=advantage)
    torch.testing.assert_close(gradient, column([-1.25, 0.0, 0.8, 1.75, 0.0]))


def test_the_entropy_bonus_and_its_gradient():
    inputs = make_inputs(column([-1.0, -1.0]), [-1.0, -1.0], entropy=[0.2, 0.0])
    entropies = column([3.0, 100.0]).requires_grad_()
    loss, _ = make_loss(entropy=True)(replace(inputs, entropies_T=entropies))
    loss.backward()
    assert loss.item() == pytest.approx(-0.6) and entropies.grad.tolist() == [-0.2, 0.0]


ALL_POLICIES = {name: algorithm.policy for name, algorithm in ALGORITHMS.items()} | {
    n: p for n, (p, _) in MASKS.items()
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALL_POLICIES)
def test_every_loss_is_finite_on_extreme_ratios(name, dtype):
    values = [-1e-3, -80.0, -120.0, -40.0, -80.0], [-80.0, -1e-3, -40.0, -120.0, -80.0]
    weights = {"pg": [1.0, 1.0, -1.0, -1.0, 1.0], "kl": [0.1] * 5, "reference": [-160.0, -1e-3, -40.0, -0.1, 0.0]}
    for kl in (KLConfig(), KLConfig(coef=0.1), KLConfig(coef=0.1, estimator="k1", place="reward")):
        for teacher in (False, True):
            loss = make_loss(ALL_POLICIES[name], kl=kl, teacher=teacher)
            total, gradient, metrics = evaluate(*values, loss=loss, dtype=dtype, lengths=[2, 3], **weights)
            assert math.isfinite(total) and gradient.isfinite().all()
            assert gradient.float().square().sum().isfinite()  # nor does the gradient's norm overflow
            assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", ALL_POLICIES)
def test_tokens_without_weight_contribute_exactly_nothing(name):
    columns = {"mask": [0, 1, 1], "pg": [0.0, 0.0, 1.0], "lengths": [3]}
    for hostile in (-math.inf, -1e30):
        _, gradient, _ = evaluate([hostile, -1.0, -1.0], [hostile, -1.0, -1.0], bounds=ALL_POLICIES[name], **columns)
        assert gradient[:2].tolist() == [0.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
)
def test_means_and_sums_over_documents_against_plain_loops(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    values = torch.randn(total, generator=generator, dtype=torch.float64)
    mask = (torch.rand(total, generator=generator) < 0.6).tolist()
    inputs = make_inputs(values, values.tolist(), mask=[int(m) for m in mask], lengths=lengths)
    mean_T, to_go_T = inputs.document_mean(values), inputs.document_to_go(values)
    start = 0
    for length in lengths:
        part = range(start, start + length)
        sampled = [values[t].item() for t in part if mask[t]]
        expected = sum(sampled) / len(sampled) if sampled else 0.0
        for t in part:
            assert mean_T[t].item() == pytest.approx(expected, abs=1e-12)
            assert to_go_T[t].item() == pytest.approx(values[t : start + length].sum().item(), abs=1e-12)
        start += length


@pytest.mark.parametrize("name", [n for n, a in ALGORITHMS.items() if a.policy.surrogate == "clip"])
def test_gradients_of_clipped_losses_against_finite_differences(name):
    """Of these only the sequence ratio in GSPO stops a gradient, and its form has the gradient of the whole."""
    generator = torch.Generator().manual_seed(3)
    behaviour = (-1 - torch.rand(9, generator=generator, dtype=torch.float64)).tolist()
    logprobs = (
        torch.tensor(behaviour) + 0.1 * torch.randn(9, generator=generator, dtype=torch.float64)
    ).requires_grad_()
    weights = [0.1] * 4 + [-0.2] * 5  # one weight per document, as algorithms give
    policy = ALGORITHMS[name].policy
    total, _ = make_loss(policy)(make_inputs(logprobs, behaviour, pg=weights, lengths=[4, 5]))
    total.backward()
    for t in range(9):
        slopes = []
        for step in (1e-6, -1e-6):
            moved = logprobs.detach().clone()
            moved[t] += step
            slopes.append(make_loss(policy)(make_inputs(moved, behaviour, pg=weights, lengths=[4, 5]))[0].item())
        assert logprobs.grad[t].item() == pytest.approx((slopes[0] - slopes[1]) / 2e-6, rel=1e-5, abs=1e-9)
