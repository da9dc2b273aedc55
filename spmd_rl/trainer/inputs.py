"""What the loss of one packed row is made of: a view of T target tokens, for our losses and for users' own.

It refuses to know how anything is combined. Invariant: `logprobs_T` and `entropies_T` alone carry gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """One row, T target tokens of some documents; all logs are natural."""

    logprobs_T: Tensor  # of the trained policy; has a gradient
    entropies_T: Tensor  # nats, likewise
    behaviour_T: Tensor  # log-probabilities of the policy that sampled
    mask_T: Tensor  # bool: the behaviour policy sampled the token
    document_T: Tensor  # int64: which document of the row the token belongs to
    documents: int
    pg_weight_T: Tensor  # advantage × share of the batch; 0 where there is nothing to learn
    ce_weight_T: Tensor
    kl_weight_T: Tensor
    entropy_weight_T: Tensor
    reference_T: Tensor | None = None  # log-probabilities of the reference model or the hinted policy
    proximal_T: Tensor | None = None  # of the trained policy as the batch began

    @property
    def log_ratio_T(self) -> Tensor:
        """log(p / μ) with its gradient, 0 where the behaviour policy sampled nothing."""
        return torch.where(self.mask_T, self.logprobs_T - self.behaviour_T, 0.0)

    def document_sum(self, values_T: Tensor) -> Tensor:
        """Sum over each document's sampled tokens, spread over its tokens again: [T] → [T].

        Documents are whole in a row, so no rank needs another's tokens.
        """
        return self._sums(torch.where(self.mask_T, values_T, 0.0)).index_select(0, self.document_T)

    def document_mean(self, values_T: Tensor) -> Tensor:
        """The mean instead of the sum; 0 for a document without a sampled token."""
        return self.document_sum(values_T) / self.document_sum(torch.ones_like(values_T)).clamp(min=1)

    def document_to_go(self, values_T: Tensor) -> Tensor:
        """Sum over this and all later tokens of the document, [T] → float64[T]."""
        wide_T = values_T.double()
        before_T = wide_T.cumsum(0) - wide_T
        starts_D = torch.searchsorted(self.document_T, torch.arange(self.documents, device=values_T.device))
        ends_D = self._sums(wide_T) + before_T[starts_D]
        return ends_D.index_select(0, self.document_T) - before_T

    def _sums(self, values_T: Tensor) -> Tensor:
        zeros_D = torch.zeros(self.documents, dtype=values_T.dtype, device=values_T.device)
        return zeros_D.index_add(0, self.document_T, values_T)
