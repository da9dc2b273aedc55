"""A version that streams through two buffers: vLLM keeps tensors of layers that are not complete, and must not see
them change.
"""

from __future__ import annotations

import numpy as np
import pytest

from spmd_rl.orchestrator.versions import k3
from spmd_rl.world.buckets import Plan, WeightsError
from tests.inference.engines import make_engine, make_learner, probe, prompts, weights_of
from tests.world.fake_wire import Wire

PATIENCE_S = 30.0
SMALL = 4096  # bytes: nearly every tensor is a bucket of its own, so every layer of several tensors is cut


def plan_of(tensors, bucket_bytes: int = SMALL) -> Plan:
    return Plan.build([(n, tuple(t.shape), "float32") for n, t in tensors.items()], bucket_bytes, 1)


def streamed_swap(monkeypatch, engine, version: int, tensors, bucket_bytes: int = SMALL, **how) -> None:
    """As `inference/role.py` does it."""
    wire = Wire(monkeypatch, plan_of(tensors, bucket_bytes))
    receiver = wire.receiver("buckets")
    receiver.plan(PATIENCE_S)
    wire.send(version, tensors.items(), **how)
    receiver.begin(version)
    receiver.wait(PATIENCE_S)
    engine.swap(version, receiver.tensors(PATIENCE_S), wire.plan.names)


def test_a_layer_that_is_cut_by_buckets_is_loaded_as_it_was_sent(monkeypatch, engine, stranger):
    """q, k and v make one layer of vLLM's and lie in three buckets; the embedding, padded, is kept to the very end."""
    tensors, sequences = weights_of(stranger), prompts(8, 24)
    where = {piece.name: bucket.index for bucket in plan_of(tensors).buckets for piece in bucket.pieces}
    parts = [where[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert len(set(parts)) == 3 and parts[0] != parts[-1]
    expected = np.concatenate(stranger.score(sequences))
    for bucket_bytes in (SMALL, 40_000, 2**30):
        streamed_swap(monkeypatch, engine, engine.version + 1, tensors, bucket_bytes)
        scored = np.concatenate(probe(engine, sequences).logprobs)
        assert k3(expected, scored).mean() <= 1e-8


def test_experts_that_are_cut_by_buckets_are_loaded_as_they_were_sent(monkeypatch, moe_engine, moe_folder):
    """All experts of a block are one layer of vLLM's, whose 24 tensors it keeps until the last one is there."""
    tensors, sequences = weights_of(make_learner(moe_folder)), prompts(8, 24)
    others = {name: tensor.flip(0) if "experts" in name else tensor for name, tensor in tensors.items()}

    def scored_after(swap) -> np.ndarray:
        swap()
        return np.concatenate(probe(moe_engine, sequences).logprobs)

    def version() -> int:
        return moe_engine.version + 1

    whole = scored_after(lambda: moe_engine.swap(version(), tensors.items(), list(tensors)))
    other = scored_after(lambda: moe_engine.swap(version(), others.items(), list(others)))
    streamed = scored_after(lambda: streamed_swap(monkeypatch, moe_engine, version(), tensors))
    assert k3(whole, streamed).mean() <= 1e-8 < k3(whole, other).mean()


def test_a_bucket_that_is_damaged_in_the_middle_of_a_swap_raises(monkeypatch, folders, group, moe_engine, stranger):
    """Half of the engine is of the new version by then: the error must reach the role, which ends the run with it."""
    engine, tensors = make_engine(folders[0], group), weights_of(stranger)
    with pytest.raises(WeightsError, match=r"bucket 7 \(.*\) of policy version 1 arrived damaged"):
        streamed_swap(monkeypatch, engine, 1, tensors, damaged=7)
    assert engine.version == 0
