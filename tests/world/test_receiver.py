"""The engine's end of weight sync: what arrives, when a swap may begin, and what is said when it does not go well.

Real ranks receive in tests/distributed/test_world_ranks.py.
"""

from __future__ import annotations

import threading
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.world.buckets import TRAILER_BYTES, Plan, WeightsError
from tests.world.fake_wire import Wire

TABLE = [(f"layers.{i}.weight", (8, 5 + i), "float32") for i in range(7)] + [("scale", (), "bfloat16")]
BUCKET_BYTES = 500  # two tensors at most
PATIENCE_S = 30.0
STAGINGS = ("whole", "buckets")


def version_of(number: int, table=TABLE) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for name, shape, dtype in table}


def plan_of(senders: int = 1) -> Plan:
    plan = Plan.build(TABLE, BUCKET_BYTES, senders)
    assert len(plan.buckets) >= 5
    return plan


def same(got: list[tuple[str, torch.Tensor]], number: int, table=TABLE) -> bool:
    """Equal in names, their order, dtypes and bits."""
    expected = version_of(number, table)
    assert [name for name, _ in got] == list(expected)
    return all(tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]) for name, tensor in got)


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("senders", [1, 2, 3])
def test_versions_arrive_whole_also_for_one_who_keeps_their_tensors(monkeypatch, staging, senders):
    """As vLLM does until a layer is complete: what was handed over first is still right at the end."""
    wire = Wire(monkeypatch, plan_of(senders), senders)
    receiver = wire.receiver(staging)
    plan = receiver.plan(PATIENCE_S)
    assert plan == wire.plan
    for number in (0, 1, 5):
        wire.send(number, version_of(number).items())
        receiver.begin(number)
        receiver.wait(PATIENCE_S)
        assert same(list(receiver.tensors(PATIENCE_S)), number)
        assert receiver.receive_s > 0
    receiver.close(PATIENCE_S)
    assert not wire.errors


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("taker", [0, 1])
def test_a_rank_with_experts_of_its_own_gets_these_and_what_all_get(monkeypatch, staging, taker):
    takers = {"layers.1.weight": 0, "layers.2.weight": 1, "layers.4.weight": 1, "layers.6.weight": 0}
    whole = Plan.build(TABLE, BUCKET_BYTES, 2, takers)
    wire = Wire(monkeypatch, whole, 2, taker)
    receiver = wire.receiver(staging)
    plan = receiver.plan(PATIENCE_S)
    assert set(plan.names) == {name for name, _, _ in TABLE if takers.get(name, taker) == taker}
    if staging == "whole":
        assert receiver.staging_bytes == plan.nbytes < whole.nbytes
    for number in (0, 3):
        wire.send(number, version_of(number).items())
        receiver.begin(number)
        receiver.wait(PATIENCE_S)
        got = dict(receiver.tensors(PATIENCE_S))
        assert list(got) == plan.names
        assert all(torch.equal(tensor, version_of(number)[name]) for name, tensor in got.items())
    receiver.close(PATIENCE_S)
    assert not wire.errors


def test_how_much_is_staged(monkeypatch):
    plan = plan_of()
    largest = max(bucket.nbytes for bucket in plan.buckets) + TRAILER_BYTES
    for staging, expected in (("whole", plan.nbytes), ("buckets", 2 * largest)):
        receiver = Wire(monkeypatch, plan).receiver(staging)
        receiver.plan(PATIENCE_S)
        assert receiver.staging_bytes == expected


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=12), bucket=st.integers(1, 2000), senders=st.integers(1, 3)
)
def test_any_plan_streams(sizes, bucket, senders):
    table = [(f"t{i}", (size,), "float32") for i, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        wire = Wire(monkeypatch, Plan.build(table, bucket, senders), senders)
        receiver = wire.receiver("buckets")
        receiver.plan(PATIENCE_S)
        for number in range(3):
            wire.send(number, version_of(number, table).items())
            receiver.begin(number)
            receiver.wait(PATIENCE_S)
            assert same(list(receiver.tensors(PATIENCE_S)), number, table)
        receiver.close(PATIENCE_S)


def test_a_streamed_version_arrives_with_its_first_bucket_and_a_whole_one_with_its_last(monkeypatch):
    plan = plan_of()
    for staging, needed in (("buckets", 1), ("whole", len(plan.buckets))):
        for sent in (needed - 1, needed):
            wire, arrived = Wire(monkeypatch, plan), threading.Event()
            receiver = wire.receiver(staging, lambda version, arrived=arrived: arrived.set())
            receiver.plan(PATIENCE_S)
            wire.send(0, version_of(0).items(), stops_at=sent)
            receiver.begin(0)
            if sent == needed:
                receiver.wait(PATIENCE_S)
                assert arrived.wait(PATIENCE_S)
            else:
                with pytest.raises(WeightsError, match="did not arrive"):
                    receiver.wait(0.05)
                assert not arrived.is_set()


def test_no_tensor_of_a_damaged_bucket_is_handed_over(monkeypatch):
    """Those before it were: the caller's model is of no version any more, so this is an error and no retry."""
    wire = Wire(monkeypatch, plan_of())
    receiver = wire.receiver("buckets")
    receiver.plan(PATIENCE_S)
    wire.send(3, version_of(3).items(), damaged=2)
    receiver.begin(3)
    receiver.wait(PATIENCE_S)
    got = []
    with pytest.raises(WeightsError, match=r"bucket 2 \(.*\) of policy version 3 arrived damaged"):
        for name, _ in receiver.tensors(PATIENCE_S):
            got.append(name)
    assert got == [piece.name for bucket in wire.plan.buckets[:2] for piece in bucket.pieces]
    (error,) = wire.errors
    assert isinstance(error, WeightsError)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_sender_that_falls_silent_in_the_middle_is_an_error_and_not_a_hang(monkeypatch, at):
    wire = Wire(monkeypatch, plan_of(2), 2)
    receiver = wire.receiver("buckets")
    receiver.plan(PATIENCE_S)
    wire.send(0, version_of(0).items(), stops_at=at)
    receiver.begin(0)
    receiver.wait(PATIENCE_S)
    with pytest.raises(WeightsError, match=rf"bucket {at} of policy version 0 did not arrive within 0\.05 s"):
        list(receiver.tensors(0.05))


def test_a_sender_that_dies_in_the_middle_ends_the_swap_at_once_with_its_reason(monkeypatch):
    wire = Wire(monkeypatch, plan_of())
    receiver = wire.receiver("buckets")
    receiver.plan(PATIENCE_S)
    wire.send(0, version_of(0).items(), stops_at=3, dies="/gloo/ connection closed by peer")
    receiver.begin(0)
    receiver.wait(PATIENCE_S)
    with pytest.raises(WeightsError, match="bucket 3 of policy version 0: /gloo/ connection closed") as caught:
        list(receiver.tensors(PATIENCE_S))
    assert caught.value.__cause__ is wire.errors[0]  # by which the watchdog knows that a peer is gone


def test_buckets_wait_until_the_engine_stands_still(monkeypatch):
    """Between arrival and swap, which may be long, no more is received than there is room for."""
    wire = Wire(monkeypatch, plan_of())
    receiver = wire.receiver("buckets")
    receiver.plan(PATIENCE_S)
    wire.send(0, version_of(0).items(), stops_at=2)  # a third one would be an error by now
    wire._put(0, RuntimeError("there is no room"))
    receiver.begin(0)
    receiver.wait(PATIENCE_S)
    tensors = receiver.tensors(PATIENCE_S)
    first = [piece.name for bucket in wire.plan.buckets[:2] for piece in bucket.pieces]
    receiver._thread.join(0.05)
    assert receiver._thread.is_alive() and not wire.errors
    assert [name for name, _ in islice(tensors, len(first))] == first
    with pytest.raises(WeightsError, match="there is no room"):
        next(tensors)
