"""Rows of a file and a function as users bring them, through the whole program."""

from __future__ import annotations

from tests.e2e.runner import QUICKSTART, ROOT, run

SHORT = ["--config", QUICKSTART, "--warmup.steps", "12", "--max-steps", "11", "--orchestrator.eval.tasks", "8"]
SMALL = ["--orchestrator.batch-size", "32", "--orchestrator.group-size", "8"]
OWN = ["--config", str(ROOT / "configs/own_data.toml")]


def test_the_example(model, tmp_path):
    done = run(tmp_path / "run", [*SHORT, *SMALL, *OWN, "--model.name", model])
    assert done.returncode == 0, done.output[-4000:]
    for step in done.phase("rl"):
        assert 0 <= step["reward/correct"] <= step["reward/format"] <= 1
        # The batch's own rewards and its parts agree with the weights.
        assert abs(step["reward/mean"] - 0.2 * step["reward/format"] - 0.8 * step["reward/correct"]) < 1e-6
    assert "first batch, some rollouts" in done.output and "task configs/own_data.jsonl #" in done.output
    assert (done.folder / "rollouts/first_step.txt").exists()


def test_a_reward_that_returns_a_text_never_reaches_the_engine(model, tmp_path):
    (tmp_path / "mine.py").write_text("def grade(completion): return 'good'\n")
    args = [*SHORT, *OWN, "--model.name", model, "--orchestrator.source.0.reward", f"{tmp_path}/mine.py:grade"]
    done = run(tmp_path / "run", args, timeout_s=120)
    assert done.returncode != 0
    assert "must return a number or a dict of numbers; it is 'good' (str)" in done.last_lines(), done.output[-3000:]
    assert "own_data.jsonl, line" in done.last_lines() and not done.phase("rl")
