"""The made-up batches of a bench: as many documents as a run would have, or as rows allow, and any algorithm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algorithms import ALGORITHMS
from spmd_rl.config.bench import BenchConfig
from spmd_rl.config.tree import AlgorithmConfig, Config, DataConfig, OrchestratorConfig
from spmd_rl.rollouts.packing import pack
from spmd_rl.trainer import bench_rl, bench_sft
from spmd_rl.trainer.bench import Batch
from spmd_rl.trainer.bench_lengths import drawn, limited, median_of

RL = Config(seq_len=64, orchestrator=OrchestratorConfig(batch_size=12, group_size=4), bench=BenchConfig(rows=0))
VOCABULARY = 50


def rl(kind: str = "variable", data_ranks: int = 2, **orchestrator: object) -> Batch:
    rows = orchestrator.pop("rows", 0)
    config = replace(RL, orchestrator=replace(RL.orchestrator, **orchestrator), bench=BenchConfig(rows=rows))
    return bench_rl.batch_of(config, kind, data_ranks, VOCABULARY)


def lengths(batch: Batch) -> list[list[int]]:
    return [[len(sample.tokens) for sample in minibatch] for minibatch in batch.minibatches]


@given(
    kind=st.sampled_from(["fixed", "variable"]),
    count=st.integers(1, 300),
    seq_len=st.integers(2, 500),
    median=st.integers(0, 500),
    rows=st.integers(0, 20),
)
def test_lengths_fit_rows_and_the_limit(kind, count, seq_len, median, rows):
    config = Config(seq_len=seq_len, bench=BenchConfig(median_length=min(median, seq_len), rows=rows))
    lengths = drawn(kind, count, config)
    assert len(lengths) == count and lengths.min() >= 2 and lengths.max() <= seq_len
    assert kind == "variable" or (lengths == seq_len).all()
    fewer = limited(lengths, 3, config)
    assert len(fewer) >= 1 and (fewer == lengths[: len(fewer)]).all()
    assert fewer.sum() <= 3 * rows * seq_len if rows else len(fewer) == count
    if len(fewer) < count:  # one more would have been too many
        assert lengths[: len(fewer) + 1].sum() > 3 * rows * seq_len


def test_variable_lengths_have_the_median_that_was_asked_for():
    lengths = drawn("variable", 4000, Config(seq_len=10_000, bench=BenchConfig(median_length=500)))
    assert np.median(lengths) == pytest.approx(500, rel=0.05)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.05)
    assert median_of(Config(seq_len=4096)) == 1024


def test_a_batch_has_the_documents_of_the_runs_own():
    assert lengths(rl("fixed")) == [[64] * 12]
    assert len(lengths(rl())[0]) == rl().documents_of_run == 12
    assert [len(part) for part in lengths(rl(algorithm=AlgorithmConfig(minibatches=3)))] == [4, 4, 4]
    assert len(lengths(rl(batch_unit="groups", batch_size=5))[0]) == 20
    sft = bench_sft.batch_of(replace(RL, data=DataConfig(batch_size=7)), "fixed", 2, VOCABULARY)
    assert lengths(sft) == [[64] * 7] and sft.documents_of_run == 7


def test_rows_bound_a_batch_per_data_rank_and_optimizer_step():
    many = {"batch_size": 400, "rows": 3}
    assert lengths(rl("fixed", data_ranks=2, **many)) == [[64] * 6]
    parts = lengths(rl("fixed", data_ranks=2, **many, algorithm=AlgorithmConfig(minibatches=5)))
    assert [len(part) for part in parts] == [6] * 5
    assert rl("fixed", **many).documents_of_run == 400
    config = replace(RL, data=DataConfig(batch_size=400), bench=BenchConfig(rows=3))
    assert lengths(bench_sft.batch_of(config, "fixed", 2, VOCABULARY)) == [[64] * 6]


def test_a_batch_in_tokens_counts_sampled_ones():
    batch = rl("fixed", batch_unit="tokens", batch_size=1000)
    sampled = [int(sample.mask.sum()) for sample in batch.minibatches[0]]
    assert sum(sampled) >= 1000 > sum(sampled[1:]) and set(sampled) == {48}
    assert batch.documents_of_run == len(sampled)
    fewer = rl("fixed", batch_unit="tokens", batch_size=1000, rows=1)
    assert fewer.documents_of_run == len(sampled) and lengths(fewer) == [[64] * 2]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_has_something_to_learn(name):
    """The streams that its loss reads are there, and all rows can be packed."""
    settings = AlgorithmConfig(type=name, advantage="none_such.py:advantage" if ALGORITHMS[name].advantages else "")
    batch = rl(algorithm=settings)
    (packed,) = [pack(minibatch, 2, RL.seq_len) for minibatch in batch.minibatches]
    rows = [row for rows in packed.rows for row in rows]
    learns = {"advantages": "pg_weight", "teacher": "kl_weight", "answers": "ce_weight"}[ALGORITHMS[name].learns]
    assert any(getattr(row, learns) is not None for row in rows)
    assert all(np.isfinite(row.logprobs).all() and row.tokens.max() < VOCABULARY for row in rows)
    assert (rows[0].hinted is not None) == (ALGORITHMS[name].teacher == "hint")
    assert (rows[0].rewards is not None) == ALGORITHMS[name].critic


def test_the_same_batch_on_every_rank():
    first, second = rl(), rl()
    for mine, theirs in zip(first.minibatches[0], second.minibatches[0], strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        assert mine.pg_weight == theirs.pg_weight
