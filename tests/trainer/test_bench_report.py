"""The figures of a bench: what belongs together, the share of the peak by hand, and what people are shown."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from spmd_rl.config.bench import BenchConfig
from spmd_rl.config.tree import Config, ModelConfig
from spmd_rl.rollouts.packing import pack
from spmd_rl.rollouts.types import TrainSample
from spmd_rl.trainer import peak
from spmd_rl.trainer.bench_report import Kind, Step, median_at, phases_of, report, show
from spmd_rl.world.mesh import Mesh

CONFIG = Config(model=ModelConfig("m"), seq_len=8)
FACTS = {"load_s": 3.0, "gather_s": 0.5, "peak_flops": 1e9}


def document(length: int) -> TrainSample:
    zeros = np.zeros(length, np.float32)
    weights = np.r_[0.0, np.ones(length - 1)].astype(np.float32)
    return TrainSample(np.zeros(length, np.int32), np.zeros(length, np.uint8), zeros, zeros + 1, ce_weight=weights)


def step(seconds: float, peak_mib: float = 10.0, **phases: float) -> Step:
    return Step(seconds, 20.0, 0.1, phases, cp_bytes=peak_mib, peak_mib=peak_mib, reserved_mib=2 * peak_mib)


def kind(cost=lambda lengths: lengths * 1e6) -> Kind:
    """Two ranks, three steps; documents of 8, 8 and 4 tokens in two rows on each rank, one of them for nothing."""
    documents = [document(8), document(8), document(4)]
    of_ranks = [
        [step(3.0, forward=1.0, backward=2.0), step(2.0, forward=0.5, backward=1.0), step(1.0, forward=1.0)],
        [step(3.0, forward=9.0, backward=9.0), step(2.0, 30.0, forward=1.5, backward=0.5), step(1.0, forward=1.0)],
    ]
    return Kind.of("variable", [documents], 5, [pack(documents, 2, 8, cost)], cost, of_ranks)


def test_the_median_is_a_step_that_was_measured():
    assert [median_at(seconds) for seconds in ([5.0], [2.0, 1.0], [3.0, 1.0, 2.0], [4.0, 3.0, 2.0, 1.0])] == [
        0,
        1,
        2,
        2,
    ]


def test_figures_are_those_of_the_median_step():
    found = kind()
    assert (found.step_s, found.tokens, found.tokens_per_s) == (2.0, 20.0, 10.0)
    assert found.phases == {"forward": 1.0, "backward": 0.75}  # the mean over ranks
    assert (found.peak_mib, found.reserved_mib, found.cp_bytes) == (30.0, 60.0, 30.0)
    assert (found.documents, found.documents_of_run, found.rows) == (3, 5, 2)
    assert [rank["peak_mib"] for rank in found.ranks] == [10.0, 30.0]


def test_ranks_wait_for_the_heaviest_row():
    """8 and 8 side by side, then 4 beside a row for nothing: of 24 tokens' time 20 are worked."""
    assert kind(cost=lambda lengths: np.asarray(lengths, float)).idle == pytest.approx(1 - 20 / 24)
    assert kind().fill == pytest.approx(20 / 32)


def test_the_share_of_the_peak_by_hand():
    """3 · 10¹² operations in 2 s on 3 ranks of 10¹² a second."""
    assert peak.mfu(3e12, 2.0, 3, 1e12) == 0.5
    figures = report(CONFIG, "rl", Mesh.all_train(2), "cpu", FACTS, "by hand", [kind()])
    assert figures["lengths"][0]["mfu"] == pytest.approx(20 * 1e6 / (2.0 * 2 * 1e9))


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA A10G", 0.0),
        ("AMD Instinct MI300X", 0.0),
    ],
)
def test_gpus_by_name(name, tflops):
    assert peak.known_tflops(name) == tflops


def test_a_processor_is_measured():
    flops, where = peak.peak_flops(torch.device("cpu"), torch.float32, threads=1)
    assert 1e8 < flops < 1e15 and "float32" in where


def test_phases_are_the_learners_seconds():
    assert phases_of({"time/forward_s": 1.5, "loss": 3.0, "time/optim_s": 0.5}) == {"forward": 1.5, "optim": 0.5}


def test_the_table_and_the_file_say_the_same(tmp_path, capsys):
    bench = BenchConfig(json=str(tmp_path / "new/figures.json"))
    figures = report(replace(CONFIG, bench=bench), "rl", Mesh.all_train(2), "cpu", FACTS, "by hand", [kind()])
    assert json.loads((tmp_path / "new/figures.json").read_text()) == json.loads(json.dumps(figures))
    said = capsys.readouterr().out
    for piece in (
        "rl --bench: m, float32, grpo",
        "2 × cpu, dp_shard 2",
        "forward 1.000",
        "2 (1–3)",
        "0.5%",
        "load 3 s",
    ):
        assert piece in said
    assert "3 documents, where a batch of the run has 5" in said and "lognormal around 2 tokens" in said


def test_what_is_not_known_is_said():
    def said(**changes: object) -> str:
        console = Console(file=io.StringIO(), width=140)
        figures = report(CONFIG, "sft", Mesh.all_train(2), "cpu", FACTS | {"peak_flops": 0.0}, "Abacus 3", [])
        show(figures | changes, console)
        return console.file.getvalue()

    assert "no MFU: Abacus 3; set bench.peak_tflops" in said() and "ended before a step was measured" in said()
    figures = report(CONFIG, "sft", Mesh.all_train(2), "cpu", FACTS, "by hand", [kind(cost=None)])
    assert figures["lengths"][0]["mfu"] is None and "words of its own" in said(lengths=figures["lengths"])
