"""Supervised fine-tuning as users start it: it learns, the layout changes nothing, a killed run goes on exactly."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.runner import ROOT, Launch, Run, run

CONFIG = ["--config", str(ROOT / "configs/sft.toml"), "--data.name", str(ROOT / "configs/sft.jsonl")]
SHORT = [*CONFIG, "--max-steps", "10", "--data.eval-interval", "5", "--ckpt.interval", "5"]


def sft(folder: Path, *args: str, nproc: int = 1) -> Run:
    done = run(folder, list(args), nproc, command="sft")
    assert done.returncode == 0, done.output[-4000:]
    return done


def losses(done: Run, phase: str = "sft") -> list[float]:
    return [record["loss" if phase == "sft" else "eval/loss"] for record in done.phase(phase)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "hf/model.safetensors")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> Run:
    """Ten steps on one rank, without a break."""
    return sft(tmp_path_factory.mktemp("sft") / "whole", *SHORT, "--model.name", model)


def test_it_learns_and_leaves_a_model_and_a_picture(whole):
    assert losses(whole)[-1] < 0.6 * losses(whole)[0]
    assert len(losses(whole, "eval")) == 3 and losses(whole, "eval")[-1] < losses(whole, "eval")[0]
    assert (whole.folder / "loss.png").stat().st_size > 10_000
    AutoModelForCausalLM.from_pretrained(whole.folder / "hf")
    assert "vllm" not in (whole.folder / "logs/rank_00000.log").read_text()


def test_two_ranks_end_like_one(whole, model, tmp_path):
    two = sft(tmp_path / "two", *SHORT, "--model.name", model, nproc=2)
    assert losses(two) == pytest.approx(losses(whole), rel=2e-5)
    assert losses(two, "eval") == pytest.approx(losses(whole, "eval"), rel=2e-5)
    assert sorted(path.name for path in (two.folder / "checkpoints").iterdir()) == ["step_000005", "step_000010"]


def test_a_killed_run_goes_on_exactly(whole, model, tmp_path):
    """Same losses, same weights, bit for bit; and on two ranks from the checkpoint of one."""
    slow = [*SHORT, "--model.name", model, "--max-steps", "100000"]
    with Launch(tmp_path / "run", slow, nproc=1, command="sft") as launch:
        launch.wait_for_step(7)
        os.kill(launch.pid_of(0), signal.SIGKILL)
        launch.wait(120)
    for later in (tmp_path / "run/checkpoints").glob("step_*"):  # it may have come further before it died
        assert later.name == "step_000005" or int(later.name.split("_")[1].split(".")[0]) >= 10
    resume = str(tmp_path / "run/checkpoints/step_000005")
    on = sft(tmp_path / "run", *SHORT, "--model.name", model, "--ckpt.resume", resume)
    assert losses(on) == losses(whole)
    ours, theirs = weights(on.folder), weights(whole.folder)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    two = sft(tmp_path / "two", *SHORT, "--model.name", model, "--ckpt.resume", resume, nproc=2)
    assert losses(two) == pytest.approx(losses(whole)[5:], rel=2e-5)


def test_sigterm_saves_and_the_run_goes_on_exactly(whole, model, tmp_path):
    slow = [*CONFIG, "--model.name", model, "--data.eval-interval", "5", "--max-steps", "100000"]
    with Launch(tmp_path / "run", slow, nproc=2, command="sft", torchrun=False) as launch:
        launch.wait_for_step(3)
        launch.terminate()
        done = launch.wait(120)
    assert done.returncode == 0 and "stopped after step" in done.output, done.output[-4000:]
    (folder,) = (done.folder / "checkpoints").iterdir()
    step = int(folder.name.split("_")[1])
    assert step == done.phase("sft")[-1]["step"] >= 4
    args = [*CONFIG, "--model.name", model, "--data.eval-interval", "5", "--max-steps", str(max(10, step + 1))]
    on = sft(done.folder, *args, "--ckpt.resume", "latest", nproc=2)
    assert losses(on)[:10] == pytest.approx(losses(whole), rel=2e-5)


@pytest.mark.parametrize(
    "lengths", [("--data.fake-length", "64"), ("--data.fake-length", "64", "--data.fake-min-length", "8")]
)
def test_fake_data(model, tmp_path, lengths):
    args = ["--data.type", "fake", *lengths, "--data.batch-size", "8", "--max-steps", "2", "--seq-len", "128"]
    done = sft(tmp_path / "run", "--model.name", model, *args)
    tokens = [record["tokens/packed"] for record in done.phase("sft")]
    assert (tokens == [512, 512]) == (len(lengths) == 2)


def bad(tmp_path: Path, model: str, *args: str, nproc: int = 2) -> str:
    done = run(tmp_path / "run", ["--model.name", model, *args], nproc, timeout_s=120, command="sft")
    assert done.returncode != 0
    return done.last_lines()


def test_bad_input_ends_all_ranks_with_its_reason(model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join([json.dumps({"messages": [{"role": "user", "content": "?"}]})] * 3))
    assert "rows.jsonl, line" in (said := bad(tmp_path, model, "--data.name", str(rows)))
    assert "no assistant turn" in said
    said = bad(tmp_path, model, *SHORT, "--ckpt.resume", "latest")
    assert "holds no complete checkpoint" in said and "ckpt.interval" in said
