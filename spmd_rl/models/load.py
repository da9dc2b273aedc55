"""From a folder's safetensors into a model's parameters, of which this process may hold just a part.

Every rank opens all files and reads only what its shards hold, so that no process ever has the whole model. Strict:
every parameter is written exactly once from tensors of their own names and shapes, or there is an error that names
them. It refuses to know how parameters came to be sharded. Invariant: values change in dtype only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from spmd_rl.models.conversion import Box, Piece, Wire, whole_piece
from spmd_rl.models.hf_folder import check_dtype, stored_tensors


@dataclass(frozen=True)
class _Place:
    """Where a checkpoint tensor belongs."""

    parameter: torch.Tensor
    piece: Piece


def check(model: nn.Module, wires: Sequence[Wire], folder: str, ignored: tuple[str, ...] = ()) -> None:
    """Compare the folder with the parameters by names, shapes and dtypes; reads no values, needs no memory for them.

    `ignored`: beginnings of names that the folder may hold and the model has no use for.
    Raises ValueError naming missing, unexpected or wrongly shaped tensors, dtypes that are no weights, a damaged file.
    """
    places = _places(model, wires)
    boxes: dict[int, dict[Box, str]] = {id(wire.parameter): {} for wire in wires}
    for name, stored in stored_tensors(folder):
        place = places.get(name)
        if place is None and name.startswith(ignored):
            continue
        if place is None:
            raise ValueError(f"model folder {folder!r}: unexpected tensor {name!r}, {_kind(model)} has none")
        shape = tuple(stored.get_shape())
        if shape != place.piece.shape:
            raise ValueError(
                f"model folder {folder!r}: {name!r} has shape {list(shape)}, config.json asks for "
                f"{list(place.piece.shape)}"
            )
        check_dtype(folder, name, stored)
        boxes[id(place.parameter)][place.piece.box] = name
    missing = [piece.name for wire in wires for piece in wire.pieces if not _is_there(boxes, wire, piece)]
    if missing:
        raise ValueError(f"model folder {folder!r} lacks {len(missing)} tensors: {', '.join(missing[:5])}")


@torch.no_grad()
def load(model: nn.Module, wires: Sequence[Wire], folder: str) -> None:
    """Fill the parameters, plain or sharded, from a folder that `check` approves of.

    Stacked ones may be stored in parts or as they are. Raises ValueError naming tied tensors that differ.
    """
    places = _places(model, wires)
    written: dict[int, dict[Box, str]] = {id(wire.parameter): {} for wire in wires}
    for name, stored in stored_tensors(folder):
        place = places.get(name)
        if place is None:
            continue  # the model has no use for it
        boxes = written[id(place.parameter)]
        _read(stored, place, folder, _there_before(boxes, place))
        boxes[place.piece.box] = name


def _places(model: nn.Module, wires: Sequence[Wire]) -> dict[str, _Place]:
    """By every name that a checkpoint may use: parts, whole stacks, and both names of tied weights."""
    places: dict[str, _Place] = {}
    for wire in wires:
        for piece in wire.pieces:
            places[piece.name] = _Place(wire.parameter, piece)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(name, _Place(parameter, whole_piece(name, tuple(parameter.shape))))
    return places


def _read(stored: Any, place: _Place, folder: str, other: str | None) -> None:
    """The part of a stored tensor that this process holds; with `other`, which was there before, only compared."""
    found = read_box(stored, place.piece, held_part(place.parameter), held_box(place.parameter))
    if found is None:
        return
    target, value = found
    value = value.to(target.device, target.dtype)
    if other is not None and not torch.equal(target, value):
        raise ValueError(f"model folder {folder!r}: {place.piece.name!r} is tied to {other!r} but differs")
    target.copy_(value)


def read_box(stored: Any, piece: Piece, local: torch.Tensor, held: Box) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What of a stored tensor belongs into `local`, which is the box `held` of the parameter; None: nothing.

    Returns (view of `local`, values as stored). Reads just these, by indexing `stored`.
    """
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, piece.box, strict=True)]
    if any(start >= end for start, end in common):
        return None
    inside = tuple(slice(s - start, e - start) for (s, e), (start, _) in zip(common, piece.box, strict=True))
    target = local[tuple(slice(s - start, e - start) for (s, e), (start, _) in zip(common, held, strict=True))]
    value = stored[inside[1:] if piece.one_of_stack else inside]
    return target, value.view(target.shape)


def held_box(parameter: torch.Tensor) -> Box:
    """Where what this process holds of a parameter lies in the whole."""
    if not isinstance(parameter, DTensor):
        return _whole(parameter)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple((o, o + length) for o, length in zip(offset, shape, strict=True))


def held_part(parameter: torch.Tensor) -> torch.Tensor:
    """What this process holds of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _there_before(boxes: dict[Box, str], place: _Place) -> str | None:
    """What has written some of the same values: the same tensor under another name, or a stack and one of its parts."""
    whole, mine = _whole(place.parameter), place.piece.box
    if mine == whole and boxes:
        return next(iter(boxes.values()))
    return boxes.get(mine) or boxes.get(whole)


def _is_there(boxes: dict[int, dict[Box, str]], wire: Wire, piece: Piece) -> bool:
    found = boxes[id(wire.parameter)]
    return piece.box in found or _whole(wire.parameter) in found


def _whole(parameter: torch.Tensor) -> Box:
    return tuple((0, length) for length in parameter.shape)


def _kind(model: nn.Module) -> str:
    return getattr(getattr(model, "family", None), "model_type", type(model).__name__)
