"""The bucket plan puts every tensor in one place, and no damage on the way goes unseen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spmd_rl.world.buckets import (
    ALIGN_BYTES,
    TRAILER_BYTES,
    Bucket,
    Plan,
    WeightsError,
    checksum,
    device_checksum,
    expert_taker,
)

CPU = torch.device("cpu")
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
Table = list[tuple[str, tuple[int, ...], str]]


@st.composite
def tables(draw: st.DrawFn, min_size: int = 1) -> Table:
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=min_size, max_size=12))
    dtypes = draw(st.lists(st.sampled_from(sorted(SIZES)), min_size=len(shapes), max_size=len(shapes)))
    return [(f"layer.{i}.weight", shape, dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]


def fill(bucket: Bucket, seed: int = 0) -> torch.Tensor:
    """The bucket's buffer with random numbers in every tensor, not sealed."""
    buffer, generator = bucket.allocate(CPU), torch.Generator().manual_seed(seed)
    for piece in bucket.pieces:
        piece.view(buffer).copy_(torch.randn(piece.shape, generator=generator))
    return buffer


def sealed(table: Table, version: int, seed: int = 0) -> tuple[Bucket, torch.Tensor]:
    """All of a table in one bucket, ready to travel."""
    (bucket,) = Plan.build(table, 2**30, 1).buckets
    buffer = fill(bucket, seed)
    bucket.seal(buffer, version)
    bucket.verify(buffer, version)
    return bucket, buffer


def flip(buffer: torch.Tensor, bit: int) -> torch.Tensor:
    """A copy with one bit changed."""
    damaged = buffer.clone()
    damaged[bit // 8] ^= 1 << (bit % 8)
    return damaged


@given(tables(), st.integers(1, 3000), st.integers(1, 5), st.integers(1, 3), st.data())
@settings(max_examples=100, deadline=None)
def test_a_rank_takes_its_own_tensors_and_those_of_all(table, bucket_bytes, senders, ranks, data):
    """In checkpoint order, so that layers are complete soon."""
    chosen = data.draw(st.lists(st.integers(-1, ranks - 1), min_size=len(table), max_size=len(table)))
    takers = {name: taker for (name, _, _), taker in zip(table, chosen, strict=True) if taker >= 0}
    plan = Plan.build(table, bucket_bytes, senders, takers)
    assert sorted(plan.names) == sorted(name for name, _, _ in table)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    for rank in range(ranks):
        mine = Plan.decode(plan.encode()).of_taker(rank)
        wanted = [name for name, _, _ in table if takers.get(name, rank) == rank]
        assert sorted(mine.names) == sorted(wanted)
        for alone in (True, False):
            assert [n for n in mine.names if (n in takers) == alone] == [n for n in wanted if (n in takers) == alone]


@given(st.integers(1, 100), st.integers(1, 20))
def test_experts_are_taken_in_order_and_evenly(experts, ranks):
    taken = [expert_taker(expert, experts, ranks) for expert in range(experts)]
    counts = [taken.count(rank) for rank in range(ranks)]
    assert taken == sorted(taken)
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


@given(tables(), st.integers(1, 3000), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_every_tensor_has_one_place(table, bucket_bytes, senders):
    plan = Plan.build(table, bucket_bytes, senders)
    assert [(p.name, p.shape, p.dtype) for bucket in plan.buckets for p in bucket.pieces] == table
    assert plan.names == [name for name, _, _ in table]
    assert plan.nbytes == sum(bucket.allocate(CPU).numel() for bucket in plan.buckets)
    for index, bucket in enumerate(plan.buckets):
        assert (bucket.index, bucket.sender) == (index, index % senders)
        end = 0
        for piece in bucket.pieces:
            assert piece.offset % ALIGN_BYTES == 0 and end <= piece.offset < end + ALIGN_BYTES
            assert piece.nbytes == torch.Size(piece.shape).numel() * SIZES[piece.dtype]
            end = piece.offset + piece.nbytes
        assert end <= bucket.nbytes < end + ALIGN_BYTES
        assert end <= bucket_bytes or len(bucket.pieces) == 1


@given(tables(), st.integers(1, 3000))
@settings(max_examples=50, deadline=None)
def test_tensors_do_not_overwrite_each_other(table, bucket_bytes):
    """Also the statement that views have the right shape and dtype and reach the buffer."""
    for bucket in Plan.build(table, bucket_bytes, 1).buckets:
        buffer = bucket.allocate(CPU)
        views = [piece.view(buffer) for piece in bucket.pieces]
        for i, (piece, view) in enumerate(zip(bucket.pieces, views, strict=True)):
            assert (tuple(view.shape), str(view.dtype)) == (piece.shape, f"torch.{piece.dtype}")
            view.fill_(i + 1)
        bucket.seal(buffer, 7)
        assert all((view == i + 1).all() for i, view in enumerate(views))
        bucket.verify(buffer, 7)


def test_a_bucket_closes_before_it_grows_past_its_size():
    table = [(name, (16,), "float32") for name in "abcd"] + [("big", (100,), "float32"), ("e", (1,), "float32")]
    buckets = Plan.build(table, 128, 2).buckets
    assert [[piece.name for piece in bucket.pieces] for bucket in buckets] == [["a", "b"], ["c", "d"], ["big"], ["e"]]
    assert [bucket.sender for bucket in buckets] == [0, 1, 0, 1]


@given(tables(), st.integers(1, 3000), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_a_plan_travels_and_its_digest_names_it(table, bucket_bytes, senders):
    plan = Plan.build(table, bucket_bytes, senders)
    assert Plan.decode(plan.encode()) == plan
    assert Plan.build(list(table), bucket_bytes, senders).digest == plan.digest
    name, shape, dtype = table[-1]
    for changed in (
        [*table[:-1], (f"{name}.other", shape, dtype)],
        [*table[:-1], (name, (*shape, 1), dtype)],
        [*table[:-1], (name, shape, "float16" if dtype != "float16" else "bfloat16")],
        [*table, ("one.more", (1,), "float32")],
        table[:-1],
    ):
        assert Plan.build(changed, bucket_bytes, senders).digest != plan.digest


def test_tables_that_make_no_plan_are_refused():
    with pytest.raises(WeightsError, match=r"repeat: \['a', 'b'\]"):
        Plan.build([(name, (1,), "float32") for name in "abcab"], 100, 1)
    with pytest.raises(WeightsError, match=r"tensor 'a' has dtype 'int8'.*bfloat16"):
        Plan.build([("a", (1,), "int8")], 100, 1)


# --- what must be caught on the way: a flipped bit, two swapped tensors, a transposed one, an older version -----------


@given(tables(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_flipped_bit_is_seen_anywhere(table, data):
    """In a tensor, in the padding, in the version and in the checksum itself."""
    bucket, buffer = sealed(table, version=3)
    damaged = flip(buffer, data.draw(st.integers(0, 8 * buffer.numel() - 1)))
    with pytest.raises(WeightsError, match=r"bucket 0 \(layer\.0\.weight \.\.\. "):
        bucket.verify(damaged, 3)
    damaged = flip(buffer, 8 * bucket.nbytes + data.draw(st.integers(0, 8 * TRAILER_BYTES - 1)))
    with pytest.raises(WeightsError):
        bucket.verify(damaged, 3)


@given(st.integers(2, 5), st.lists(st.integers(1, 6), min_size=1, max_size=2), st.data())
@settings(max_examples=50, deadline=None)
def test_two_swapped_tensors_are_seen(count, shape, data):
    bucket, buffer = sealed([(f"expert.{i}", tuple(shape), "bfloat16") for i in range(count)], version=1)
    one, other = data.draw(st.lists(st.sampled_from(bucket.pieces), min_size=2, max_size=2, unique=True))
    a, b = one.view(buffer).clone(), other.view(buffer).clone()
    assume(not torch.equal(a, b))
    one.view(buffer).copy_(b)
    other.view(buffer).copy_(a)
    with pytest.raises(WeightsError, match="damaged"):
        bucket.verify(buffer, 1)


def test_a_transposed_and_a_missing_tensor_are_seen():
    table = [("a", (4, 4), "float32"), ("b", (3,), "float32")]
    for change in (lambda view: view.copy_(view.T.clone()), lambda view: view.zero_()):
        bucket, buffer = sealed(table, version=1)
        change(bucket.pieces[0].view(buffer))
        with pytest.raises(WeightsError, match=r"bucket 0 \(a \.\.\. b\) of policy version 1 arrived damaged"):
            bucket.verify(buffer, 1)


@given(st.integers(0, 2**40), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_another_version_is_seen(sent, expected):
    assume(sent != expected)
    bucket, buffer = sealed([("a", (4,), "float32")], version=sent)
    with pytest.raises(WeightsError, match=f"carries policy version {sent}, expected {expected}"):
        bucket.verify(buffer, expected)


def test_an_older_trailer_on_newer_tensors_is_seen():
    bucket, older = sealed([("a", (4,), "float32")], version=1, seed=1)
    _, newer = sealed([("a", (4,), "float32")], version=2, seed=2)
    newer[bucket.nbytes :] = older[bucket.nbytes :]
    with pytest.raises(WeightsError, match="damaged"):
        bucket.verify(newer, 1)


def test_a_bucket_that_was_never_sealed_is_seen():
    (bucket,) = Plan.build([("a", (4,), "float32")], 100, 1).buckets
    with pytest.raises(WeightsError, match="damaged"):
        bucket.verify(bucket.allocate(CPU), 0)


# --- the checksums themselves: the host's, and the one for device memory ----------------------------------------------

CHECKSUMS = pytest.mark.parametrize("function", [checksum, device_checksum], ids=["host", "device"])
words = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40)


def as_bytes(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).view(torch.uint8)


@CHECKSUMS
@given(words, st.data())
@settings(max_examples=100, deadline=None)
def test_a_checksum_sees_every_single_bit(function, values, data):
    buffer = as_bytes(values)
    at = data.draw(st.integers(0, len(values) - 1))
    expected = function(buffer)
    assert -(2**63) <= expected < 2**63  # it fits the trailer
    assert all(function(flip(buffer, 64 * at + bit)) != expected for bit in range(64))


@CHECKSUMS
@given(words, st.data())
@settings(max_examples=100, deadline=None)
def test_a_checksum_sees_swapped_words(function, values, data):
    one, other = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    swapped = list(values)
    swapped[one], swapped[other] = values[other], values[one]
    assert (function(as_bytes(swapped)) == function(as_bytes(values))) == (swapped == values)


@CHECKSUMS
@pytest.mark.parametrize("distance", [1, 2, 8, 1024])
def test_a_checksum_sees_swapped_signs(function, distance):
    """Words that differ only in their topmost bits: the same numbers with other signs."""
    numbers = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    for signs in ([1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]):
        first = numbers.clone().view(-1, 2)
        first[distance] = first[0] * torch.tensor(signs)
        second = first.clone()
        second[[0, distance]] = first[[distance, 0]]
        assert function(first.view(-1).view(torch.uint8)) != function(second.view(-1).view(torch.uint8))


@CHECKSUMS
def test_a_checksum_sees_swapped_tensors_that_hold_the_same_numbers_in_another_order(function):
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for other in (tensor.flip(0), tensor.roll(2, dims=0), tensor.roll(2, dims=1)):
        one = torch.stack([tensor, other]).view(-1).view(torch.uint8)
        two = torch.stack([other, tensor]).view(-1).view(torch.uint8)
        assert function(one) != function(two)


@given(words, st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_the_device_checksum_is_splitmix64_in_chunks_of_any_size(values, chunk_words):
    """Against whole numbers of any size, cut to 64 bits."""

    def mix(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    expected = sum(mix((word + i * 0x9E3779B97F4A7C15) % 2**64) for i, word in enumerate(values))
    for chunks in ({}, {"chunk_words": chunk_words}):
        assert (device_checksum(as_bytes(values), **chunks) - expected) % 2**64 == 0


def test_a_checksum_of_nothing_exists():
    """A bucket of empty tensors alone."""
    bucket, buffer = sealed([("empty", (0, 4), "float32")], version=1)
    with pytest.raises(WeightsError, match="version 1, expected 2"):
        bucket.verify(buffer, 2)
    with pytest.raises(WeightsError, match="damaged"):
        bucket.verify(flip(buffer, 64), 1)
    assert bucket.nbytes == 0 and device_checksum(buffer[:0]) == 0
