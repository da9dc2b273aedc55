"""The training loss of one packed row, and the sums from which its metrics are made.

    loss = policy term − Σ ce_weight · log p − Σ entropy_weight · H + Σ kl_weight · k(p, reference)

What it refuses to know: advantages, aggregation, micro-batches, ranks. All of that is already inside the weight
streams, which hold the batch's global denominator; so losses and gradients of rows simply add up.

Invariants: ratios live in log space, so value and gradient are finite for any finite log-probabilities; a token
whose weights are zero contributes exactly 0 to both, whatever its log-probability is (0 · inf never happens). The loss
is a float64 scalar: its value does not depend on the order in which rows are added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from spmd_rl.algorithms.types import Algorithm, PolicyLoss
from spmd_rl.config.imports import load_object
from spmd_rl.config.tree import AlgorithmConfig, KLConfig
from spmd_rl.trainer.corrections import LARGEST_LOG_RATIO, kept, truncated
from spmd_rl.trainer.inputs import LossInputs
from spmd_rl.trainer.row_stats import Stats, row_stats

PolicyTerm = Callable[[LossInputs], Tensor]  # float[T], already weighted; it is summed and minimised


@dataclass(frozen=True)
class Loss:
    """Everything about the loss that does not change from row to row."""

    policy: PolicyLoss
    kl: KLConfig
    teacher: bool  # the policy term moves to the reference: distillation
    entropy: bool  # there is a bonus; without one no gradient of the entropy is computed
    own_term: PolicyTerm | None = None  # in place of the policy's surrogate and corrections

    @classmethod
    def build(cls, config: AlgorithmConfig, algorithm: Algorithm) -> Loss:
        """Raises ImportError or ValueError for an own loss that does not load."""
        own = load_object(config.loss, "orchestrator.algorithm.loss") if config.loss else None
        return cls(algorithm.policy, config.kl, algorithm.learns == "teacher", config.entropy_bonus != 0, own)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Stats]:
        """The loss of one row, a float64 scalar, and its metric sums."""
        inputs = self._with_reference_in_advantages(inputs)
        keep_T = kept(inputs, self.policy)
        term_T = self.own_term(inputs) if self.own_term else policy_term(inputs, self.policy, keep_T)
        used_T = inputs.mask_T if self.own_term else inputs.pg_weight_T != 0
        total = torch.where(used_T, term_T, 0.0).double().sum() - _weighted(inputs.ce_weight_T, inputs.logprobs_T)
        if self.entropy:
            total = total - _weighted(inputs.entropy_weight_T, inputs.entropies_T)
        if self.kl.coef != 0 and self.kl.place == "loss":
            total = total + _weighted(inputs.kl_weight_T, self._distance(inputs))
        return total, row_stats(total, inputs, keep_T, self.policy)

    def _with_reference_in_advantages(self, inputs: LossInputs) -> LossInputs:
        """Distillation and `kl.place = "reward"` speak through the policy term: their weights join the advantage's.

        A teacher's log p_teacher − log p is credited to the token itself; a penalty is part of the return, so that each
        token answers for its own and all later ones.
        """
        if inputs.reference_T is None or not (self.teacher or self.kl.place == "reward"):
            return inputs
        with torch.no_grad():
            if self.teacher:
                credit_T = inputs.kl_weight_T * (inputs.reference_T - inputs.logprobs_T)
            else:
                credit_T = -inputs.document_to_go(inputs.kl_weight_T * self._distance(inputs))
            credit_T = torch.where(inputs.kl_weight_T != 0, credit_T.to(inputs.pg_weight_T.dtype), 0.0)
        return replace(inputs, pg_weight_T=inputs.pg_weight_T + credit_T)

    def _distance(self, inputs: LossInputs) -> Tensor:
        """k1, k2 or k3 of KL(policy || reference), [T], 0 where there is no weight."""
        assert inputs.reference_T is not None
        counted_T = inputs.kl_weight_T != 0
        # A selection before the formula: an unused token's numbers must not reach the exponential's gradient.
        return kl_estimate(torch.where(counted_T, inputs.logprobs_T - inputs.reference_T, 0.0), self.kl.estimator)


def kl_estimate(log_ratio_T: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimates of KL(p || q) from a token sampled by p, with d = log p − log q.

    k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d (Schulman, Approximating KL Divergence, 2020). As a loss, k2 has the
    gradient of the KL divergence in expectation and k1 none; as a reward, k1 is unbiased.
    """
    match estimator:
        case "k1":
            return log_ratio_T
        case "k2":
            return log_ratio_T.square() / 2
    return torch.expm1((-log_ratio_T).clamp(max=LARGEST_LOG_RATIO)) + log_ratio_T


def policy_term(inputs: LossInputs, policy: PolicyLoss, keep_T: Tensor) -> Tensor:
    """The policy-gradient loss of every token, [T]; see `PolicyLoss` for the formulas."""
    weight_T = torch.where(keep_T, inputs.pg_weight_T, 0.0)
    used_T = weight_T != 0
    # A selection, not a product: neither the value nor the gradient of an unused log-probability is ever touched.
    logprobs_T = torch.where(used_T, inputs.logprobs_T, 0.0)
    if policy.surrogate == "none":
        return torch.zeros_like(logprobs_T)
    if policy.surrogate == "importance":
        ratio_T = truncated(inputs.log_ratio_T.detach(), inputs, policy)
        return -(weight_T * ratio_T) * logprobs_T
    if policy.proximal:
        assert inputs.proximal_T is not None
        stale_T = torch.where(inputs.mask_T, inputs.proximal_T - inputs.behaviour_T, 0.0)
        weight_T = weight_T * truncated(stale_T, inputs, policy)
        inputs = replace(inputs, behaviour_T=inputs.proximal_T)
    log_ratio_T = inputs.log_ratio_T
    if policy.ratio == "sequence":
        # The value is the sequence's, the gradient flows through the token: s_t = sg(s) · p / sg(p) (GSPO, eq. 8).
        mean_T = inputs.document_mean(log_ratio_T).detach()
        log_ratio_T = mean_T + inputs.logprobs_T - inputs.logprobs_T.detach()
    ratio_T = torch.where(used_T, log_ratio_T, 0.0).clamp(max=LARGEST_LOG_RATIO).exp()
    objective_T = torch.minimum(weight_T * ratio_T, weight_T * ratio_T.clamp(1 - policy.clip_low, 1 + policy.clip_high))
    if policy.dual_clip:
        objective_T = torch.where(weight_T < 0, objective_T.maximum(policy.dual_clip * weight_T), objective_T)
    return -objective_T


def _weighted(weight_T: Tensor, term_T: Tensor) -> Tensor:
    """Σ weight · term in float64, over the terms that have a weight."""
    return (weight_T.double() * torch.where(weight_T != 0, term_T, 0.0).double()).sum()
