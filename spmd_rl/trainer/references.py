"""Log-probabilities that a loss compares with: of a frozen model, and of the policy itself with a hint.

A frozen model is sharded as the policy is; it is a folder of its own (`algorithm.reference`) or a copy of the policy as
RL starts. It refuses to know what the numbers are used for. All functions are collective, and without gradients.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from spmd_rl.models.moe import Routing
from spmd_rl.rollouts.types import Row
from spmd_rl.trainer.parallel import reshard
from spmd_rl.trainer.row_tensors import RowTensors, tensor


@torch.no_grad()
def frozen_logprobs(model: nn.Module, row: RowTensors, routing: Routing | None = None) -> Tensor:
    """log p(target) of every token of the row under `model`, float32[T]."""
    logprobs_T, _ = row.logprobs(model, routing)
    reshard(model)  # without a backward nothing else gives back what the forward gathered
    return logprobs_T


@torch.no_grad()
def hinted_logprobs(policy: nn.Module, row: Row, device: torch.device) -> Tensor:
    """log p(target | hint) under the policy, float32[T]; 0 on tokens that the hinted documents do not hold.

    A hinted document ends as its document does, so the two are aligned at their ends.
    """
    aligned_T = np.zeros(len(row.tokens), np.float32)
    if row.hinted is None or row.hinted_cu_seqlens is None:
        return tensor(aligned_T, torch.float32, device)
    source, target, temperatures_M = _alignment(row)
    hinted_M = Row(
        tokens=row.hinted,
        targets=np.append(row.hinted[1:], 0),
        mask=np.zeros(len(row.hinted), np.uint8),
        logprobs=np.zeros(len(row.hinted), np.float32),
        temperatures=temperatures_M,
        cu_seqlens=row.hinted_cu_seqlens,
    )
    logprobs_M = frozen_logprobs(policy, RowTensors.build(hinted_M, device))
    result_T = tensor(aligned_T, torch.float32, device)
    result_T[tensor(target, torch.int64, device)] = logprobs_M[tensor(source, torch.int64, device)].float()
    return result_T


def _alignment(row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(places in the hinted row, places in the row that they answer for, temperatures of the hinted row)."""
    source, target = [], []
    temperatures_M = np.ones(len(row.hinted), np.float32)
    for end_m, end_t, count in zip(
        row.hinted_cu_seqlens[1:].tolist(),
        row.cu_seqlens[1:].tolist(),
        np.minimum(np.diff(row.hinted_cu_seqlens), np.diff(row.cu_seqlens)).tolist(),
        strict=True,
    ):
        source.append(np.arange(end_m - count, end_m - 1))
        target.append(np.arange(end_t - count, end_t - 1))
    source_N, target_N = np.concatenate(source), np.concatenate(target)
    temperatures_M[source_N] = row.temperatures[target_N]
    return source_N, target_N, temperatures_M
