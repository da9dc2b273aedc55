"""The loss against closed forms, finite differences and hostile log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.row_losses import BOUNDS, NO_MASK, column, evaluate, make_inputs, make_loss


def test_policy_term_is_minus_weight_times_ratio_times_logprob():
    p, mu, weight = [0.5, 0.2, 0.9], [0.4, 0.25, 0.8], [1.0, -2.0, 0.5]
    loss, gradient, metrics = evaluate([math.log(x) for x in p], [math.log(x) for x in mu], pg=weight)
    ratios = [a / b for a, b in zip(p, mu, strict=True)]
    assert loss == pytest.approx(
        -sum(w * r * math.log(x) for w, r, x in zip(weight, ratios, p, strict=True)), rel=1e-12
    )
    torch.testing.assert_close(gradient, column([-w * r for w, r in zip(weight, ratios, strict=True)]))
    assert metrics["masked_fraction"] == 0 and metrics["tokens/trained"] == 3


def test_on_policy_gradient_is_the_plain_policy_gradient():
    _, gradient, metrics = evaluate([-1.0, -2.0], [-1.0, -2.0], pg=[0.25, -0.75])
    torch.testing.assert_close(gradient, column([-0.25, 0.75]))
    assert metrics["offpolicy/k3_mean"] == 0


def test_ratio_is_capped():
    # ρ = 0.2 / 0.01 = 20, far above the cap, while |p − μ| stays inside the threshold.
    _, gradient, _ = evaluate([math.log(0.2)], [math.log(0.01)], pg=[1.0])
    torch.testing.assert_close(gradient, column([-5.0]))


@pytest.mark.parametrize(("p", "mu", "kept"), [(0.79, 0.5, True), (0.81, 0.5, False), (0.1, 0.5, False)])
def test_tokens_whose_probability_moved_too_far_are_masked(p, mu, kept):
    loss, gradient, metrics = evaluate([math.log(p)], [math.log(mu)], pg=[1.0])
    assert (loss != 0, gradient.item() != 0, metrics["masked_fraction"] == 0) == (kept, kept, kept)


def test_cross_entropy_term_ignores_behaviour_and_mask():
    loss, gradient, metrics = evaluate([-0.01, -3.0], [-50.0, 0.0], ce=[0.5, 0.25], mask=[0, 0])
    assert loss == pytest.approx(0.5 * 0.01 + 0.25 * 3.0)
    torch.testing.assert_close(gradient, column([-0.5, -0.25]))
    assert metrics["tokens/trained"] == 0 and metrics["tokens/ce"] == 2 and metrics["offpolicy/k3_max"] == 0


def test_gradcheck_where_the_ratio_is_capped_or_the_term_is_cross_entropy():
    # There the coefficient is a constant, so finite differences see the same function as the stopped gradient.
    logprobs = column([-1.0, -2.0, -0.5, -4.0]).requires_grad_()
    columns = {"pg": [0.7, -0.3, 0.0, 0.0], "ce": [0.0, 0.2, 0.9, -0.4]}
    assert torch.autograd.gradcheck(
        lambda x: make_loss(NO_MASK)(make_inputs(x, [-4.0, -6.0, -9.0, -1.0], **columns))[0], (logprobs,)
    )


def test_the_gradient_with_an_uncapped_ratio_is_that_of_the_importance_ratio():
    # −w·sg(ρ)·log p and −w·ρ have the same gradient; the second one can be checked by finite differences.
    logprobs, behaviour, weight = [-1.0, -2.0], [-1.5, -1.2], [0.7, -0.3]
    _, gradient, _ = evaluate(logprobs, behaviour, pg=weight, bounds=NO_MASK)
    step = 1e-6
    for i, (x, b, w) in enumerate(zip(logprobs, behaviour, weight, strict=True)):
        slope = -w * (math.exp(x + step - b) - math.exp(x - step - b)) / (2 * step)
        assert gradient[i].item() == pytest.approx(slope, rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bounds", [BOUNDS, NO_MASK])
def test_extreme_log_ratios_stay_finite(dtype, bounds):
    loss, gradient, metrics = evaluate(
        [-1e-3, -80.0, -120.0, -300.0],
        [-80.0, -1e-3, -40.0, -220.0],
        pg=[1.0, 1.0, -1.0, 1.0],
        bounds=bounds,
        dtype=dtype,
    )
    assert math.isfinite(loss) and gradient.isfinite().all()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["offpolicy/k3_max"] == pytest.approx(math.exp(80), rel=0.01)


@pytest.mark.parametrize("hostile", [-math.inf, math.inf, math.nan])
def test_zero_weight_is_exactly_zero_whatever_the_logprob(hostile):
    loss, gradient, _ = evaluate([hostile, -1.0], [-1.0, -1.0], pg=[0.0, 1.0], mask=[0, 1])
    assert loss == 1.0 and gradient.tolist() == [0.0, -1.0]
    loss, gradient, _ = evaluate([-1.0], [hostile], pg=[0.0], ce=[2.0], mask=[0])
    assert loss == 2.0 and gradient.tolist() == [-2.0]


@pytest.mark.parametrize(("logprob", "behaviour"), [(math.nan, -1.0), (-1.0, math.nan)])
def test_a_nan_under_a_weight_reaches_the_loss(logprob, behaviour):
    loss, _, _ = evaluate([logprob], [behaviour], pg=[1.0])
    assert math.isnan(loss)


def test_padding_row_still_has_a_graph_with_zero_gradient():
    loss, gradient, metrics = evaluate([-1.0, -2.0], [0.0, 0.0], mask=[0, 0])
    assert loss == 0 and gradient.tolist() == [0.0, 0.0]
    assert set(metrics.values()) == {0.0}


def test_sampled_tokens_without_advantage_count_for_entropy_and_k3():
    difference = math.log(1.1)
    _, _, metrics = evaluate(
        [-1.0, -1.0, -1.0], [-1.0, -1.0 - difference, 5.0], mask=[1, 1, 0], entropies=[1.0, 2.0, 100.0]
    )
    assert metrics["tokens/sampled"] == 2 and metrics["tokens/trained"] == 0
    assert metrics["entropy"] == pytest.approx(1.5)
    assert metrics["offpolicy/k3_max"] == pytest.approx(0.1 - difference, rel=1e-9)
    assert metrics["offpolicy/k3_mean"] == pytest.approx((0.1 - difference) / 2, rel=1e-9)


def test_k3_of_tiny_differences_keeps_its_digits():
    _, _, metrics = evaluate([-1.0], [-1.0 - 1e-7], pg=[1.0])
    assert metrics["offpolicy/k3_mean"] == pytest.approx(0.5e-14, rel=1e-3, abs=0)


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.lists(
        st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-2, 2), st.floats(-2, 2)), min_size=2, max_size=12
    ),
    data=st.data(),
)
def test_stats_and_gradients_of_two_parts_add_up_to_the_whole(tokens, data):
    cut = data.draw(st.integers(1, len(tokens) - 1))
    loss, gradient, stats = evaluate_columns(tokens)
    loss_a, gradient_a, stats_a = evaluate_columns(tokens[:cut])
    loss_b, gradient_b, stats_b = evaluate_columns(tokens[cut:])
    assert loss_a + loss_b == pytest.approx(loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(torch.cat([gradient_a, gradient_b]), gradient, rtol=0, atol=0)
    total = stats_a + stats_b
    torch.testing.assert_close(total.sums_S, stats.sums_S)
    assert total.maxima_M.tolist() == stats.maxima_M.tolist()


def evaluate_columns(tokens):
    logprobs, behaviour, pg, ce = (list(values) for values in zip(*tokens, strict=True))
    logprobs_T = column(logprobs).requires_grad_()
    inputs = make_inputs(logprobs_T, behaviour, pg, ce, entropies=[-x for x in logprobs])
    loss, stats = make_loss()(inputs)
    loss.backward()
    return loss.item(), logprobs_T.grad, stats
