"""A packed row on the device, and what a model says about it.

It refuses to know what the numbers are for. Columns off the wire are read-only, so each becomes a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from spmd_rl.models.moe import Routing
from spmd_rl.models.packed import Documents
from spmd_rl.rollouts.types import Row

STREAMS = ("pg_weight", "ce_weight", "kl_weight", "entropy_weight")
COLUMNS = ("targets", "mask", "logprobs", "temperatures", *STREAMS)


@dataclass(frozen=True)
class RowTensors:
    """The columns of a `Row` that models and losses read, T tokens."""

    tokens_T: Tensor  # int64
    targets_T: Tensor  # int64
    temperatures_T: Tensor  # float32
    documents: Documents
    document_T: Tensor  # int64: index of the token's document
    lengths_D: Tensor  # int64: tokens of each document
    routed_TLK: Tensor | None = None  # int16: experts that the engine took

    @classmethod
    def build(cls, row: Row, device: torch.device) -> RowTensors:
        """Copies to `device`."""
        lengths_D = np.diff(row.cu_seqlens)
        return cls(
            tokens_T=tensor(row.tokens, torch.int64, device),
            targets_T=tensor(row.targets, torch.int64, device),
            temperatures_T=tensor(row.temperatures, torch.float32, device),
            documents=Documents.build(row.cu_seqlens, device),
            document_T=tensor(np.repeat(np.arange(len(lengths_D)), lengths_D), torch.int64, device),
            lengths_D=tensor(lengths_D, torch.int64, device),
            routed_TLK=None if row.routed_experts is None else tensor(row.routed_experts, torch.int16, device),
        )

    def logprobs(self, model: nn.Module, routing: Routing | None = None) -> tuple[Tensor, Tensor]:
        """(log p(target), entropy), float32[T] each, with the graph that led to them."""
        about = () if routing is None else (routing,)
        return model(self.tokens_T, self.documents, self.targets_T, self.temperatures_T, *about)


def tensor(column: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy on the device."""
    return torch.tensor(column, dtype=dtype, device=device)


def check_row(row: Row) -> None:
    """Raises ValueError, naming the column, unless all columns of a row have one length that cu_seqlens ends with."""
    length = len(row.tokens)
    columns = {name: getattr(row, name) for name in (*COLUMNS, "rewards", "routed_experts")}
    wrong = {name: len(column) for name, column in columns.items() if column is not None and len(column) != length}
    if wrong:
        raise ValueError(f"a row of {length} tokens has columns of other lengths: {wrong}")
    if not len(row.cu_seqlens) or row.cu_seqlens[-1] != length:
        raise ValueError(f"a row of {length} tokens has cu_seqlens {row.cu_seqlens}; they must end with {length}")
