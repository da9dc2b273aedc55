"""A frozen teacher samples, the policy imitates: engines of its own, which never get new weights."""

from __future__ import annotations

import json

from spmd_rl.models.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, make_byte_tokenizer
from spmd_rl.models.tiny import make_tiny
from tests.e2e.runner import QUICKSTART, run


def test_imitating_a_teacher(model, tmp_path):
    sizes = {"layers": 1, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ff": 64}
    folder = str(tmp_path / "teacher")
    make_byte_tokenizer(folder)
    make_tiny(folder, seed=7, vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID, pad_token_id=PAD_ID, init_std=0.5, **sizes)
    algorithm = ["--orchestrator.algorithm.type", "sft", "--orchestrator.algorithm.reference", folder]
    short = ["--warmup.steps", "0", "--max-steps", "12", "--orchestrator.eval.tasks", "4", "--trainer.optim.lr", "3e-3"]
    scale = ["--orchestrator.batch-size", "64", "--orchestrator.group-size", "8"]
    args = [
        "--config",
        QUICKSTART,
        "--model.name",
        model,
        *short,
        *scale,
        *algorithm,
        "--deployment.teacher-ranks",
        "1",
    ]
    done = run(tmp_path / "run", args, nproc=4)
    assert done.returncode == 0, done.output[-4000:]
    steps = done.phase("rl")
    # The teacher is far from uniform, so there is something to imitate; its tokens have no policy version and no lag.
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    assert all("lag/mean" not in step and step["tokens/ce"] == step["batch/sampled_tokens"] for step in steps)
    rows = [json.loads(line) for line in (done.folder / "rollouts/step_000012.jsonl").read_text().splitlines()]
    assert {row["version_max"] for row in rows} == {-1}
    assert [record["eval/version_min"] for record in done.phase("eval")] == [0, 12]  # the policy is what is evaluated
