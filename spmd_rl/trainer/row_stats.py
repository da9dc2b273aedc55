"""Metrics of some rows, in a form that ranks can all-reduce: everything is a sum, or a maximum, over tokens.

It refuses to know the loss it reports on. Invariant: nothing here waits for the device or moves data off it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.algorithms.types import PolicyLoss
from spmd_rl.trainer.inputs import LossInputs

SUMS = (
    "loss",
    "tokens_sampled",
    "tokens_trained",
    "tokens_ce",
    "tokens_masked",
    "tokens_clipped",
    "tokens_used",
    "tokens_packed",
    "entropy",
    "k3",
    "reference_tokens",
    "reference_k3",
)
MAXIMA = ("k3_max",)


@dataclass(frozen=True)
class Stats:
    """Sums and maxima over tokens, addable."""

    sums_S: Tensor  # float64[len(SUMS)]
    maxima_M: Tensor  # float64[len(MAXIMA)]

    def __add__(self, other: Stats) -> Stats:
        return Stats(self.sums_S + other.sums_S, torch.maximum(self.maxima_M, other.maxima_M))

    def metrics(self) -> dict[str, float]:
        """Means over the tokens that each metric speaks of; 0 where there are none."""
        total = dict(zip(SUMS, self.sums_S.tolist(), strict=True)) | dict(
            zip(MAXIMA, self.maxima_M.tolist(), strict=True)
        )
        metrics = {
            "loss": total["loss"],
            "entropy": total["entropy"] / max(total["tokens_used"], 1.0),
            "offpolicy/k3_mean": total["k3"] / max(total["tokens_sampled"], 1.0),
            "offpolicy/k3_max": total["k3_max"],
            "tokens/sampled": total["tokens_sampled"],
            "tokens/trained": total["tokens_trained"],
            "tokens/ce": total["tokens_ce"],
            "tokens/packed": total["tokens_packed"],
            "masked_fraction": total["tokens_masked"] / max(total["tokens_trained"], 1.0),
            "clipped_fraction": total["tokens_clipped"] / max(total["tokens_trained"], 1.0),
        }
        if total["reference_tokens"]:
            metrics["reference/k3_mean"] = total["reference_k3"] / total["reference_tokens"]
        return metrics


@torch.no_grad()
def row_stats(loss: Tensor, inputs: LossInputs, keep_T: Tensor, policy: PolicyLoss) -> Stats:
    """Sums over the tokens of one row, in the order of SUMS and MAXIMA."""
    sampled_T, trained_T, ce_T = inputs.mask_T, inputs.pg_weight_T != 0, inputs.ce_weight_T != 0
    used_T = sampled_T | ce_T
    k3_T = _k3(inputs.logprobs_T, inputs.behaviour_T, sampled_T)
    compared_T, reference_k3 = torch.zeros_like(sampled_T), torch.zeros((), dtype=torch.float64, device=loss.device)
    if inputs.reference_T is not None:
        compared_T = inputs.kl_weight_T != 0
        reference_k3 = _k3(inputs.reference_T, inputs.logprobs_T, compared_T).sum()
    sums = (
        loss.detach(),
        sampled_T.sum(),
        trained_T.sum(),
        ce_T.sum(),
        (trained_T & ~keep_T).sum(),
        (trained_T & _clipped(inputs, policy)).sum(),
        used_T.sum(),
        used_T.any() * len(used_T),  # a row that only takes part holds no token of the batch
        torch.where(used_T, inputs.entropies_T.double(), 0.0).sum(),
        k3_T.sum(),
        compared_T.sum(),
        reference_k3,
    )
    return Stats(torch.stack([value.double() for value in sums]), k3_T.amax()[None])


def _k3(log_q_T: Tensor, log_p_T: Tensor, counted_T: Tensor) -> Tensor:
    """e^d − 1 − d with d = log q − log p, float64[T], ≥ 0: estimates KL(p ‖ q) from tokens that p sampled.

    Source: Schulman, "Approximating KL divergence" (2020). expm1 in float64, because for small d the terms cancel
    down to d² / 2.
    """
    log_ratio_T = torch.where(counted_T, log_q_T.double() - log_p_T.double(), 0.0)
    return (torch.expm1(log_ratio_T) - log_ratio_T).clamp(min=0.0)


def _clipped(inputs: LossInputs, policy: PolicyLoss) -> Tensor:
    """Tokens whose ratio the clip holds where it is, against the policy that sampled."""
    if policy.surrogate != "clip":
        return torch.zeros_like(inputs.mask_T)
    log_ratio_T = inputs.log_ratio_T
    if policy.ratio == "sequence":
        log_ratio_T = inputs.document_mean(log_ratio_T)
    ratio_T = log_ratio_T.double().exp()
    above_T = (inputs.pg_weight_T > 0) & (ratio_T > 1 + policy.clip_high)
    return above_T | ((inputs.pg_weight_T < 0) & (ratio_T < 1 - policy.clip_low))
