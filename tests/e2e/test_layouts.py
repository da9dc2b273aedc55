"""Other numbers of ranks, other engines, other models: on every one, engine and trainer agree about every version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.e2e.runner import QUICKSTART, Run, run

TALK = f"{Path(__file__).with_name('environments.py')}:Talk"
SHORT = [
    *("--config", QUICKSTART, "--warmup.steps", "5", "--max-steps", "4", "--orchestrator.eval.tasks", "0"),
    *("--warmup.scheduler.type", "constant", "--trainer.scheduler.type", "constant"),
    *("--orchestrator.batch-size", "64", "--orchestrator.group-size", "8", "--weights.strict"),
    *("--inference.vllm.num_gpu_blocks_override", "512"),
]
TENSOR_PARALLEL = ["--deployment.infer-ranks", "2", "--inference.tp", "2"]
STREAMING = ["--weights.staging", "buckets", "--weights.bucket-mb", "0.1"]  # of about 20 buckets
COLOCATED = ["--deployment.placement", "colocated", "--deployment.train-ranks", "0", "--deployment.infer-ranks", "0"]
HF = ["--deployment.train-ranks", "2", "--trainer.model.impl", "hf"]
LAYOUTS = {  # number of ranks, limit of k3, flags
    "two trainers with transformers' model, bucket by bucket": (4, 1e-8, [*HF, *STREAMING]),
    "tensor parallel, bucket by bucket": (4, 1e-8, [*TENSOR_PARALLEL, *STREAMING]),
    "tensor parallel again, in bfloat16": (4, 1e-2, [*TENSOR_PARALLEL, "--trainer.model.dtype", "bfloat16"]),
    "train and infer in turns on one rank": (2, 1e-8, COLOCATED),
    "in turns on two ranks, tensor parallel": (3, 1e-8, [*COLOCATED, "--inference.tp", "2"]),
    "in turns on one rank, which orchestrates too": (1, 1e-8, [*COLOCATED, "--deployment.orchestrator", "shared"]),
    "a trainer that orchestrates beside": (2, 1e-8, ["--deployment.orchestrator", "shared", *STREAMING]),
    "in turns, and the engine keeps its memory": (2, 1e-8, [*COLOCATED, "--deployment.no-release-memory"]),
}


def assert_agreement(done: Run, steps: int, limit: float, replicas: int = 1) -> None:
    assert done.returncode == 0, done.output[-4000:]
    assert [record["version"] for record in done.versions] == list(range(steps + 1))
    for record in done.versions:
        assert 0 <= record["mismatch/k3_mean"] <= limit
        assert record["mismatch/tokens"] == replicas * 8 * 23


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_runs_and_agrees(name, model, tmp_path):
    """Under DETAIL torch checks every collective of every group across its ranks.

    The second tensor-parallel run finds nothing in its way that the first one left in shared memory.
    """
    ranks, limit, flags = LAYOUTS[name]
    args = [*SHORT, *flags, "--model.name", model]
    done = run(tmp_path / "run", args, ranks, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert_agreement(done, 4, limit)
    staged, sent = done.versions[0]["weights/staging_bytes"], done.versions[0]["weights/bytes"]
    if "in turns" in name:
        assert staged == 0 and sent > 10**6
        assert "memory/train_gb" in done.phase("rl")[0]
    else:
        assert 2 * 10**5 <= staged < 0.5 * sent if set(STREAMING) <= set(flags) else staged == sent
    assert (done.folder / "hf" / "model.safetensors").exists()


def test_at_learning_rate_zero_nothing_moves_at_any_lag(model, tmp_path):
    """Two engines, conversations that outlive versions, another temperature, and a weight decay that would tell.

    Every token was sampled by weights equal to the present ones, so the trainer's logprobs are the engines'.
    """
    flags = ["--model.name", model, "--deployment.infer-ranks", "2", "--warmup.steps", "0", "--max-steps", "8"]
    flags += ["--trainer.optim.lr", "0", "--trainer.optim.weight-decay", "0.5", "--orchestrator.max-lag", "3"]
    flags += ["--orchestrator.source.0.env", TALK, "--orchestrator.sampling.temperature", "0.7"]
    done = run(tmp_path / "run", [*SHORT, *flags], 4)
    assert_agreement(done, 8, 1e-8, replicas=2)
    steps = done.phase("rl")
    for record in steps:
        assert record["offpolicy/k3_mean"] <= 1e-8 and record["offpolicy/k3_max"] <= 1e-6
        assert record["tokens/trained"] > 100 and record["grad_norm"] > 0
    assert max(record["lag/max"] for record in steps) >= 2
    assert np.mean([record["lag/mean"] for record in steps]) > 0.5
    before, after = load_file(Path(model) / "model.safetensors"), load_file(done.folder / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
