"""Between a model's parameters and the tensors of Hugging Face's checkpoints, in both directions.

Most parameters are checkpoint tensors of the same name. A family lists what is stored otherwise: parameters that are
several tensors stacked on each other. From that list comes, for every parameter, which box of it is which tensor;
reading, exporting and the wire of weight sync all work on these boxes. It refuses to know about files, ranks and
modules' insides. Invariants: the boxes of a parameter are disjoint and cover it; no value is changed, so a round trip
is exact to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Stacked:
    """A three-dimensional parameter: experts along the first dimension, equal parts of each along the second.

    `theirs` names the parts, in order, with `{e}` for the expert; both ends are what follows the common beginning.
    """

    ours: str
    theirs: tuple[str, ...]


EXPERTS = (
    Stacked("mlp.experts.gate_up_proj", ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight")),
    Stacked("mlp.experts.down_proj", ("mlp.experts.{e}.down_proj.weight",)),
)

Box = tuple[tuple[int, int], ...]  # by dimension: from, to


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor, and the box of a parameter that it is."""

    name: str  # Hugging Face's
    box: Box
    one_of_stack: bool = False  # the box's first dimension is 1 and the tensor lacks it

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint tensor."""
        lengths = tuple(end - start for start, end in self.box)
        return lengths[1:] if self.one_of_stack else lengths

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The checkpoint tensor as a view of the whole parameter."""
        part = whole[tuple(slice(start, end) for start, end in self.box)]
        return part[0] if self.one_of_stack else part


@dataclass(frozen=True)
class Wire:
    """A parameter and the checkpoint tensors that it is made of."""

    name: str  # the module's own
    parameter: nn.Parameter
    pieces: tuple[Piece, ...]


def wires(model: nn.Module, stacked: Sequence[Stacked], prefix: str = "") -> Iterator[Wire]:
    """Every parameter once (tied weights under their first name), in a fixed order; own names without `prefix`."""
    for name, parameter in model.named_parameters():
        name = name.removeprefix(prefix)
        yield Wire(name, parameter, pieces_of(name, tuple(parameter.shape), stacked))


def pieces_of(name: str, shape: tuple[int, ...], stacked: Sequence[Stacked]) -> tuple[Piece, ...]:
    """The checkpoint tensors of a parameter of this whole shape."""
    for entry in stacked:
        if name.endswith(entry.ours):
            return tuple(_parts(name.removesuffix(entry.ours), shape, entry.theirs))
    return (whole_piece(name, shape),)


def whole_piece(name: str, shape: tuple[int, ...]) -> Piece:
    """The parameter as one checkpoint tensor of its own name: also how transformers 5 saves stacked experts."""
    return Piece(name, tuple((0, length) for length in shape))


def _parts(beginning: str, shape: tuple[int, ...], theirs: tuple[str, ...]) -> Iterator[Piece]:
    experts, rows, columns = shape
    step = rows // len(theirs)
    for expert in range(experts):
        for i, pattern in enumerate(theirs):
            box = ((expert, expert + 1), (i * step, (i + 1) * step), (0, columns))
            yield Piece(beginning + pattern.format(e=expert), box, one_of_stack=True)
