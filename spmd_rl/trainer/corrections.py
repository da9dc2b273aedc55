"""Off-policy corrections: which sampled tokens a policy loss may use, and how importance ratios are truncated.

Composable pieces over the probabilities p (trained) and μ (behaviour); A is the sign of the token's weight. Each piece
that the `PolicyLoss` turns on drops tokens or whole sequences; a token is used when no piece drops it.

    ipo                |p − μ| > δ                                           prime-rl's `ipo` loss
    dppo_tv            A > 0 and p − μ > δ, or A < 0 and μ − p > δ           DPPO, arXiv 2602.04879
    dppo_kl            KL(μ, p) of "this token or another" > δ, and p moved
                       the way A pushes                                      the same
    fallen             μ − p > δ                                             prime-rl's `ref_kl` loss
    icepop             p/μ outside [low, high]                               IcePop, arXiv 2510.18855
    geometric          geometric mean of the sequence's p/μ outside bounds   rejection sampling as in verl
    negative_sequence  A < 0 and mean over the sequence of log(μ/p) > δ      DeepSeek-V3.2, arXiv 2512.02556

Truncation (IMPALA, arXiv 1802.01561; as a fix for two engines' different numbers: Yao et al. 2025): `ratio_cap` by
token, `sequence_cap` for the product over a sequence. It refuses to know about surrogates and aggregation.

Invariants: nothing here has a gradient; everything is finite for any finite log-probabilities; comparisons are written
as "not outside" so that a NaN is kept and reaches the loss, where it is seen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spmd_rl.algorithms.types import PolicyLoss
from spmd_rl.trainer.inputs import LossInputs

LARGEST_LOG_RATIO = 20.0  # where nothing else bounds a ratio: its square fits float32, and so do gradient norms
SMALLEST_REST = 1e-12  # probability of "another token", where rounding says 0


@torch.no_grad()
def kept(inputs: LossInputs, policy: PolicyLoss) -> Tensor:
    """bool[T]: True where no piece drops the token."""
    log_ratio_T, sign_T = inputs.log_ratio_T, inputs.pg_weight_T.sign()
    moved_T = torch.where(inputs.mask_T, inputs.logprobs_T.exp() - inputs.behaviour_T.exp(), 0.0)
    dropped_T = torch.zeros_like(inputs.mask_T)
    if policy.ipo:
        dropped_T |= moved_T.abs() > policy.ipo
    if policy.dppo_tv:
        dropped_T |= sign_T * moved_T > policy.dppo_tv
    if policy.dppo_kl:
        divergence_T = binary_kl(inputs.behaviour_T, inputs.logprobs_T)
        dropped_T |= inputs.mask_T & (divergence_T > policy.dppo_kl) & (sign_T * moved_T > 0)
    if policy.fallen:
        dropped_T |= moved_T < -policy.fallen
    if policy.icepop_low:
        dropped_T |= log_ratio_T < math.log(policy.icepop_low)
    if policy.icepop_high:
        dropped_T |= log_ratio_T > math.log(policy.icepop_high)
    if policy.geometric_low or policy.geometric_high or policy.negative_sequence:
        mean_T = inputs.document_mean(log_ratio_T)
        if policy.geometric_low:
            dropped_T |= mean_T < math.log(policy.geometric_low)
        if policy.geometric_high:
            dropped_T |= mean_T > math.log(policy.geometric_high)
        if policy.negative_sequence:
            dropped_T |= (sign_T < 0) & (-mean_T > policy.negative_sequence)
    return ~dropped_T


@torch.no_grad()
def truncated(log_ratio_T: Tensor, inputs: LossInputs, policy: PolicyLoss) -> Tensor:
    """Importance ratios from `log_ratio_T` after truncation: the token's; with `sequence_cap` its sequence's product.

    The cap comes before the exponential, which so never overflows.
    """
    if policy.sequence_cap:
        return inputs.document_sum(log_ratio_T).clamp(max=math.log(policy.sequence_cap)).exp()
    return log_ratio_T.clamp(max=math.log(policy.ratio_cap) if policy.ratio_cap else LARGEST_LOG_RATIO).exp()


@torch.no_grad()
def binary_kl(behaviour_T: Tensor, logprobs_T: Tensor) -> Tensor:
    """KL divergence in nats of "this token or another" between μ and p: μ log(μ/p) + (1 − μ) log((1 − μ)/(1 − p))."""
    mu_T, log_mu_T, log_p_T = behaviour_T.double().exp(), behaviour_T.double(), logprobs_T.double()
    rest_mu_T, rest_p_T = ((-torch.expm1(log_T)).clamp(min=SMALLEST_REST) for log_T in (log_mu_T, log_p_T))
    return mu_T * (log_mu_T - log_p_T) + rest_mu_T * (rest_mu_T / rest_p_T).log()
