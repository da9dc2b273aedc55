"""Which trainer rank holds what of every checkpoint tensor.

Every rank is asked once which box of each parameter it has; from then on any of them knows which parts of a tensor lie
where. Buffers, such as a router's selection bias, are whole on all ranks. It refuses to know how parameters came to be
sharded, and what is done with the parts (`gather.py`). Invariant: the parts of a tensor within one copy of the model
are disjoint and cover it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.models.conversion import Wire
from spmd_rl.models.load import held_box, held_part
from spmd_rl.world.buckets import WeightsError

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """What one rank holds of a checkpoint tensor."""

    name: str
    parameter: int  # its number
    held: Slices  # of the rank's shard
    place: Slices  # of the checkpoint tensor
    numel: int


class Shards:
    """A model's parameters, as far as this rank holds them, and who holds the rest.

    Args:
        wires: of all parameters, in the same order on all ranks.
        dtype: in which parameters are handed out; buffers keep their own.
        group: the trainer ranks; None for one.
        copies: how often the model is held (HSDP); ranks of one copy are neighbours.
    """

    def __init__(self, wires: Sequence[Wire], dtype: torch.dtype, group: dist.ProcessGroup | None, copies: int) -> None:
        """Collective."""
        self.wires, self.dtype, self.group = wires, dtype, group
        self.rank, self.ranks = (group.rank(), group.size()) if group else (0, 1)
        self.device = wires[0].parameter.device
        self._inside = self.ranks // copies
        self._pieces = {piece.name: (i, piece) for i, wire in enumerate(wires) for piece in wire.pieces}
        self._held_PRD2 = self._everybody_holds()

    def table(self) -> list[tuple[str, tuple[int, ...], str]]:
        """(Hugging Face name, whole shape, dtype such as "bfloat16") per tensor. No communication."""
        dtypes = [str(wire.dtype(self.dtype)).removeprefix("torch.") for wire in self.wires]
        pairs = zip(self.wires, dtypes, strict=True)
        return [(piece.name, piece.shape, dtype) for wire, dtype in pairs for piece in wire.pieces]

    def experts(self) -> dict[str, tuple[int, int]]:
        """By name, tensors that are one expert's: which one, and of how many. No communication."""
        return {
            piece.name: (piece.box[0][0], len(wire.parameter))
            for wire in self.wires
            for piece in wire.pieces
            if piece.one_of_stack
        }

    def local(self, parameter: int) -> Tensor:
        """This rank's shard, as it is now."""
        return held_part(self.wires[parameter].parameter.detach())

    def copy_of(self, rank: int) -> range:
        """The ranks that hold the model together with this one."""
        first = rank // self._inside * self._inside
        return range(first, first + self._inside)

    def parts(self, name: str, ranks: range, taker: int, only: int | None = None) -> dict[int, Part]:
        """By rank: the parts of a tensor that one copy's ranks hold, or that of one rank alone.

        What is whole on all of them is the taker's own. WeightsError when all together don't make the whole.
        """
        number, piece = self._pieces[name]
        if not self.wires[number].trained:
            ranks = range(taker, taker + 1)
        box_D2 = np.array(piece.box)
        held_RD2 = self._held_PRD2[number, ranks.start : ranks.stop, : len(box_D2)]
        start_RD = np.maximum(held_RD2[..., 0], box_D2[:, 0])
        end_RD = np.minimum(held_RD2[..., 1], box_D2[:, 1])
        numel_R = (end_RD - start_RD).clip(0).prod(-1)
        if numel_R.sum() != (whole := int(np.prod(piece.shape))):
            raise WeightsError(f"the trainer ranks hold {numel_R.sum()} of the {whole} elements of {name!r}")
        parts = {}
        for i in np.flatnonzero(numel_R).tolist():
            if only not in (None, ranks[i]):
                continue
            held = _slices(start_RD[i], end_RD[i], held_RD2[i, :, 0])
            place = _slices(start_RD[i], end_RD[i], box_D2[:, 0])[piece.one_of_stack :]
            parts[ranks[i]] = Part(name, number, held, place, int(numel_R[i]))
        return parts

    def _everybody_holds(self) -> np.ndarray:
        """int64[parameters, ranks, dimensions, from and to]: every rank's box of every parameter."""
        boxes = [held_box(wire.parameter) for wire in self.wires]
        dimensions = max(map(len, boxes))
        padded = [[*box, *[(0, 1)] * (dimensions - len(box))] for box in boxes]
        mine = torch.tensor(padded, dtype=torch.int64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        if self.group is None:
            everyone = [mine]
        else:
            dist.all_gather(everyone, mine, group=self.group)
        return torch.stack(everyone, 1).cpu().numpy()


def _slices(start_D: np.ndarray, end_D: np.ndarray, origin_D: np.ndarray) -> Slices:
    """The box from start to end, counted from origin."""
    return tuple(slice(a, b) for a, b in zip((start_D - origin_D).tolist(), (end_D - origin_D).tolist(), strict=True))
