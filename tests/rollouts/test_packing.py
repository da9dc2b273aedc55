"""Packing keeps every token, respects the row length, and gives every rank the same number of even rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.rollouts.packing import Packed, describe, lay_out, pack
from spmd_rl.rollouts.types import Row, TrainSample

SEQ_LEN = 32


def make_samples(lengths: list[int]) -> list[TrainSample]:
    """Samples whose tokens are all different, whose columns are functions of the token, with no weight at the start."""
    samples, first = [], 1
    for n in lengths:
        tokens = np.arange(first, first + n, dtype=np.int32)
        first += n
        sampled = np.arange(n) > 0
        samples.append(
            TrainSample(
                tokens=tokens,
                mask=(sampled & (tokens % 2 == 0)).astype(np.uint8),
                logprobs=(-0.25 * tokens).astype(np.float32),
                temperatures=(1 + tokens / 1024).astype(np.float32),
                pg_weight=(tokens * sampled).astype(np.float32),
                ce_weight=(-tokens * sampled / 2).astype(np.float32),
            )
        )
    return samples


def documents(row: Row) -> list[slice]:
    return [slice(a, b) for a, b in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True)]


STREAMS = {"pg_weight", "ce_weight", "kl_weight", "entropy_weight", "rewards", "hinted", "hinted_cu_seqlens"}


def columns(row: Row) -> dict[str, np.ndarray]:
    return {f.name: getattr(row, f.name) for f in fields(Row) if getattr(row, f.name) is not None}


def stream(row: Row, name: str) -> np.ndarray:
    column = getattr(row, name)
    return np.zeros(len(row.tokens), np.float32) if column is None else column


batches = st.tuples(st.lists(st.integers(1, SEQ_LEN), max_size=40), st.integers(1, 5))
costs = st.sampled_from([None, lambda n: n + n**2 / 8])


@settings(max_examples=100, deadline=None)
@given(batches, costs)
def test_every_sample_is_whole_and_in_exactly_one_place(batch: tuple[list[int], int], cost) -> None:
    lengths, ranks = batch
    samples = make_samples(lengths)
    packed = pack(samples, ranks, SEQ_LEN, cost)
    rows = [row for rank in packed.rows for row in rank]
    found = Counter(tuple(row.tokens[d].tolist()) for row in rows for d in documents(row))
    found.pop((0,), None)  # padding; real tokens start at 1
    assert found == Counter(tuple(s.tokens.tolist()) for s in samples)
    for row in rows:
        assert 1 <= len(row.tokens) <= SEQ_LEN
        assert row.cu_seqlens[0] == 0 and row.cu_seqlens[-1] == len(row.tokens)
        assert all(len(column) == len(row.tokens) for name, column in columns(row).items() if name != "cu_seqlens")
    assert len(packed.rows) == ranks
    assert {len(rank) for rank in packed.rows} == {packed.stats.micro_steps}
    assert packed.stats.micro_steps >= 1


@settings(max_examples=100, deadline=None)
@given(batches)
def test_columns_speak_of_the_next_token_of_the_same_document(batch: tuple[list[int], int]) -> None:
    lengths, ranks = batch
    for row in (row for rank in pack(make_samples(lengths), ranks, SEQ_LEN).rows for row in rank):
        for d in documents(row):
            tokens, targets = row.tokens[d], row.targets[d]
            assert targets[:-1].tolist() == tokens[1:].tolist()
            assert row.mask[d][:-1].tolist() == (targets[:-1] % 2 == 0).tolist()
            assert row.logprobs[d][:-1].tolist() == (-0.25 * targets[:-1]).tolist()
            assert row.temperatures[d][:-1].tolist() == (1 + targets[:-1] / 1024).astype(np.float32).tolist()
            weights = [stream(row, "pg_weight"), stream(row, "ce_weight")]
            assert weights[0][d][:-1].tolist() == targets[:-1].tolist()
            assert weights[1][d][:-1].tolist() == (-targets[:-1] / 2).tolist()
            last = [c[d][-1] for c in (row.targets, row.mask, row.logprobs, *weights)]
            assert last == [0] * 5
            assert row.temperatures[d][-1] == 1


@settings(max_examples=50, deadline=None)
@given(batches)
def test_weights_are_conserved(batch: tuple[list[int], int]) -> None:
    lengths, ranks = batch
    samples, packed = make_samples(lengths), pack(make_samples(lengths), ranks, SEQ_LEN)
    for name in ("mask", "pg_weight", "ce_weight"):
        before = sum(int((2 * getattr(s, name)[1:].astype(np.int64)).sum()) for s in samples)
        after = sum(int((2 * stream(row, name).astype(np.int64)).sum()) for rank in packed.rows for row in rank)
        if name == "mask":
            before = sum(2 * int(s.mask.sum()) for s in samples)
        assert before == after


@settings(max_examples=50, deadline=None)
@given(batches, costs)
def test_the_layout_is_a_function_of_the_lengths(batch: tuple[list[int], int], cost) -> None:
    lengths, ranks = np.asarray(batch[0], dtype=np.int64), batch[1]
    layout = lay_out(lengths, ranks, SEQ_LEN, cost)
    assert layout == lay_out(lengths.copy(), ranks, SEQ_LEN, cost)
    again = pack(make_samples(batch[0]), ranks, SEQ_LEN, cost)
    assert shapes(again) == shapes(pack(make_samples(batch[0]), ranks, SEQ_LEN, cost))


def shapes(packed: Packed) -> list[list[list[int]]]:
    return [[row.cu_seqlens.tolist() for row in rank] for rank in packed.rows]


@settings(max_examples=50, deadline=None)
@given(batches)
def test_no_more_micro_steps_than_first_fit_needs(batch: tuple[list[int], int]) -> None:
    """First fit decreasing is a bound that the search, with its best-fit fallback, must never exceed by much."""
    lengths, ranks = sorted(batch[0], reverse=True), batch[1]
    bins: list[int] = []
    for n in lengths:
        place = next((i for i, used in enumerate(bins) if used + n <= SEQ_LEN), None)
        if place is None:
            bins.append(n)
        else:
            bins[place] += n
    first_fit = max(1, -(-len(bins) // ranks))
    layout = lay_out(np.asarray(batch[0], dtype=np.int64), ranks, SEQ_LEN)
    assert len(layout[0]) <= first_fit + 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("mean", "sigma"), [(1024, 0.5), (1024, 1.5), (2048, 1.0), (4096, 0.3), (4096, 0.5), (4096, 1.0)]
)
def test_loads_are_even_at_64_ranks(mean: int, sigma: float, seed: int) -> None:
    draw = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, 64 * 8 * 32768 // mean)
    lengths = draw.clip(1, 32768).astype(np.int64)
    stats = describe(lay_out(lengths, 64, 32768), lengths, 32768)
    assert stats.rank_imbalance <= 1.0018
    assert stats.micro_imbalance <= 1.02


def test_one_giant_does_not_spoil_the_other_micro_steps() -> None:
    """A sample far above the mean row raises its own micro-step, in which the other rows are then as long."""
    lengths = np.asarray([1000] + [10] * 700, dtype=np.int64)
    layout = lay_out(lengths, 4, 1000)
    stats = describe(layout, lengths, 1000)
    assert stats.micro_steps == 2
    assert stats.micro_imbalance <= 1.02
    assert stats.rank_imbalance <= 1.02


def test_the_cost_hook_balances_what_it_measures() -> None:
    lengths = np.asarray([400] * 6 + [10] * 900, dtype=np.int64)

    def cost(n: np.ndarray) -> np.ndarray:
        return n + n**2 / 1000

    by_cost = describe(lay_out(lengths, 8, 4096, cost), lengths, 4096, cost)
    by_tokens = describe(lay_out(lengths, 8, 4096), lengths, 4096, cost)
    assert by_cost.micro_imbalance <= 1.02 < by_tokens.micro_imbalance


@pytest.mark.parametrize(
    ("lengths", "ranks", "seq_len"),
    [
        ([3, 3, 2, 2, 2], 2, 6),  # longest first makes 3+2+2 and 3+2; a swap repairs it: 3+3 and 2+2+2
        ([6, 5, 5, 4], 2, 10),
        ([7, 7, 6, 6, 5, 5, 4, 4, 4], 3, 16),
    ],
)
def test_full_rows_are_found(lengths: list[int], ranks: int, seq_len: int) -> None:
    assert sum(lengths) == ranks * seq_len
    assert len(lay_out(np.asarray(lengths, dtype=np.int64), ranks, seq_len)[0]) == 1


def test_best_fit_takes_over_where_even_rows_do_not_fit() -> None:
    lengths = np.asarray([8, 4, 4, 3, 3, 2], dtype=np.int64)  # 8+4 and 4+3+3+2: no single swap leads there
    assert len(lay_out(lengths, 2, 12)[0]) == 1


def test_too_few_samples_are_padded() -> None:
    packed = pack(make_samples([5]), 3, SEQ_LEN)
    padding = [rank[0] for rank in packed.rows if rank[0].tokens.tolist() == [0]]
    assert len(padding) == 2
    for row in padding:
        assert row.cu_seqlens.tolist() == [0, 1]
        assert not row.mask.any() and columns(row).keys().isdisjoint(STREAMS)
        assert row.temperatures.tolist() == [1]
    assert pack([], 2, SEQ_LEN).stats.micro_steps == 1


def test_dtypes() -> None:
    row = pack(make_samples([5, 3]), 1, SEQ_LEN).rows[0][0]
    names = {name: column.dtype.name for name, column in columns(row).items()}
    integers = {"tokens", "targets", "cu_seqlens"}
    assert names == {n: "int32" if n in integers else "uint8" if n == "mask" else "float32" for n in names}


def test_refused_samples_are_named() -> None:
    with pytest.raises(ValueError, match=r"sample 1 of 2 has 33 tokens; .*raise seq_len"):
        pack(make_samples([4, 33]), 2, SEQ_LEN)
    with pytest.raises(ValueError, match="sample 0 of 1 has 0 tokens"):
        pack(make_samples([0]), 2, SEQ_LEN)
    (sample,) = make_samples([3])
    sample.ce_weight[0] = 1
    with pytest.raises(ValueError, match="sample 0 of 1 weighs its first token"):
        pack([sample], 1, SEQ_LEN)


def test_a_number_stands_for_itself_on_sampled_tokens() -> None:
    samples = [replace(s, pg_weight=0.5, ce_weight=0.0, kl_weight=0.25) for s in make_samples([5, 4])]
    arrays = [replace(s, pg_weight=0.5 * s.mask, kl_weight=0.25 * s.mask.astype(np.float32)) for s in samples]
    row, same = (pack(made, 1, SEQ_LEN).rows[0][0] for made in (samples, arrays))
    assert row.pg_weight.tolist() == same.pg_weight.tolist() and row.kl_weight.tolist() == same.kl_weight.tolist()
    assert row.ce_weight is None and row.entropy_weight is None


def test_a_reward_arrives_with_the_last_sampled_token() -> None:
    samples = [replace(s, reward=2.0 + i) for i, s in enumerate(make_samples([6, 5]))]
    row = pack(samples, 1, SEQ_LEN).rows[0][0]
    for d in documents(row):
        last = np.flatnonzero(row.mask[d])[-1]
        assert np.flatnonzero(row.rewards[d]).tolist() == [last]
    assert sorted(row.rewards[row.rewards != 0].tolist()) == [2.0, 3.0]


def test_hinted_documents_hold_the_hint_and_everything_from_the_first_sampled_token_on() -> None:
    samples = make_samples([6, 5])
    hinted = replace(samples[0], hint=np.asarray([90, 91, 92], np.int32))
    row = pack([hinted, samples[1]], 1, SEQ_LEN).rows[0][0]
    parts = np.split(row.hinted, row.hinted_cu_seqlens[1:-1])
    first = int(hinted.mask.argmax())
    expected = {tuple([90, 91, 92, *hinted.tokens[first:]]), tuple(samples[1].tokens)}
    assert {tuple(part.tolist()) for part in parts} == expected
    assert [len(p) for p in parts] == np.diff(row.hinted_cu_seqlens).tolist()
