"""Rows for the trainer's tests, made without the packer: documents side by side."""

from __future__ import annotations

import numpy as np

from spmd_rl.rollouts.types import Row

VOCAB = 61


def make_document(length: int, seed: int) -> dict[str, np.ndarray]:
    """The columns of one document of `length` tokens, aligned to inputs: the last column is empty."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCAB, length + 1)
    sampled = (rng.random(length) < 0.7) & (np.arange(length) < length - 1)
    columns = {
        "tokens": tokens[:-1].astype(np.int32),
        "targets": tokens[1:].astype(np.int32),
        "mask": sampled.astype(np.uint8),
        "logprobs": np.log(rng.uniform(0.005, 0.03, length)).astype(np.float32) * sampled,
        "temperatures": rng.uniform(0.6, 1.4, length).astype(np.float32),
        "pg_weight": (rng.normal(size=length) * sampled / 50).astype(np.float32),
        "ce_weight": (rng.random(length) * ~sampled / 50).astype(np.float32),
    }
    columns["ce_weight"][-1] = columns["targets"][-1] = 0
    return columns


def make_row(*documents: dict[str, np.ndarray]) -> Row:
    """Documents packed into one row."""
    cu_seqlens = np.cumsum([0, *(len(document["tokens"]) for document in documents)]).astype(np.int32)
    columns = {name: np.concatenate([document[name] for document in documents]) for name in documents[0]}
    return Row(**columns, cu_seqlens=cu_seqlens)


def padding_row(length: int) -> Row:
    """A row that takes part without weighing anything."""
    zeros = np.zeros(length, np.int32)
    nothing = {name: np.zeros(length, np.float32) for name in ("logprobs", "pg_weight", "ce_weight")}
    return Row(
        tokens=zeros,
        targets=zeros,
        mask=np.zeros(length, np.uint8),
        temperatures=np.ones(length, np.float32),
        cu_seqlens=np.array([0, length], np.int32),
        **nothing,
    )
