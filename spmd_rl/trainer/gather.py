"""Checkpoint tensors out of their shards: whole, bucket by bucket, on the ranks that want them and on no other.

Who sends a bucket gets every part of it from the ranks that hold one, in one uneven all-to-all in which all senders get
their next bucket at once. So a bucket is whole on one rank only, no rank ever has the whole model, and every byte
crosses the trainer's links at most once. Where the model is held several times, senders ask their own copy.

What it refuses to know: where buckets go from there. Invariants: values change in dtype only; all trainer ranks take
the same rounds in the same order, also those that give or get nothing in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.trainer.shards import Part, Shards
from spmd_rl.world.buckets import Bucket, Plan, views

BUCKET_BYTES = 64 * 2**20  # where no weight sync says otherwise


@dataclass
class Round:
    """One bucket for each sender, as far as this rank takes part; parts by the rank at the other end."""

    buckets: tuple[Bucket, ...]
    own: list[Part] = field(default_factory=list)  # held and wanted here
    leaving: dict[int, list[Part]] = field(default_factory=dict)
    arriving: dict[int, list[Part]] = field(default_factory=dict)


class Gather:
    """Brings the buckets of a plan to their senders, as often as asked."""

    def __init__(self, shards: Shards, plan: Plan) -> None:
        """No communication. WeightsError when the ranks do not hold all of a tensor."""
        self.shards = shards
        by_sender: dict[int, list[Bucket]] = {}
        for bucket in plan.buckets:
            by_sender.setdefault(bucket.sender, []).append(bucket)
        self.rounds = [
            self._round(tuple(bucket for bucket in nth if bucket is not None))
            for nth in zip_longest(*by_sender.values())
        ]

    @classmethod
    def to(cls, shards: Shards, senders: int) -> Gather:
        """All tensors, to the first ranks in turns, where there is no plan of weight sync."""
        return cls(shards, Plan.build(shards.table(), BUCKET_BYTES, senders))

    @torch.no_grad()
    def write(self, wanted: Mapping[str, Tensor]) -> Iterator[str]:
        """Fills the tensors that this rank sends; yields each name when it is complete. Collective."""
        for round_ in self.rounds:
            yield from self.one(round_, wanted)

    @torch.no_grad()
    def one(self, round_: Round, wanted: Mapping[str, Tensor]) -> list[str]:
        """One round: fills those tensors of it that this rank sends; their names. Collective."""
        shards = self.shards
        leaving, given = self._in_order(round_.leaving)
        arriving, got = self._in_order(round_.arriving)
        out, into = (torch.empty(sum(n), dtype=shards.dtype, device=shards.device) for n in (given, got))
        for part, flat in zip(leaving, out.split([part.numel for part in leaving]), strict=True):
            local = shards.local(part.parameter)[part.held]
            flat.view(local.shape).copy_(local)  # cast before it travels: half the bytes
        for part in round_.own:
            view = wanted[part.name][part.place]
            view.copy_(shards.local(part.parameter)[part.held].view(view.shape))
        if shards.group is not None:
            size = shards.dtype.itemsize  # as bytes, which every back end takes
            splits = ([n * size for n in got], [n * size for n in given])
            dist.all_to_all_single(into.view(torch.uint8), out.view(torch.uint8), *splits, group=shards.group)
        for part, flat in zip(arriving, into.split([part.numel for part in arriving]), strict=True):
            view = wanted[part.name][part.place]
            view.copy_(flat.view(view.shape))
        return [piece.name for b in round_.buckets if b.sender == shards.rank for piece in b.pieces]

    def _in_order(self, by_rank: Mapping[int, list[Part]]) -> tuple[list[Part], list[int]]:
        """All parts by rank, and how many elements are each rank's."""
        lists = [by_rank.get(rank, []) for rank in range(self.shards.ranks)]
        return [part for parts in lists for part in parts], [sum(part.numel for part in parts) for parts in lists]

    def _round(self, buckets: tuple[Bucket, ...]) -> Round:
        round_, me = Round(buckets), self.shards.rank
        for bucket in buckets:
            sender, holders = bucket.sender, self.shards.copy_of(bucket.sender)
            for name in (piece.name for piece in bucket.pieces if me in holders):
                parts = self.shards.parts(name, holders, sender, only=None if sender == me else me)
                for holder, part in parts.items():
                    if holder == sender == me:
                        round_.own.append(part)
                    elif holder == me:
                        round_.leaving.setdefault(sender, []).append(part)
                    elif sender == me:
                        round_.arriving.setdefault(holder, []).append(part)
        return round_


@torch.no_grad()
def everywhere(gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) on every rank, a bucket at a time, in the order of the shards' table. Collective.

    gather: to all ranks.

    One rank yields its parameters themselves where the dtype is theirs: copy what must outlive their next change, and
    never write to it.
    """
    shards = gather.shards
    if shards.group is None:
        for i, wire in enumerate(shards.wires):
            whole = shards.local(i).to(wire.dtype(shards.dtype))
            yield from ((piece.name, piece.of(whole)) for piece in wire.pieces)
        return
    for round_ in gather.rounds:
        buffers = {b.index: b.allocate(shards.device) for b in round_.buckets if b.sender == shards.rank}
        gather.one(round_, views(round_.buckets, buffers))
        for bucket in round_.buckets:
            buffer = buffers.pop(bucket.index, None)
            buffer = bucket.allocate(shards.device) if buffer is None else buffer
            dist.broadcast(buffer, group_src=bucket.sender, group=shards.group)
            yield from ((piece.name, piece.view(buffer)) for piece in bucket.pieces)


@torch.no_grad()
def on_the_first(shards: Shards) -> Iterator[tuple[str, Tensor]]:
    """As `everywhere`, but for the first rank alone: the others give their parts and get nothing. Collective."""
    gather = Gather.to(shards, 1)
    for round_ in gather.rounds:
        buffers = {b.index: b.allocate(shards.device) for b in round_.buckets if b.sender == shards.rank}
        wanted = views(round_.buckets, buffers)
        gather.one(round_, wanted)
        yield from wanted.items()
