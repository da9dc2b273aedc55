"""Every message that exists arrives through the union type that its receiver reads, as what it was."""

from __future__ import annotations

import typing
from dataclasses import asdict

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spmd_rl.rollouts.types import Row
from spmd_rl.world import messages
from spmd_rl.world.messages import Decision, Event, Generate, Message, Order, Partial, Stop, Train
from spmd_rl.world.wire import decode, encode

UNIONS = {"Decision": Decision, "Event": Event, "Order": Order}
CASES = [(name, kind) for name, union in UNIONS.items() for kind in typing.get_args(union)]

columns = hnp.arrays(st.sampled_from([np.int32, np.float32, np.uint8]), st.integers(0, 5))
numbers = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    type(None): st.none(),
    typing.Any: st.integers(0, 9) | st.text(max_size=3),
    np.ndarray: columns,
}


def values(hint: object) -> st.SearchStrategy:
    """Anything that a field with this type hint may hold."""
    if hint in numbers:
        return numbers[hint]
    if isinstance(hint, type) and issubclass(hint, Message):
        return st.fixed_dictionaries(fields_of(hint)).map(lambda fields: hint(**fields))
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return st.lists(values(inner[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=3)
    return st.one_of([values(one) for one in inner])  # a union


def fields_of(kind: type[Message]) -> dict[str, st.SearchStrategy]:
    """Anything that the fields of a message may hold."""
    return {name: values(hint) for name, hint in typing.get_type_hints(kind).items()}


def plain(value: object) -> object:
    """The same content in types that `==` compares bit for bit."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, {name: plain(getattr(value, name)) for name in value.__struct_fields__})
    return (type(value), value)


@pytest.mark.parametrize(("union", "kind"), CASES, ids=lambda case: case if isinstance(case, str) else case.__name__)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_a_message_arrives_through_its_union(union, kind, data):
    sent = [kind(**data.draw(st.fixed_dictionaries(fields_of(kind)))) for _ in range(2)]
    assert plain(decode(encode(sent), list[UNIONS[union]])) == plain(sent)


def test_every_message_belongs_to_a_stream():
    defined = {kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)}
    assert defined - {Message, Partial} == {kind for _, kind in CASES}  # Partial travels inside of others


def test_a_stream_refuses_the_messages_of_another():
    with pytest.raises(msgspec.ValidationError):
        decode(encode(Train(1, "rl", [])), Decision)
    assert decode(encode(Stop()), Decision) == decode(encode(Stop()), Order) == Stop()


def test_a_missing_field_is_named():
    data = msgspec.msgpack.encode({"type": "Generate", "id": 3})
    with pytest.raises(msgspec.ValidationError, match="tokens"):
        decode(data, Decision)


def test_messages_cannot_be_changed():
    request = Generate(1, np.zeros(2, np.int32), 4, 1.0, 7, [])
    with pytest.raises(AttributeError):
        request.max_tokens = 5


def test_rows_travel_in_a_train_order():
    row = Row(**{name: np.arange(4, dtype=np.float32) for name in Row.__dataclass_fields__})
    order = decode(encode(Train(1, "rl", [[asdict(row)]])), Order)
    assert plain(asdict(Row(**order.rows[0][0]))) == plain(asdict(row))
