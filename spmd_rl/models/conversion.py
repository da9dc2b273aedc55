"""Between a model's parameters and the tensors of Hugging Face's checkpoints, in both directions.

Most parameters are checkpoint tensors of the same name. A family lists what is stored otherwise: parameters that are
several tensors stacked on each other. From that list comes, for every parameter, which box of it is which tensor;
reading, exporting and the wire of weight sync all work on these boxes. It refuses to know about files, ranks and
modules' insides. Invariants: the boxes of a parameter are disjoint and cover it; no value is changed, so a round trip
is exact to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """A parameter, or a buffer that checkpoints hold, and the checkpoint tensors that it is made of."""

    name: str  # the module's own, as far as `rename` leaves it
    parameter: torch.Tensor
    pieces: tuple[Piece, ...]

    @property
    def trained(self) -> bool:
        """False for a buffer, which no optimizer changes."""
        return isinstance(self.parameter, nn.Parameter)

    def dtype(self, computed: torch.dtype) -> torch.dtype:
        """On the wire and in exports, where the model is computed in `computed`: a buffer keeps its own."""
        return computed if self.trained else self.parameter.dtype


def wires(
    model: nn.Module, stacked: Sequence[Stacked] = (), rename: Callable[[str], str] = lambda name: name
) -> Iterator[Wire]:
    """Every parameter once (tied weights under their first name), then persistent buffers, in a fixed order.

    `rename` makes Hugging Face's name, or the `ours` of an entry of `stacked`, of the module's own one.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = [(name, x) for name, x in model.state_dict(keep_vars=True).items() if name not in parameters]
    for name, parameter in (*model.named_parameters(), *buffers):
        name = rename(name)
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
