"""Losses of rows that are given as Python lists."""

from __future__ import annotations

import torch

from spmd_rl.algorithms.types import PolicyLoss
from spmd_rl.config.tree import KLConfig
from spmd_rl.trainer.inputs import LossInputs
from spmd_rl.trainer.loss import Loss

BOUNDS = PolicyLoss(ipo=0.3, ratio_cap=5.0)
NO_MASK = PolicyLoss(ratio_cap=5.0)


def column(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def make_inputs(logprobs_T, behaviour, pg=None, ce=None, mask=None, entropies=None, lengths=None, **columns):
    """One row of documents of these `lengths`; columns as Python lists."""
    zeros, dtype = [0.0] * len(logprobs_T), logprobs_T.dtype
    lengths = lengths or [len(logprobs_T)]
    return LossInputs(
        logprobs_T=logprobs_T,
        entropies_T=column(entropies or zeros, dtype),
        behaviour_T=column(behaviour, dtype),
        mask_T=torch.tensor(mask or [1] * len(logprobs_T), dtype=torch.bool),
        document_T=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        documents=len(lengths),
        pg_weight_T=column(pg or zeros, dtype),
        ce_weight_T=column(ce or zeros, dtype),
        kl_weight_T=column(columns.pop("kl", zeros), dtype),
        entropy_weight_T=column(columns.pop("entropy", zeros), dtype),
        **{f"{name}_T": column(values, dtype) for name, values in columns.items()},
    )


def make_loss(policy=BOUNDS, kl=None, teacher=False, entropy=False, own=None):
    return Loss(policy, kl or KLConfig(), teacher, entropy, own)


def evaluate(logprobs, behaviour, bounds=BOUNDS, dtype=torch.float64, loss=None, **columns):
    """(loss, gradient of the log-probabilities, metrics) of one row given as Python lists."""
    logprobs_T = column(logprobs, dtype).requires_grad_()
    total, stats = (loss or make_loss(bounds))(make_inputs(logprobs_T, behaviour, **columns))
    total.backward()
    return total.item(), logprobs_T.grad, stats.metrics()
