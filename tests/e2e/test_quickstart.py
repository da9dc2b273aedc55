"""The quickstart, whole: it runs, it learns, and it leaves what its user was promised."""

from __future__ import annotations

import json
import tomllib

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmd_rl.config import load
from spmd_rl.models import build as models
from spmd_rl.models.packed import Documents
from tests.e2e.runner import QUICKSTART, run

CONFIG = load(["--config", QUICKSTART])
STEPS = CONFIG.max_steps
OF_EVERY_STEP = {
    "step", "version", "loss", "grad_norm", "entropy", "reward/mean", "reward/std", "rollouts", "tokens/trained",
    "tokens/sampled", "lag/mean", "lag/max", "mismatch/k3_mean", "mismatch/k3_max", "mismatch/tokens",
    "offpolicy/k3_mean", "time/step_s", "time/wait_s", "weights/bytes", "weights/pull_s", "weights/stall_s",
    "perf/trainer_tokens_per_s", "perf/engine_tokens_per_s",
}  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quickstart(model, tmp_path_factory):
    """About a minute; with nothing left out."""
    folder, args = tmp_path_factory.mktemp("quickstart") / "run", ["--config", QUICKSTART, "--model.name", model]
    done = run(folder, args, 3, 600, small_cache=False)
    assert done.returncode == 0, done.output[-4000:]
    return done


def test_it_learns(quickstart):
    """Held-out words, from what the teacher showed to solved, and no setback on the way."""
    start, end = quickstart.phase("eval")
    assert start["eval/greedy"] <= 0.15
    assert end["eval/greedy"] >= 0.95 and end["eval/reward"] >= 0.95
    rewards = np.array([record["reward/mean"] for record in quickstart.phase("rl")])
    means = rewards.reshape(-1, 10).mean(axis=1)
    assert (np.diff(means) > -0.1).all(), means


def test_every_step_says_how_it_went(quickstart):
    steps = quickstart.phase("rl")
    assert [record["step"] for record in steps] == [record["version"] for record in steps] == list(range(1, STEPS + 1))
    for record in steps:
        assert record.keys() >= OF_EVERY_STEP
        assert "nonfinite" not in record
        assert record["rollouts"] == 256
        assert record["tokens/trained"] <= 256 * 6
        assert record["time/step_s"] > 0 and record["perf/trainer_tokens_per_s"] > 0
    assert [record["eval/version_min"] for record in quickstart.phase("eval")] == [0, STEPS]
    assert [record["eval/version_max"] for record in quickstart.phase("eval")] == [0, STEPS]
    assert len(quickstart.phase("warmup")) == CONFIG.warmup.steps


def test_engine_and_trainer_agree_about_every_version(quickstart):
    assert len(quickstart.versions) == STEPS + 1
    for record in quickstart.versions:
        assert 0 <= record["mismatch/k3_mean"] <= 1e-8
        assert record["mismatch/tokens"] == 8 * 23
        assert record["weights/bytes"] > 4 * 450_000


def test_it_is_asynchronous_within_its_bound(quickstart):
    steps = quickstart.phase("rl")
    assert np.mean([record["lag/mean"] for record in steps]) > 0.5
    assert max(record["lag/max"] for record in steps) <= 2  # S + ceil((W - 1) / P), of single tokens as well
    assert any(record["offpolicy/k3_mean"] > 1e-6 for record in steps)


def test_the_export_is_a_model_of_transformers(quickstart):
    """Loaded without our code it computes what our own model computes from the same folder, and does the task."""
    folder = str(quickstart.folder / "hf")
    peer, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer.encode("<|im_start|>fade\n"))
    with torch.no_grad():
        logprobs_TV = peer(ids[None]).logits[0].float().log_softmax(-1)
        ours = models.build_and_load(folder)
        documents = Documents.build(np.array([0, len(ids)]), torch.device("cpu"))
        ours_T = ours(ids, documents, ids.roll(-1), torch.ones(len(ids)))[0]
        answer = peer.generate(ids[None], max_new_tokens=6, do_sample=False)[0, len(ids) :]
    expected_T = logprobs_TV.gather(1, ids.roll(-1)[:, None])[:, 0]
    torch.testing.assert_close(ours_T, expected_T, rtol=0, atol=2e-5)
    assert tokenizer.decode(answer, skip_special_tokens=True) == "edaf"


def test_everything_that_was_promised_is_there(quickstart):
    folder = quickstart.folder
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert tomllib.loads((folder / "config.toml").read_text())["max_steps"] == STEPS
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [f"rank_{r:05d}.log" for r in range(3)]
    assert len(list((folder / "rollouts").glob("step_*.jsonl"))) == STEPS
    assert "reward" in (folder / "rollouts/first_step.txt").read_text()
    sample = json.loads((folder / "rollouts" / f"step_{STEPS:06d}.jsonl").read_text().splitlines()[0])
    assert "<|im_start|>" in json.dumps(sample)
    assert list((folder / "tensorboard").rglob("events*"))


def test_the_screen_ends_with_the_result_and_the_next_step(quickstart):
    lines = quickstart.last_lines(10)
    assert "held-out reward, greedy" in lines and "next:" in lines
    assert str(quickstart.folder / "hf") in lines
    assert "warning" not in quickstart.output.lower() and "Traceback" not in quickstart.output
