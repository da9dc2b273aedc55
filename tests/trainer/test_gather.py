"""Which parts of a checkpoint tensor lie where, and that putting them together gives the tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spmd_rl.models.conversion import EXPERTS, wires
from spmd_rl.trainer.gather import Gather, on_the_first
from spmd_rl.trainer.shards import Shards
from spmd_rl.world.buckets import Plan, WeightsError

EXPERT_COUNT, ROWS, WIDTH = 4, 6, 3


class Layer(nn.Module):
    """A plain weight, a bias, stacked experts, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.bias = nn.Parameter(torch.randn(5))
        self.register_buffer("selection", torch.randn(7))  # whole on every rank
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        self.mlp.experts.gate_up_proj = nn.Parameter(torch.randn(EXPERT_COUNT, ROWS, WIDTH))
        self.mlp.experts.down_proj = nn.Parameter(torch.randn(EXPERT_COUNT, WIDTH, ROWS))


def made_of(layer: nn.Module, held_PRD2: np.ndarray | None = None, copies: int = 1) -> Shards:
    """The shards of one rank, or what that rank knows where many hold these boxes."""
    shards = Shards(list(wires(layer, EXPERTS)), torch.float32, None, 1)
    if held_PRD2 is not None:
        shards._held_PRD2, shards.ranks = held_PRD2, held_PRD2.shape[1]
        shards._inside = shards.ranks // copies
    return shards


@st.composite
def held(draw: st.DrawFn, shards: Shards, ranks: int) -> np.ndarray:
    """Every parameter cut along its first dimension, as FSDP cuts; some ranks hold nothing."""
    whole_PD2 = shards._held_PRD2[:, 0]
    held_PRD2 = np.repeat(whole_PD2[:, None], ranks, axis=1)
    for p, wire in enumerate(wire for wire in shards.wires if wire.trained):
        cuts = sorted(draw(st.lists(st.integers(0, len(wire.parameter)), min_size=ranks - 1, max_size=ranks - 1)))
        held_PRD2[p, :, 0] = np.stack([[0, *cuts], [*cuts, len(wire.parameter)]], -1)
    return held_PRD2


@given(st.data(), st.integers(1, 5), st.integers(1, 2))
def test_parts_of_a_copy_make_every_tensor(data, inside, copies):
    layer = Layer()
    once = data.draw(held(made_of(layer), inside))
    shards = made_of(layer, np.concatenate([once] * copies, axis=1), copies)
    for copy in range(copies):
        ranks = shards.copy_of(copy * inside)
        for number, wire in enumerate(shards.wires):
            for piece in wire.pieces:
                made, times = torch.zeros(piece.shape), torch.zeros(piece.shape)
                for rank, part in shards.parts(piece.name, ranks, ranks[0]).items():
                    held_D2 = once[number, rank - ranks.start, : wire.parameter.ndim].tolist()
                    local = wire.parameter.detach()[tuple(slice(a, b) for a, b in held_D2)]
                    made[part.place] = local[part.held].view(made[part.place].shape)
                    times[part.place] += 1
                    assert part.numel == made[part.place].numel()
                    assert wire.trained or rank == ranks[0]
                assert torch.equal(made, piece.of(wire.parameter.detach())) and bool((times == 1).all())


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_what_one_rank_gives_another_expects(data, ranks, senders):
    layer = Layer()
    boxes = data.draw(held(made_of(layer), ranks))
    senders = min(senders, ranks)
    plan = Plan.build(made_of(layer).table(), 64, senders)
    gathers = []
    for rank in range(ranks):
        shards = made_of(layer, boxes)
        shards.rank = rank
        gathers.append(Gather(shards, plan))
    for rounds in zip(*(gather.rounds for gather in gathers), strict=True):
        for giver in range(ranks):
            for taker in range(ranks):
                given_, taken = rounds[giver].leaving.get(taker, []), rounds[taker].arriving.get(giver, [])
                assert given_ == taken
        for bucket in rounds[0].buckets:
            sender = rounds[bucket.sender]
            mine = [*sender.own, *(part for parts in sender.arriving.values() for part in parts)]
            assert sum(part.numel for part in mine) * 4 == sum(piece.nbytes for piece in bucket.pieces)


def test_one_rank_writes_what_it_has():
    layer = Layer()
    shards = made_of(layer)
    views = {name: torch.full(shape, torch.nan) for name, shape, _ in shards.table()}
    plan = Plan.build(shards.table(), 64, 1)
    assert list(Gather(shards, plan).write(views)) == list(views) == plan.names
    for wire in shards.wires:
        for piece in wire.pieces:
            assert torch.equal(views[piece.name], piece.of(wire.parameter))
    assert all(torch.equal(views[name], tensor) for name, tensor in on_the_first(shards))


def test_a_tensor_that_nobody_holds_completely_is_named():
    layer = Layer()
    boxes = np.repeat(made_of(layer)._held_PRD2, 2, axis=1)
    boxes[1, 0, 0] = boxes[1, 1, 0] = (0, 2)  # the bias: two of five, twice
    boxes[[0, 2, 3], 1, 0, 1] = 0  # of the rest the second rank holds nothing
    with pytest.raises(WeightsError, match="hold 4 of the 5 elements of 'bias'"):
        Gather(made_of(layer, boxes), Plan.build(made_of(layer).table(), 2**20, 2))


def test_tensors_are_cast_before_they_are_handed_out():
    shards = Shards(list(wires(Layer(), EXPERTS)), torch.bfloat16, None, 1)
    for (name, tensor), (other, shape, dtype) in zip(on_the_first(shards), shards.table(), strict=True):
        assert dtype == ("float32" if name == "selection" else "bfloat16")  # a buffer keeps its own
        assert (name, tuple(tensor.shape), str(tensor.dtype)) == (other, shape, f"torch.{dtype}")
