"""Built-in environments in a whole run: conversations with tools in worker processes beside a game on rank 0."""

from __future__ import annotations

import json
import re

from tests.e2e.runner import QUICKSTART, run

SOURCES = """
[[orchestrator.source]]
env = "calculator"
args = { digits = 2, wrong = 0.5, show_tools = false }
workers = 1
max_tokens = 80

[[orchestrator.source]]
env = "guess"
args = { ranges = 20, wrong = 0.5, chat = false }
group_size = 8
"""


def test_tools_in_a_worker_and_a_game_on_rank_0(model, tmp_path):
    (tmp_path / "sources.toml").write_text(SOURCES)
    args = ["--config", QUICKSTART, "--config", str(tmp_path / "sources.toml"), "--model.name", model]
    args += ["--warmup.steps", "12", "--warmup.scheduler.type", "constant", "--trainer.scheduler.type", "constant"]
    args += ["--max-steps", "3", "--orchestrator.batch-unit", "groups", "--orchestrator.batch-size", "4"]
    args += ["--orchestrator.group-size", "8", "--orchestrator.eval.tasks", "4", "--orchestrator.eval.samples", "1"]
    done = run(tmp_path / "run", args)
    assert done.returncode == 0, done.output[-4000:]
    steps = done.phase("rl")
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert steps[-1]["perf/pool/rollouts/calculator"] > 0 and steps[-1]["perf/pool/workers/calculator"] == 1
    assert steps[-1]["perf/pool/deaths/calculator"] == 0
    assert all(record["episodes/no_reward"] == 0 for record in steps)
    evaluation = done.phase("eval")[-1]
    assert {"eval/calculator/reward", "eval/guess/reward"} <= evaluation.keys()
    samples = [json.loads(line) for path in (done.folder / "rollouts").glob("*.jsonl") for line in path.open()]
    shown = json.dumps(samples)
    assert re.search("calculate [0-9]+", shown), "a question of the calculator"
    assert re.search("[0-9]+-[0-9]+", shown), "a range to guess in"
