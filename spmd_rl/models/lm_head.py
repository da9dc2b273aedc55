"""Log-probabilities and entropies of a row's targets from hidden states, without ever making a [T, V] tensor.

One autograd function walks over chunks of tokens: logits in the model's dtype, everything after them in float32
(float64 for float64 inputs). Backward computes each chunk's logits again, except those of the last chunk, which are
kept: nothing else runs between the head's forward and its backward, so they cost no peak memory. At most three
[chunk, V] tensors are alive at a time; fresh ones cost as much as a pass over them, so most is done in place. It
refuses to know what the two outputs are used for: both carry gradients.

With z = (logits - their maximum) / temperature, e = exp(z), s = sum e, p = e / s:
    log p_target = z_target - log s                      H = -sum p log p = log s - (sum e z) / s
    d log p_target / dz_j = 1[j = target] - p_j          dH / dz_j = -p_j (z_j - log s + H)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def token_logprobs(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, temperatures_T: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p(target), entropy) of softmax(hidden @ weight.T / temperature), each float32[T], in nats.

    `chunk` is the number of tokens whose logits are alive at a time. `targets_T` is any integer type. Gradients flow to
    `hidden_TD` and `weight_VD` (accumulated in float32), not to temperatures.
    """
    if chunk < 1:
        raise ValueError(f"lm_head_chunk must be at least 1 token, got {chunk}")
    return _TokenLogprobs.apply(hidden_TD, weight_VD, targets_T.long(), temperatures_T, chunk)


@dataclass
class _Chunk:
    """The softmax of one chunk, not divided by its sum; all in the type of the temperatures."""

    z_CV: torch.Tensor
    e_CV: torch.Tensor
    sum_C: torch.Tensor

    @classmethod
    def of(cls, hidden_CD: torch.Tensor, weight_VD: torch.Tensor, temperatures_C: torch.Tensor) -> _Chunk:
        logits_CV = (hidden_CD @ weight_VD.T).to(temperatures_C.dtype)
        scale_C1 = temperatures_C[:, None].reciprocal()
        shift_C1 = logits_CV.amax(-1, keepdim=True).mul_(scale_C1).neg_()
        z_CV = torch.addcmul(shift_C1, logits_CV, scale_C1, out=logits_CV)
        e_CV = z_CV.exp()
        return cls(z_CV, e_CV, e_CV.sum(-1))

    def logprobs(self, targets_C: torch.Tensor) -> torch.Tensor:
        return self.z_CV.gather(1, targets_C[:, None]).squeeze(1) - self.sum_C.log()

    def entropies(self) -> torch.Tensor:
        mean_C = torch.bmm(self.e_CV[:, None], self.z_CV[..., None]).view(-1) / self.sum_C  # a dot product per token
        return self.sum_C.log() - mean_C

    def gradient(
        self,
        targets_C: torch.Tensor,
        entropies_C: torch.Tensor,
        grad_logp_C: torch.Tensor,
        grad_entropy_C: torch.Tensor | None,
        temperatures_C: torch.Tensor,
    ) -> torch.Tensor:
        """By the logits: -p_j (g_logp + g_entropy (log p_j + H)), plus g_logp at the target. Uses the chunk up."""
        if grad_entropy_C is None:
            pull_CV = self.e_CV.mul_((-grad_logp_C / self.sum_C / temperatures_C)[:, None])
        else:
            pull_CV = self.z_CV.add_((entropies_C - self.sum_C.log())[:, None])
            pull_CV.mul_(grad_entropy_C[:, None]).add_(grad_logp_C[:, None])
            pull_CV.mul_(self.e_CV).mul_((-1 / self.sum_C / temperatures_C)[:, None])
        return pull_CV.scatter_add_(1, targets_C[:, None], (grad_logp_C / temperatures_C)[:, None])


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_T: torch.Tensor,
        temperatures_T: torch.Tensor,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exact = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        temperatures_T = temperatures_T.to(exact)
        logprobs_T = torch.empty(len(hidden_TD), dtype=exact, device=hidden_TD.device)
        entropies_T = torch.empty_like(logprobs_T)
        last = None
        for start in range(0, len(hidden_TD), chunk):
            part = slice(start, start + chunk)
            last = None  # its memory, before there is the next one
            last = _Chunk.of(hidden_TD[part], weight_VD, temperatures_T[part])
            logprobs_T[part], entropies_T[part] = last.logprobs(targets_T[part]), last.entropies()
        ctx.last = last if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, temperatures_T, entropies_T)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return logprobs_T, entropies_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_T: torch.Tensor | None, grad_entropy_T: torch.Tensor | None) -> tuple:
        hidden_TD, weight_VD, targets_T, temperatures_T, entropies_T = ctx.saved_tensors
        if grad_logp_T is None and grad_entropy_T is None:
            return None, None, None, None, None
        if grad_logp_T is None:
            grad_logp_T = torch.zeros_like(entropies_T)
        grad_hidden_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=entropies_T.dtype) if ctx.needs_input_grad[1] else None
        kept, ctx.last = ctx.last, None  # it is used up below; a second backward computes it again
        for start in reversed(range(0, len(hidden_TD), ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            chunk = grad_CV = None
            chunk = _Chunk.of(hidden_TD[part], weight_VD, temperatures_T[part]) if kept is None else kept
            kept = None
            grad_entropy_C = None if grad_entropy_T is None else grad_entropy_T[part]
            grad_CV = chunk.gradient(
                targets_T[part], entropies_T[part], grad_logp_T[part], grad_entropy_C, temperatures_T[part]
            ).to(hidden_TD.dtype)
            if grad_hidden_TD is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_TD[part])
            if grad_weight_VD is None:
                continue
            if grad_weight_VD.dtype == grad_CV.dtype:
                grad_weight_VD.addmm_(grad_CV.T, hidden_TD[part])
            else:
                grad_weight_VD += grad_CV.T @ hidden_TD[part]
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_TD, grad_weight_VD, None, None, None
