"""`main.py rl --bench` and `sft --bench` as users start them: figures agree with each other, the run is left alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.models.context import bytes_per_layer
from tests.e2e.runner import QUICKSTART, ROOT, TIMEOUT_S, Launch, Run

SHORT = ["--bench", "--seq-len", "128", "--bench.rows", "2", "--bench.steps", "3", "--bench.warmup", "1"]
RL = ["--config", QUICKSTART, "--orchestrator.algorithm.kl.coef", "0.1", *SHORT]
SFT = ["--config", str(ROOT / "configs/sft.toml"), "--trainer.parallel.cp", "2", "--trainer.model.dtype", "bfloat16"]
Figures = dict[str, Any]


def bench(folder: Path, command: str, model: str, args: list[str], torchrun: bool = True) -> tuple[Run, Figures]:
    figures = folder.with_name("figures.json")
    words = [*args, "--model.name", model, "--json", str(figures)]
    with Launch(folder, words, nproc=2, command=command, torchrun=torchrun) as launch:
        done = launch.wait()
    assert done.returncode == 0, done.output[-4000:]
    return done, json.loads(figures.read_text())


@pytest.fixture(scope="module")
def rl(model, tmp_path_factory) -> tuple[Run, Figures]:
    """Two sharded ranks with a reference model, beside the folder of a run that is resumed some other day."""
    folder = tmp_path_factory.mktemp("rl") / "run"
    folder.mkdir()
    (folder / "config.toml").write_text("seed = 7\n")
    return bench(folder, "rl", model, [*RL, "--ckpt.resume", "latest"])


@pytest.fixture(scope="module")
def sft(model, tmp_path_factory) -> tuple[Run, Figures]:
    """Two ranks that share rows; the program starts itself."""
    return bench(tmp_path_factory.mktemp("sft") / "run", "sft", model, [*SFT, *SHORT], torchrun=False)


@pytest.mark.parametrize("name", ["rl", "sft"])
def test_figures_agree_with_each_other(name, request):
    _, figures = request.getfixturevalue(name)
    assert figures["ranks"] == 2 and figures["load_s"] > 0 and figures["gather_s"] > 0 and figures["peak_flops"] > 0
    assert [line["lengths"] for line in figures["lengths"]] == ["fixed", "variable"]
    for line in figures["lengths"]:
        assert len(line["steps_s"]) == 3 and line["step_s"] == sorted(line["steps_s"])[1]
        assert line["tokens_per_s"] * line["step_s"] == pytest.approx(line["tokens"])
        assert line["tokens_per_s_per_rank"] * 2 == pytest.approx(line["tokens_per_s"])
        assert line["mfu"] * line["step_s"] * 2 * figures["peak_flops"] == pytest.approx(line["flops"])
        assert len(set(line["losses"])) == 1  # nothing is learned, so no number of steps can diverge
        assert 0 < line["mfu"] < 2 and 0 <= line["idle"] < 1 and 0 < line["fill"] <= 1
        for rank in line["ranks"]:
            assert {"forward", "backward", "reduce", "optim"} <= set(rank["phases"])
            assert 0 < sum(rank["phases"].values()) <= line["step_s"]
        assert 10 < line["peak_mib"] == max(rank["peak_mib"] for rank in line["ranks"])
    fixed, variable = figures["lengths"]
    assert fixed["tokens"] == fixed["documents"] * 128 and fixed["idle"] == 0 and fixed["fill"] == 1
    assert variable["documents"] > fixed["documents"]


def test_rl_measures_the_algorithms_own_work(rl):
    _, figures = rl
    fixed = figures["lengths"][0]
    assert (figures["command"], figures["algorithm"], figures["layout"]) == ("rl", "grpo", "dp_shard 2")
    assert "reference" in fixed["phases"] and fixed["cp_bytes"] == 0
    assert (fixed["documents"], fixed["documents_of_run"], fixed["rows"]) == (4, 256, 2)


def test_sft_measures_the_layout_of_its_config(sft):
    """Bytes of context parallelism are those of the formula: two rows of 128 tokens, two layers, bfloat16."""
    _, figures = sft
    fixed = figures["lengths"][0]
    assert (figures["command"], figures["dtype"], figures["layout"]) == ("sft", "bfloat16", "dp_shard 1 × cp 2")
    assert fixed["cp_bytes"] == 2 * 2 * sum(bytes_per_layer("ulysses", 128, 2, 4, 2, 32, 2))
    assert "reference" not in fixed["phases"]


def test_people_see_a_table(rl):
    done, figures = rl
    assert "tok/s" in done.output and "MFU" in done.output and "fixed" in done.output and "variable" in done.output
    assert f"{figures['lengths'][0]['tokens_per_s']:.0f}" in done.output


def test_the_run_is_left_alone(rl):
    done, _ = rl
    beside = done.folder.with_name("run-bench")
    assert [path.name for path in done.folder.iterdir()] == ["config.toml"]
    assert (done.folder / "config.toml").read_text() == "seed = 7\n"
    assert (beside / "logs/rank_00001.log").exists() and not (beside / "checkpoints").exists()


def test_a_bench_that_is_told_to_end_shows_what_it_has(model, tmp_path):
    words = [*RL, "--model.name", model, "--bench.steps", "1000000"]
    with Launch(tmp_path / "run", words, nproc=2, torchrun=False) as launch:
        wait_for_a_step(tmp_path / "run-bench", launch)
        launch.terminate()
        done = launch.wait()
    assert done.returncode == 0, done.output[-4000:]
    assert "gathering all weights" in done.output and "variable" not in done.output


def wait_for_a_step(folder: Path, launch: Launch) -> None:
    """Until the timeline of the first rank shows one."""
    spans, deadline = folder / "timeline/rank_00000.jsonl", time.monotonic() + TIMEOUT_S
    while not (spans.exists() and '"optim"' in spans.read_text()):
        assert not launch.ended and time.monotonic() < deadline, launch.output
        time.sleep(0.1)


REFUSED = {
    "eval": (["eval", "--bench"], "--bench measures training"),
    "in turns": (["rl", "--bench", "--deployment.placement", "colocated"], "--deployment.placement disaggregated"),
    "no steps": (["sft", "--bench", "--bench.steps", "0"], "bench.steps = 0: must be 1 or more"),
    "no such lengths": (["rl", "--bench", "--bench.lengths", "long"], "'fixed', 'variable', 'both'"),
}


@pytest.mark.parametrize(("words", "says"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_before_anything_starts(words, says):
    done = main(*words, "--model.name", "m")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and says in done.stderr


def test_a_dry_run_shows_the_mesh():
    done = main(
        "rl", "--config", QUICKSTART, "--trainer.parallel.cp", "2", "--bench", "--dry-run", "--nproc-per-node", "4"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ranks 0-3         trainer, dp_shard 2 × cp 2\n                      cp: 0-1 | 2-3\n")


def main(*words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(ROOT / "spmd_rl/main.py")]
    return subprocess.run([*program, *words], capture_output=True, text=True, timeout=120, cwd=ROOT)
