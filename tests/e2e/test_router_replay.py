"""Router replay in whole runs: what the engines took is what the trainers take, and that closes the gap in bfloat16."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from spmd_rl.models.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, make_byte_tokenizer
from spmd_rl.models.tiny import make_tiny
from tests.e2e.runner import QUICKSTART, Launch, run
from tests.e2e.test_lockstep import LOCKSTEP, assert_same, finished
from tools.bench_parts import replay

TALK = f"{Path(__file__).with_name('environments.py')}:Talk"  # of three turns
RUN = [
    *("--config", QUICKSTART, "--warmup.steps", "0", "--max-steps", "3", "--trainer.scheduler.type", "constant"),
    *("--orchestrator.batch-size", "64", "--orchestrator.group-size", "8", "--orchestrator.eval.tasks", "0"),
    *("--orchestrator.source.0.env", TALK, "--orchestrator.sampling.max-tokens", "12", "--orchestrator.max-lag", "0"),
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("experts"))
    make_byte_tokenizer(folder)
    sizes = {"layers": 3, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ff": 64, "mlp_only_layers": [1]}
    special = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    return make_tiny(folder, seed=0, vocab_size=VOCAB_SIZE, architecture="qwen3_moe", **sizes, **special)


APART = ["--deployment.train-ranks", "2", "--deployment.infer-ranks", "2"]
TOGETHER = ["--deployment.placement", "colocated", "--deployment.train-ranks", "0", "--deployment.infer-ranks", "0"]


@pytest.mark.parametrize(("placement", "ranks"), [(APART, 5), (TOGETHER, 3)], ids=["apart", "together"])
def test_experts_of_two_engines_are_replayed_by_ranks_that_share_rows_and_experts(mixture, tmp_path, placement, ranks):
    """In float32 and without lag a trainer would have chosen the same, so a wrong position would show at once."""
    layout = [*placement, "--trainer.parallel.cp", "2", "--trainer.parallel.cp-style", "ring"]
    layout += ["--trainer.parallel.ep", "2", "--trainer.router-replay"]
    done = run(tmp_path / "run", [*RUN, *layout, "--model.name", mixture], nproc=ranks)
    assert done.returncode == 0, done.output[-4000:]
    for record in done.phase("rl"):
        assert record["moe/replay_agreement"] > 0.999
        assert record["moe/replayed"] > 0.9  # all but what follows the last answer
        assert record["offpolicy/k3_mean"] < 1e-8


def test_in_lockstep_a_run_with_replay_is_taken_up_exactly(mixture, tmp_path):
    """At a checkpoint the routed experts of all that was sampled are given up, also in the run that is never killed."""
    args = ["--model.name", mixture, "--trainer.router-replay", "--orchestrator.max-lag", "1", "--max-steps", "6"]
    args += ["--ckpt.interval", "3", "--deployment.infer-ranks", "2"]
    with Launch(tmp_path / "run", [*LOCKSTEP, *args], 4) as launch:
        launch.wait_for_step(4)
        os.kill(launch.pid_of(3), signal.SIGKILL)
        assert launch.wait().returncode != 0
    again = finished(tmp_path / "run", *args, "--ckpt.resume", "latest", ranks=4)
    assert "step_000003: version 3 serves" in again.output
    assert_same(finished(tmp_path / "whole", *args, ranks=4), again)
    replayed = [record["moe/replayed"] for record in again.phase("rl")]
    assert replayed[3] < replayed[2] and min(replayed[1:3]) > 0.8 < replayed[5], replayed
    agreed = [record["moe/replay_agreement"] for record in again.phase("rl") if record["moe/replayed"]]
    assert min(agreed) > 0.9, agreed  # weights are a step older; another position's experts would agree by chance only


def test_a_dense_model_has_nothing_to_replay(model, tmp_path):
    done = run(tmp_path / "run", [*RUN, "--trainer.router-replay", "--model.name", model])
    assert done.returncode != 0
    assert "trainer.router_replay" in done.last_lines(20), done.output[-4000:]


def test_in_bfloat16_replay_leaves_what_rounding_leaves():
    """20,000 tokens, 8 layers, 8 of 64 experts; experts of other positions or sequences are seen."""
    moe = replay.in_a_process("qwen3_moe")
    assert moe["tokens"] >= 20_000
    assert moe["replayed"] <= replay.TARGET * moe["own choice"]
    assert moe["flipped"] > 0  # else there was nothing to close
    assert moe["shifted"] > 10 * moe["own choice"] and moe["of another sequence"] > 10 * moe["own choice"]
