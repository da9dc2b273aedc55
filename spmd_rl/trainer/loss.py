"""The training loss of one packed row, and the sums from which its metrics are made.

What it refuses to know: advantages, aggregation, micro-batches, ranks. All of that is already inside the two weight
streams, which hold the batch's global denominator; so losses and gradients of rows simply add up.

Invariants: ratios live in log space, so value and gradient are finite for any finite log-probabilities; a token
whose weights are zero contributes exactly 0 to both, whatever its log-probability is (0 · inf never happens).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SUMS = ("loss", "tokens_sampled", "tokens_trained", "tokens_ce", "tokens_masked", "tokens_used", "entropy", "k3")
MAXIMA = ("k3_max",)


@dataclass(frozen=True)
class Stats:
    """Metrics of some rows, in a form that ranks can all-reduce: everything is a sum, or a maximum, over tokens."""

    sums_S: Tensor  # float64[len(SUMS)]
    maxima_M: Tensor  # float64[len(MAXIMA)]

    def __add__(self, other: Stats) -> Stats:
        return Stats(self.sums_S + other.sums_S, torch.maximum(self.maxima_M, other.maxima_M))

    def metrics(self) -> dict[str, float]:
        """Means over the tokens that each metric speaks of; 0 where there are none."""
        total = dict(zip(SUMS, self.sums_S.tolist(), strict=True)) | dict(
            zip(MAXIMA, self.maxima_M.tolist(), strict=True)
        )
        return {
            "loss": total["loss"],
            "entropy": total["entropy"] / max(total["tokens_used"], 1.0),
            "offpolicy/k3_mean": total["k3"] / max(total["tokens_sampled"], 1.0),
            "offpolicy/k3_max": total["k3_max"],
            "tokens/sampled": total["tokens_sampled"],
            "tokens/trained": total["tokens_trained"],
            "tokens/ce": total["tokens_ce"],
            "masked_fraction": total["tokens_masked"] / max(total["tokens_trained"], 1.0),
        }


def row_loss(
    logprobs_T: Tensor,
    entropies_T: Tensor,
    behaviour_T: Tensor,
    mask_T: Tensor,
    pg_weight_T: Tensor,
    ce_weight_T: Tensor,
    *,
    ipo_threshold: float,
    ratio_cap: float,
) -> tuple[Tensor, Stats]:
    """The loss of one row of T target tokens, and its metric sums.

    With p and μ the probabilities of a token under the trained and the behaviour policy and ρ = p / μ:

        loss = − Σ pg_weight · 1[|p − μ| ≤ ipo_threshold] · sg(min(ρ, ratio_cap)) · log p  −  Σ ce_weight · log p

    sg stops the gradient. Source: the `ipo` policy loss of prime-rl without its KL term (a symmetric mask on the
    difference of the probabilities, the binary total variation of arXiv 2602.04879; −A·ρ has the gradient
    −A·sg(ρ)·∇log p), with the ratio capped as in truncated importance sampling (IMPALA, arXiv 1802.01561).

    logprobs_T: natural log, the only input that gets a gradient. behaviour_T: the same under the behaviour policy.
    mask_T: nonzero where the behaviour policy sampled the token; k3 is taken over these tokens, the entropy over
    these and the ones with a cross-entropy weight. The loss is a float64 scalar: its value does not depend on the
    order in which rows are added. Raises ValueError when the bounds make no sense.
    """
    if not (ipo_threshold >= 0 and ratio_cap > 0):
        raise ValueError(
            f"the policy loss needs ipo_threshold >= 0 and ratio_cap > 0, got {ipo_threshold} and {ratio_cap}; "
            "set orchestrator.algorithm.ipo_threshold and orchestrator.algorithm.ratio_cap"
        )
    with torch.no_grad():
        log_ratio_T = logprobs_T - behaviour_T
        # "not above" instead of "at most": a nan is kept, so that it reaches the loss and is seen.
        keep_T = ~((logprobs_T.exp() - behaviour_T.exp()).abs() > ipo_threshold)
        ratio_T = log_ratio_T.clamp(max=math.log(ratio_cap)).exp()  # the cap comes first: exp never overflows
        policy_T = torch.where((pg_weight_T != 0) & keep_T, pg_weight_T * ratio_T, 0.0)
        coefficient_T = policy_T + ce_weight_T
    # A selection, not a product: neither the value nor the gradient of an unused log-probability is ever touched.
    used_T = torch.where(coefficient_T != 0, logprobs_T, 0.0)
    loss = -(coefficient_T.double() * used_T.double()).sum()
    return loss, _stats(loss, logprobs_T, entropies_T, behaviour_T, mask_T, pg_weight_T, ce_weight_T, keep_T)


@torch.no_grad()
def _stats(
    loss: Tensor,
    logprobs_T: Tensor,
    entropies_T: Tensor,
    behaviour_T: Tensor,
    mask_T: Tensor,
    pg_weight_T: Tensor,
    ce_weight_T: Tensor,
    keep_T: Tensor,
) -> Stats:
    """Sums over tokens, in the order of SUMS and MAXIMA, without a transfer from the device."""
    sampled_T, trained_T, ce_T = mask_T != 0, pg_weight_T != 0, ce_weight_T != 0
    used_T = sampled_T | ce_T
    # k3 = e^d − 1 − d ≥ 0 is the estimator of KL(behaviour ‖ trained) from one sample (Schulman, "Approximating KL
    # divergence", 2020). expm1 in float64, because for small d the terms cancel down to d² / 2.
    log_ratio_T = torch.where(sampled_T, logprobs_T.double() - behaviour_T.double(), 0.0)
    k3_T = (torch.expm1(log_ratio_T) - log_ratio_T).clamp(min=0.0)
    sums = (
        loss.detach(),
        sampled_T.sum(),
        trained_T.sum(),
        ce_T.sum(),
        (trained_T & ~keep_T).sum(),
        used_T.sum(),
        torch.where(used_T, entropies_T.double(), 0.0).sum(),
        k3_T.sum(),
    )
    return Stats(torch.stack([value.double() for value in sums]), k3_T.amax()[None])
