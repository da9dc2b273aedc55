"""Bytes on the wire: whatever travels arrives bit for bit, and what cannot travel says so before it leaves."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spmd_rl.world.wire import decode, encode

dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(),
    hnp.unicode_string_dtypes(max_len=4),
)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
messages = st.recursive(
    scalars | arrays,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def assert_same(got: Any, sent: Any) -> None:
    """Same types, same structure, same bits (nan is equal to itself)."""
    if isinstance(sent, np.ndarray):
        assert isinstance(got, np.ndarray)
        assert (got.dtype.str, got.shape, got.tobytes()) == (sent.dtype.str, sent.shape, sent.tobytes())
        assert not got.flags.writeable
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        for key, value in sent.items():
            assert_same(got[key], value)
    elif isinstance(sent, list):
        assert len(got) == len(sent)
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)
    elif isinstance(sent, float) and math.isnan(sent):
        assert math.isnan(got)
    else:
        assert (type(got), got) == (type(sent), sent)


@given(messages)
@settings(max_examples=100, deadline=None)
def test_what_is_sent_arrives(message):
    data = encode(message)
    for received in (data, bytearray(data), memoryview(data)):
        assert_same(decode(received), message)


@given(arrays.filter(lambda array: array.ndim), st.data())
@settings(max_examples=50, deadline=None)
def test_arrays_that_are_not_contiguous_arrive(array, data):
    steps = data.draw(st.tuples(*[st.sampled_from([1, -1, 2])] * array.ndim))
    view = array.T[tuple(slice(None, None, step) for step in steps)]
    assert_same(decode(encode(view)), view)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "uint64", "bool"])
def test_numpy_scalars_arrive_as_plain_numbers(dtype):
    """So that a field of type float may be given one."""
    number = np.dtype(dtype).type(1.1)
    assert_same(decode(encode({"loss": number})), {"loss": number.item()})
    assert decode(encode([number]), list[type(number.item())]) == [number.item()]


def test_arrays_cost_a_header_and_their_bytes():
    array = np.zeros(1_000_000, dtype=np.int32)
    assert len(encode(array)) < array.nbytes + 64


def test_decoded_arrays_share_the_received_bytes():
    data = encode({"a": np.arange(1000), "b": [np.arange(5.0)]})
    message = decode(data)
    received = np.frombuffer(data, dtype=np.uint8)
    assert np.shares_memory(message["a"], received) and np.shares_memory(message["b"][0], received)
    with pytest.raises(ValueError, match="read-only"):
        message["a"][0] = 1


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (object(), "a object"),
        ({"x": [lambda: 0]}, "a function"),
        (1j, "a complex"),
        (np.complex64(1j), "a complex64"),
        (np.longdouble(1), "a longdouble"),
        (np.array([None]), "Python objects"),
        (np.zeros(2, dtype=[("a", "i4"), ("b", "f4")]), "one per field"),
        (np.zeros(2, dtype="V4"), "one per field"),
    ],
    ids=[
        "object",
        "function",
        "complex",
        "complex64",
        "longdouble",
        "array of objects",
        "structured array",
        "raw bytes array",
    ],
)
def test_what_cannot_travel_says_so(thing, says):
    with pytest.raises(TypeError, match=says):
        encode(thing)


def test_integers_beyond_64_bits_do_not_travel():
    with pytest.raises(OverflowError):
        encode(2**64)


def test_what_is_not_a_message_is_refused():
    data = encode(np.arange(10))
    with pytest.raises(msgspec.DecodeError):
        decode(data[:-1])
    with pytest.raises(ValueError, match="unknown msgpack extension 7"):
        decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(7, b"")))
    with pytest.raises(msgspec.ValidationError):
        decode(encode([1, "two"]), list[int])
