"""Whole runs on grids of trainer ranks: they end as one rank does, engines get the weights, checkpoints fit others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runner import QUICKSTART, ROOT, Run, run

SFT = ["--config", str(ROOT / "configs/sft.toml"), "--data.name", str(ROOT / "configs/sft.jsonl")]
SFT += ["--max-steps", "6", "--data.eval-interval", "3", "--ckpt.interval", "3"]
RL = ["--config", QUICKSTART, "--max-steps", "3", "--warmup.steps", "3", "--warmup.batch-size", "8"]
RL += ["--orchestrator.batch-size", "32", "--orchestrator.group-size", "8", "--orchestrator.eval.tasks", "4"]
RL += ["--trainer.scheduler.warmup-steps", "1", "--warmup.scheduler.warmup-steps", "1"]
RL += ["--deployment.train-ranks", "2", "--weights.strict", "--trainer.parallel.cp", "2"]


def losses(done: Run, phase: str = "sft") -> list[float]:
    assert done.returncode == 0, done.output[-4000:]
    return [record["loss" if phase == "sft" else "eval/loss"] for record in done.phase(phase)]


def test_supervised_training_on_a_grid_ends_like_one_rank_and_goes_on_there(model, tmp_path):
    args = [*SFT, "--model.name", model]
    one = run(tmp_path / "one", args, 1, command="sft")
    grid = ["--trainer.parallel.dp-replicate", "2", "--trainer.parallel.cp", "2"]
    four = run(tmp_path / "four", [*args, *grid], 4, command="sft")
    assert losses(four) == pytest.approx(losses(one), rel=2e-5)
    assert losses(four, "eval") == pytest.approx(losses(one, "eval"), rel=2e-5)
    resume = str(tmp_path / "four/checkpoints/step_000003")
    on = run(tmp_path / "on", [*args, "--ckpt.resume", resume], 1, command="sft")
    assert losses(on) == pytest.approx(losses(one)[3:], rel=2e-5)


@pytest.mark.parametrize("style", ["ulysses", "ring"])
def test_rl_with_shared_rows_and_an_engine_between_the_trainer_ranks(model, tmp_path, style):
    """Strict: engine and trainer must agree about every version, or the run stops."""
    args = [*RL, "--model.name", model, "--trainer.parallel.cp-style", style]
    args += ["--deployment.rank-map", "0", "1", "3", "2"]
    done = run(tmp_path / "run", args, nproc=4)
    assert done.returncode == 0, done.output[-4000:]
    assert len(done.phase("rl")) == 3 and len(done.versions) == 4
    assert all(version["mismatch/k3_max"] <= 1e-8 for version in done.versions)
    assert all(record["perf/cp_bytes"] > 0 for record in done.phase("rl"))
    logs = {path.name: path.read_text() for path in Path(done.folder, "logs").glob("rank_*.log")}
    assert "vllm" in logs["rank_00002.log"].lower() and "vllm" not in logs["rank_00003.log"].lower()


def test_numbers_that_do_not_fit_end_the_start(model, tmp_path):
    args = [*RL, "--model.name", model, "--trainer.parallel.cp", "3", "--deployment.train-ranks", "3"]
    done = run(tmp_path / "run", args, nproc=5, timeout_s=120)
    assert done.returncode != 0 and "cp = 3 does not divide the model's 4 attention heads" in done.output
