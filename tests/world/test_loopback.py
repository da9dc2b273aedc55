"""A pipe between two threads of one rank: nothing lost, in order, both ways; and silence ends."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.world.clock import Conductor, Leader
from spmd_rl.world.messages import Cancel, Exported, Stop
from spmd_rl.world.pipe import Loopback, PeerError

MESSAGES = st.lists(st.binary(max_size=10_000), max_size=20)


@given(MESSAGES, MESSAGES)
def test_messages_come_in_order_both_ways(down, up):
    orchestrator, other = Loopback.both_ends(timeout_s=5.0)
    for payload in down:
        orchestrator.wait(orchestrator.send_start(payload))
    for payload in up:
        other.send(payload)
    assert [other.receive() for _ in down] == down
    assert [orchestrator.receive_finish(orchestrator.receive_start()) for _ in up] == up


def test_silence_ends_with_an_error():
    orchestrator, _ = Loopback.both_ends(timeout_s=0.01)
    with pytest.raises(PeerError, match=r"said nothing for 0\.01 s"):
        orchestrator.receive()


def test_a_clock_ticks_without_any_group():
    """Conductor and leader of one rank, as `orchestrator = "shared"` with one process has them."""
    down, up = Loopback.both_ends(timeout_s=20.0)
    heard, everything, failed = [], threading.Event(), []

    def deliver(member, event):
        heard.append((member, event))
        if len(heard) == 3:
            everything.set()

    conductor = Conductor(None, ["rank 0 (colocated)"], 0.002, deliver, failed.append, own=down)
    leader = Leader(None, failed.append, own=up)
    conductor.start()
    leader.start()
    for number in range(3):
        conductor.decide(0, Cancel(number))
        leader.tell(Exported(str(number)))
    decisions = [leader.inbox.get(timeout=20) for _ in range(3)]
    assert everything.wait(20)
    conductor.stop()
    assert leader.inbox.get(timeout=20) == Stop()
    conductor.join(20)
    leader.join(20)
    assert decisions == [Cancel(0), Cancel(1), Cancel(2)] and not failed
    assert heard == [(0, Exported("0")), (0, Exported("1")), (0, Exported("2"))]
