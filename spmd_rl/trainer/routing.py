"""What experts were given in an optimizer step, and what is done about it.

Rows bring routes to replay; documents get their share of the sequence-wise balance loss; after the step the counts of
all ranks become metrics and, where that is on, move each router's selection bias by a fixed amount (arXiv 2408.15664).
It refuses to know how a router works. Invariant: the bias is the same on all ranks and changes once per optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmd_rl.config.tree import MoeConfig
from spmd_rl.models.moe import MoE, Routing, SequenceBalance
from spmd_rl.rollouts.types import Row
from spmd_rl.trainer.row_tensors import STREAMS, RowTensors


class ExpertLoad:
    """The layers with experts of one model, over the ranks of `group` (None: one rank)."""

    def __init__(self, model: nn.Module, config: MoeConfig, group: dist.ProcessGroup | None, cp: int = 1) -> None:
        """cp: so many ranks of the group are given the same rows.

        Raises ValueError when `config` wants something of a model that has no experts of our own making.
        """
        self._layers: list[MoE] = getattr(model, "moe_layers", [])
        self._config, self._group, self._cp = config, group, cp
        if (config.bias_rate or config.sequence_coef) and not self._layers:
            raise ValueError(
                f"trainer.moe balances experts, and {type(model).__name__} has none that it could: leave "
                "trainer.moe.bias_rate and trainer.moe.sequence_coef at 0, or use trainer.model.impl = custom"
            )

    def reset(self, device: torch.device) -> None:
        """The selection bias begins at 0, where it is used."""
        if self._config.bias_rate:
            for layer in self._layers:
                layer.gate.bias_E = torch.zeros(len(layer.gate.weight), device=device)

    def routings(self, rows: Sequence[Row], tensors: Sequence[RowTensors]) -> list[Routing | None]:
        """What each row of one optimizer step brings along. Collective where the balance loss is on."""
        if not self._layers:
            return [None if t.routed_TLK is None else Routing(t.routed_TLK) for t in tensors]
        balances: list[SequenceBalance | None] = [None] * len(rows)
        if self._config.sequence_coef:
            counted = [_counted(row, t) for row, t in zip(rows, tensors, strict=True)]
            total = torch.stack([documents_D.sum() for documents_D in counted]).sum()
            if self._group is not None:
                dist.all_reduce(total, group=self._group)
                total /= self._cp
            weight = self._config.sequence_coef / total.clamp(min=1)
            balances = [
                SequenceBalance(t.document_T, t.lengths_D.float(), weight * documents_D)
                for t, documents_D in zip(tensors, counted, strict=True)
            ]
        return [
            Routing(t.routed_TLK, balance, counted=_of_the_batch(row))
            for row, t, balance in zip(rows, tensors, balances, strict=True)
        ]

    @torch.no_grad()
    def finish_step(self) -> dict[str, float]:
        """Metrics of what was routed since the last call, over all ranks; moves the bias. Collective."""
        if not self._layers:
            return {}
        counts_LN = torch.stack([layer.gate.take_counts() for layer in self._layers])
        if self._group is not None:
            dist.all_reduce(counts_LN, group=self._group)
        load_LE = counts_LN[:, :-2].double()
        mean_L1 = load_LE.mean(1, keepdim=True)
        if self._config.bias_rate:
            step_LE = self._config.bias_rate * (mean_L1 - load_LE).sign().float()
            for layer, step_E in zip(self._layers, step_LE, strict=True):
                assert layer.gate.bias_E is not None
                layer.gate.bias_E += step_E
        metrics = {"moe/max_violation": float((load_LE / mean_L1.clamp(min=1)).max()) - 1}
        replayed, agreed = counts_LN[:, -2:].sum(0).tolist()
        if replayed:
            metrics["moe/replay_agreement"] = agreed / replayed
        return metrics

    def state(self) -> list[tuple[str, Tensor]]:
        """The selection biases by name, for checkpoints; none where they are not used."""
        biases = [(layer.layer, layer.gate.bias_E) for layer in self._layers]
        return [(f"layers.{index}.bias", bias_E) for index, bias_E in biases if bias_E is not None]


def _of_the_batch(row: Row) -> bool:
    """False for a row that only takes part, because another rank has one more."""
    return any(column is not None and bool(column.any()) for column in (row.mask, row.ce_weight))


def _counted(row: Row, tensors: RowTensors) -> Tensor:
    """float32[D]: 1 for documents that the batch consists of, 0 for those that only fill a row."""
    weighed_T = torch.zeros(len(row.tokens), dtype=torch.float32, device=tensors.document_T.device)
    for name in STREAMS:
        column = getattr(row, name)
        if column is not None:
            weighed_T += torch.tensor(column != 0, dtype=torch.float32, device=weighed_T.device)
    sums_D = weighed_T.new_zeros(len(tensors.lengths_D)).index_add(0, tensors.document_T, weighed_T)
    return (sums_D > 0).float()
