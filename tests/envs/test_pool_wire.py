"""Messages between a pool and its workers: whole, in order, as what they were; and what can't travel says so."""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import asdict
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.pool import messages, wire
from spmd_rl.rollouts.types import Task

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4),
    max_leaves=12,
)


class Listener:
    """One end that remembers."""

    def __init__(self, type: Any = messages.FromWorker) -> None:
        self.heard: list[Any] = []
        self.lost: list[str] = []
        self.frames = wire.Frames(type, self.heard.append, self.lost.append)


@given(st.lists(PLAIN, max_size=6), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(values, cuts):
    listener = Listener()
    data = b"".join(wire.frame(messages.Done(number, wire.plain(value, "it"))) for number, value in enumerate(values))
    while data:
        size = cuts[len(data) % len(cuts)]
        listener.frames.data_received(data[:size])
        data = data[size:]
    assert [(message.job, message.value) for message in listener.heard] == list(enumerate(values))
    assert not listener.lost


def test_every_message_arrives_as_what_it_was():
    tokens, numbers = np.arange(5, dtype=np.int32), np.linspace(0, 1, 5, dtype=np.float32)
    sampling = SamplingConfig(temperature=0.5)
    down = [
        messages.Start(100, 0.5),
        messages.Build(1, b"spec"),
        messages.Call(2, "a:b", b"", b"{}"),
        messages.Method(3, 1, "task", b"()"),
        messages.Rollout(4, 1, Task("words", 7, {"row": {"a": [1, None]}}), sampling),
        messages.Refusal(4, 1, "ValueError", "too long", True),
        messages.Cancel(4),
        messages.Stop(),
    ]
    up = [
        messages.Ready(),
        messages.Built(1, ["hint"]),
        messages.NotBuilt(1, "KeyError", "text", "trace"),
        messages.Withdrawn(4, 0),
        messages.Failed(4, "KeyError", "text", "trace", False, 3),
        messages.Ended(4),
    ]
    for type, sent in ((messages.ToWorker, down), (messages.FromWorker, up)):
        listener = Listener(type)
        listener.frames.data_received(b"".join(map(wire.frame, sent)))
        assert listener.heard == sent
    listener = Listener(messages.ToWorker)
    listener.frames.data_received(wire.frame(messages.Answer(4, 0, tokens, numbers, tokens, "stop")))
    (answer,) = listener.heard
    assert answer.tokens.dtype == np.int32 and answer.logprobs.dtype == np.float32
    np.testing.assert_array_equal(answer.logprobs, numbers)
    listener = Listener()
    listener.frames.data_received(wire.frame(messages.Generate(4, 0, tokens, asdict(sampling))))
    np.testing.assert_array_equal(listener.heard[0].tokens, tokens)
    assert listener.heard[0].sampling == asdict(sampling)


@pytest.mark.parametrize("junk", [b"hello, world!", b"\xff" * 64, wire.frame(messages.Stop()), b"\x01\x00\x00\x00\xc1"])
def test_junk_ends_the_connection_and_says_so_once(junk):
    listener = Listener()
    listener.frames.data_received(junk)
    listener.frames.data_received(wire.frame(messages.Ready()))
    listener.frames.connection_lost(None)
    assert len(listener.lost) == 1 and listener.lost[0].startswith("what came is no message") and not listener.heard


def test_a_closed_end_hears_and_sends_nothing():
    listener = Listener()
    listener.frames.close()
    listener.frames.send(b"into the void")
    listener.frames.data_received(wire.frame(messages.Ready()))
    listener.frames.connection_lost(OSError("gone"))
    assert not listener.heard and not listener.lost


def test_numpy_numbers_become_numbers_and_tuples_lists():
    value = {"a": (1, np.float32(0.5)), "b": np.bool_(True), "c": np.int64(3)}
    listener = Listener()
    listener.frames.data_received(wire.frame(messages.Done(0, wire.plain(value, "it"))))
    assert listener.heard[0].value == {"a": [1, 0.5], "b": True, "c": 3}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [1, {2}]}, r"task.data\['a'\]\[1\] is a set, which can't leave a worker process"),
        (Decimal("1.5"), "task.data is a Decimal"),
        ({"when": datetime.date(2000, 1, 1)}, r"task.data\['when'\] is a date"),
        (SamplingConfig(), "is a SamplingConfig"),
        ({(1, 2): 3}, r"has the key \(1, 2\)"),
    ],
)
def test_what_would_arrive_as_something_else_is_refused(value, says):
    with pytest.raises(TypeError, match=says):
        wire.plain(value, "task.data")


@given(st.text(st.sampled_from("a\n é€😀\ud800\udfff"), max_size=50))
def test_any_text_can_be_sent_as_an_error(text):
    sent = wire.sendable(text)
    assert sent.encode().decode() == sent
    assert sent == text or "\ud800" in text or "\udfff" in text


def test_a_long_text_is_cut():
    assert len(wire.sendable("\ud800" * 2**20)) < 8 * wire.MAX_TEXT and "more characters" in wire.sendable("x" * 10**6)


def test_what_can_not_be_pickled_says_so():
    with pytest.raises(
        TypeError, match=r"the function <lambda> can't be sent to a worker process: .* file.py:function"
    ):
        wire.pickled(lambda: 1, "the function <lambda>")


def test_frames_work_on_a_real_connection():
    import socket

    async def main() -> None:
        left, right = socket.socketpair()
        left.setblocking(False)
        right.setblocking(False)
        here, there = Listener(), Listener(messages.ToWorker)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: here.frames, left)
        await loop.connect_accepted_socket(lambda: there.frames, right)
        big = np.arange(2**20, dtype=np.int32)
        here.frames.send(wire.frame(messages.Answer(0, 0, big, big.astype(np.float32), big, "stop")))
        async with asyncio.timeout(60):
            while not there.heard:
                await asyncio.sleep(0.01)
            np.testing.assert_array_equal(there.heard[0].tokens, big)
            there.frames.close()
            while not here.lost:
                await asyncio.sleep(0.01)
        assert here.lost == [""]

    asyncio.run(main())
