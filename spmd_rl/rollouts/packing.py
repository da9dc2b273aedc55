"""Packing: training samples → rows of at most `seq_len` tokens for every data-parallel rank and micro-step.

Two things are asked of a layout. Few micro-steps; and equal loads, because ranks meet in collectives at every
micro-step and wait for the heaviest row there. So rows are *made* equal (longest processing time first), rows of
similar load become one micro-step, are evened out there, and the heaviest goes to the rank that has least so far.

It refuses to know what the weights mean, and about torch and parallel layouts: context parallelism cuts rows later.

Invariants: every token of every sample is in exactly one place; a document is one sample and never cut; rows hold
≤ `seq_len` tokens; all ranks have the same number of rows; the layout depends on the lengths alone.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spmd_rl.rollouts.routes import row_table
from spmd_rl.rollouts.types import Row, TrainSample, Weight

Cost = Callable[[np.ndarray], np.ndarray]  # lengths int64[n] → load of each, growing with the length
Layout = list[list[list[int]]]  # [rank][micro-step] → the samples' indices, ascending
SWAPS_TRIED = 2_000_000  # bounds the time of one evening out to some 20 ms


@dataclass(frozen=True)
class PackStats:
    """How good a layout is. Loads are tokens, or what `cost` makes of them."""

    micro_steps: int
    fill: float  # tokens / (ranks × micro_steps × seq_len)
    rank_imbalance: float  # max/mean over ranks of a rank's total load
    micro_imbalance: float  # max/mean over ranks of a row's load, in the worst micro-step
    idle: float  # share of all load that could have been done while ranks wait for the heaviest row of a micro-step


@dataclass(frozen=True)
class Packed:
    """One batch, laid out. `rows[rank][micro]`; a rank with nothing to do has rows of one token without weight."""

    rows: list[list[Row]]
    stats: PackStats


def pack(samples: Sequence[TrainSample], ranks: int, seq_len: int, cost: Cost | None = None) -> Packed:
    """Lay `samples` out for `ranks` data-parallel ranks.

    `cost` replaces tokens as the measure of load, e.g. `lambda n: n + n**2 / 4096` for attention.
    Raises ValueError for a sample that is empty, longer than `seq_len`, or that weighs its first token (which
    nothing predicts).
    """
    lengths = np.asarray([len(s.tokens) for s in samples], dtype=np.int64)
    for i in np.flatnonzero((lengths > seq_len) | (lengths == 0)):
        raise ValueError(
            f"sample {i} of {len(samples)} has {lengths[i]} tokens; rows hold 1 to seq_len = {seq_len}: "
            "raise seq_len, or bound the rollouts (max_tokens, turns)"
        )
    for i, sample in enumerate(samples):
        if any(_at_first(sample, w) for w in (sample.pg_weight, sample.ce_weight, sample.kl_weight)):
            raise ValueError(f"sample {i} of {len(samples)} weighs its first token, which nothing predicts")
    layout = lay_out(lengths, ranks, seq_len, cost)
    rows = [[_row([samples[i] for i in row]) if row else _padding() for row in micro_rows] for micro_rows in layout]
    return Packed(rows, describe(layout, lengths, seq_len, cost))


def _at_first(sample: TrainSample, weight: Weight) -> float:
    """The weight of the sample's first token."""
    return float(weight[0]) if isinstance(weight, np.ndarray) else weight * float(sample.mask[0])


def lay_out(lengths: np.ndarray, ranks: int, seq_len: int, cost: Cost | None = None) -> Layout:
    """Indices of samples for every rank and micro-step, from lengths int64[n] (each 1..seq_len)."""
    loads = lengths if cost is None else np.asarray(cost(lengths))
    at_least = -(-int(lengths.sum()) // (ranks * seq_len))
    pairless = -(-int((lengths > seq_len // 2).sum()) // ranks) if len(lengths) else 0  # no two of these share a row
    micro_steps = max(1, at_least, pairless)
    while True:
        bins = _fit(_longest_first(lengths, loads, ranks, micro_steps, seq_len), lengths, seq_len)
        if bins is None:
            bins = _best_fit(lengths, ranks * micro_steps, seq_len)
        if bins is not None:
            return _assign(bins, lengths, loads, ranks, seq_len)
        micro_steps += 1


def describe(layout: Layout, lengths: np.ndarray, seq_len: int, cost: Cost | None = None) -> PackStats:
    """The statistics of a layout. An empty row counts as one token, which it will hold."""
    row_tokens = np.asarray([[max(1, int(lengths[row].sum())) for row in micro_rows] for micro_rows in layout])
    loads = lengths if cost is None else np.asarray(cost(lengths))
    load = row_tokens if cost is None else np.asarray([[loads[row].sum() for row in rows] for rows in layout])
    load = np.maximum(load, 1e-30)  # [ranks, micro_steps]; no 0 / 0 where all rows are empty
    ranks, micro_steps = load.shape
    return PackStats(
        micro_steps=micro_steps,
        fill=float(lengths.sum() / (ranks * micro_steps * seq_len)),
        rank_imbalance=float(load.sum(1).max() / load.sum(1).mean()),
        micro_imbalance=float((load.max(0) / load.mean(0)).max()),
        idle=float(1 - load.mean(0).sum() / load.max(0).sum()),
    )


def _longest_first(
    lengths: np.ndarray, loads: np.ndarray, ranks: int, micro_steps: int, seq_len: int
) -> list[list[int]]:
    """Longest processing time first (Graham 1969): the longest sample left goes to the bin that lacks most load.

    What a bin lacks is counted from the level of its micro-step (`_levels`). A bin too full for the sample at hand
    waits until samples are short enough for it, so the whole takes O(n log bins). A sample that fits nowhere goes
    where most room is: such bins are too long, see `_fit`.
    """
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths, sorted_loads = lengths[order].tolist(), loads[order].tolist()
    levels = _levels(sorted_loads, ranks, micro_steps)
    bins: list[list[int]] = [[] for _ in range(ranks * micro_steps)]
    room = [seq_len] * len(bins)
    by_lack = [(-levels[b // ranks], b) for b in range(len(bins))]  # ascending, so a heap already
    waiting: list[tuple[int, float, int]] = []  # (-room, -lack, bin)
    for i, length, load in zip(order.tolist(), sorted_lengths, sorted_loads, strict=True):
        while waiting and -waiting[0][0] >= length:
            _, lack, b = heapq.heappop(waiting)
            heapq.heappush(by_lack, (lack, b))
        while by_lack and room[by_lack[0][1]] < length:
            lack, b = heapq.heappop(by_lack)
            heapq.heappush(waiting, (-room[b], lack, b))
        if not by_lack:
            _, lack, b = heapq.heappop(waiting)
            by_lack.append((lack, b))
        lack, b = by_lack[0]
        heapq.heapreplace(by_lack, (lack + load, b))
        room[b] -= length
        bins[b].append(i)
    return bins


def _levels(descending: list[float], ranks: int, micro_steps: int) -> list[float]:
    """The load that rows of each micro-step should have: equal, but no less than the longest sample dictates.

    Where a few samples alone outweigh the mean row, all rows of their micro-step are raised to that level and the
    other micro-steps are lower, so that nobody waits for the few.
    """
    levels: list[float] = []
    left = float(sum(descending))
    for micro in range(micro_steps):
        longest = descending[micro * ranks] if micro * ranks < len(descending) else 0.0
        levels.append(max(longest, left / (ranks * (micro_steps - micro))))
        left = max(0.0, left - levels[-1] * ranks)
    return levels


def _fit(bins: list[list[int]], lengths: np.ndarray, seq_len: int) -> list[list[int]] | None:
    """Let bins that are too long trade samples with the shortest ones until all fit; None when that does not help."""
    totals = np.asarray([lengths[b].sum() for b in bins])
    too_long = int((totals > seq_len).sum())
    if too_long == 0:
        return bins
    longest_first = np.argsort(-totals, kind="stable")
    picked = np.unique(np.concatenate([longest_first[:too_long], longest_first[-max(too_long, 32) :]])).tolist()
    traded = _even_out([bins[b] for b in picked], lengths, lengths, target=seq_len)
    if any(lengths[b].sum() > seq_len for b in traded):
        return None
    for place, b in zip(picked, traded, strict=True):
        bins[place] = b
    return bins


def _best_fit(lengths: np.ndarray, count: int, seq_len: int) -> list[list[int]] | None:
    """Best fit decreasing: each sample into the fullest bin that still takes it. Tighter, less even; None = no fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [(seq_len, b) for b in range(count)]
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        place = bisect_left(room, (length, -1))
        if place == count:
            return None
        left, b = room.pop(place)
        insort(room, (left - length, b))
        bins[b].append(i)
    return bins


def _assign(bins: list[list[int]], lengths: np.ndarray, loads: np.ndarray, ranks: int, seq_len: int) -> Layout:
    """Cut rows, heaviest first, into micro-steps of `ranks` neighbours; the heaviest goes to the least loaded rank."""
    by_load = sorted(bins, key=lambda row: -float(loads[row].sum()))
    totals = np.zeros(ranks)
    layout: Layout = [[] for _ in range(ranks)]
    for start in range(0, len(bins), ranks):
        rows = by_load[start : start + ranks]
        mean = sum(float(loads[row].sum()) for row in rows) / ranks
        rows = _even_out(rows, lengths, loads, target=1.01 * mean, seq_len=seq_len)
        row_loads = np.asarray([loads[row].sum() for row in rows], dtype=np.float64)
        heaviest_first, least_first = np.argsort(-row_loads, kind="stable"), np.argsort(totals, kind="stable")
        for rank, row in zip(least_first.tolist(), heaviest_first.tolist(), strict=True):
            layout[rank].append(sorted(rows[row]))
        totals[least_first] += row_loads[heaviest_first]
    return layout


def _even_out(
    rows: list[list[int]], lengths: np.ndarray, loads: np.ndarray, target: float, seq_len: float = np.inf
) -> list[list[int]]:
    """Steepest descent on the heaviest row: it gives one sample away, or swaps it for a lighter one of another row.

    Ends when the heaviest row weighs ≤ `target`, when no move makes it lighter, or when about SWAPS_TRIED swaps were
    looked at. No row that takes part in a move ends up longer than `seq_len`.
    """
    count = len(rows)
    item = np.asarray([i for row in rows for i in row], dtype=np.int64)
    # Behind the items stands one "nothing" per row: swapping with it is giving away.
    owner = np.concatenate([np.repeat(np.arange(count), [len(row) for row in rows]), np.arange(count)])
    load, length = (np.concatenate([column[item], np.zeros(count)]) for column in (loads, lengths))
    row_load, row_length = (np.bincount(owner, weights=column, minlength=count) for column in (load, length))
    for _ in range(SWAPS_TRIED * count // max(1, len(item) ** 2)):
        heaviest = int(row_load.argmax())
        if row_load[heaviest] <= target:
            break
        mine = np.flatnonzero(owner[: len(item)] == heaviest)
        load_moved = load[mine][:, None] - load  # [mine, all]
        length_moved = length[mine][:, None] - length
        heavier = np.maximum(row_load[heaviest] - load_moved, row_load[owner] + load_moved)
        longer = np.maximum(row_length[heaviest] - length_moved, row_length[owner] + length_moved)
        heavier[(longer > seq_len) | (owner == heaviest)] = np.inf
        give, take = np.unravel_index(heavier.argmin(), heavier.shape)
        if heavier[give, take] >= row_load[heaviest]:
            break
        other = owner[take]
        for totals, moved in ((row_load, load_moved[give, take]), (row_length, length_moved[give, take])):
            totals[heaviest] -= moved
            totals[other] += moved
        owner[mine[give]] = other
        if take < len(item):
            owner[take] = heaviest
    return [item[owner[: len(item)] == row].tolist() for row in range(count)]


def _row(documents: list[TrainSample]) -> Row:
    """One row of whole documents, targets shifted: column values at t speak of the token at t + 1."""
    cu_seqlens = np.cumsum([0, *(len(d.tokens) for d in documents)], dtype=np.int32)
    tokens = np.concatenate([d.tokens for d in documents]).astype(np.int32, copy=False)
    targets = np.empty_like(tokens)
    targets[:-1] = tokens[1:]
    targets[cu_seqlens[1:] - 1] = 0
    hints = [d for d in documents if d.hint is not None]
    hinted = [_hinted(d) for d in documents] if hints else []
    return Row(
        tokens=tokens,
        targets=targets,
        mask=_shifted([d.mask for d in documents], cu_seqlens, np.uint8),
        logprobs=_shifted([d.logprobs for d in documents], cu_seqlens, np.float32),
        temperatures=_shifted([d.temperatures for d in documents], cu_seqlens, np.float32, at_ends=1),
        cu_seqlens=cu_seqlens,
        pg_weight=_stream([d.pg_weight for d in documents], documents, cu_seqlens),
        ce_weight=_stream([d.ce_weight for d in documents], documents, cu_seqlens),
        kl_weight=_stream([d.kl_weight for d in documents], documents, cu_seqlens),
        entropy_weight=_stream([d.entropy_weight for d in documents], documents, cu_seqlens),
        rewards=_stream([_at_last(d) for d in documents], documents, cu_seqlens),
        hinted=np.concatenate(hinted).astype(np.int32, copy=False) if hints else None,
        hinted_cu_seqlens=np.cumsum([0, *map(len, hinted)], dtype=np.int32) if hints else None,
        routes=row_table(documents, cu_seqlens[:-1].tolist()),
    )


def _shifted(columns: list[np.ndarray], cu_seqlens: np.ndarray, dtype: type, at_ends: float = 0) -> np.ndarray:
    """The columns end to end, each moved one place to the left; what is pushed in behind them is `at_ends`."""
    row = np.empty(cu_seqlens[-1], dtype)
    for column, start, end in zip(columns, cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        row[start : end - 1] = column[1:]
    row[cu_seqlens[1:] - 1] = at_ends
    return row


def _stream(weights: list[Weight], documents: list[TrainSample], cu_seqlens: np.ndarray) -> np.ndarray | None:
    """Weights as a column; None when all are 0. A number stands for number × mask."""
    if not any(w.any() if isinstance(w, np.ndarray) else w for w in weights):
        return None
    row = np.zeros(cu_seqlens[-1], np.float32)
    for weight, document, start, end in zip(
        weights, documents, cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True
    ):
        if isinstance(weight, np.ndarray):
            row[start : end - 1] = weight[1:]
        elif weight:
            np.multiply(document.mask[1:], np.float32(weight), out=row[start : end - 1], casting="unsafe")
    return row


def _at_last(document: TrainSample) -> Weight:
    """The document's reward as a stream: on its last sampled token, 0 elsewhere."""
    if not document.reward:
        return 0.0
    sampled = np.flatnonzero(document.mask)
    stream = np.zeros(len(document.tokens), np.float32)
    stream[sampled[-1:]] = document.reward
    return stream


def _hinted(document: TrainSample) -> np.ndarray:
    """The document with its hint in place of everything before the first sampled token."""
    first = int(document.mask.argmax())
    hint = document.tokens[:first] if document.hint is None else document.hint
    return np.concatenate([hint, document.tokens[first:]])


def _padding() -> Row:
    """A row for a rank that has nothing to do but must take part: one document, one token 0, no weight."""
    zero = np.zeros(1, np.float32)
    return _row([TrainSample(np.zeros(1, np.int32), np.zeros(1, np.uint8), zero, zero + 1)])
