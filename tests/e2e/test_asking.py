"""A model that is only asked: evaluated, and given prompts to complete, on engines without a trainer."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.e2e.runner import QUICKSTART, Launch, run

pytestmark = pytest.mark.slow


def test_evaluation_of_a_folder(model: str, tmp_path: Path) -> None:
    args = ["--config", QUICKSTART, "--model.name", model, "--orchestrator.eval.tasks", "6"]
    done = run(tmp_path / "run", args, nproc=3, command="eval")  # two replicas
    assert done.returncode == 0, done.output[-4000:]
    plain = json.loads((tmp_path / "run/eval/step_000000.json").read_text())
    assert [task["index"] for task in plain["tasks"]] == list(range(6))
    assert all(len(task["rewards"]) == 4 and task["versions"] == [0, 0] for task in plain["tasks"])
    (record,) = done.phase("eval")
    assert record["eval/rollouts"] == 30 and record["eval/failed"] == 0
    assert record["eval/reward"] == plain["sources"]["reverse"]["reward"]
    assert "pass@4" in done.output and "Traceback" not in done.output


def test_completions_are_gone_on_with(model: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"word": f"{i:04d}"}) + "\n" for i in range(400)))
    args = ["--model.name", model, "--seq-len", "64", "--orchestrator.sampling.max-tokens", "40"]
    args += ["--generate.input", str(rows), "--generate.prompt", "{word}:", "--generate.at-once", "8"]
    written = tmp_path / "run/generations.jsonl"
    with Launch(tmp_path / "run", args, 2, command="generate", torchrun=False) as launch:
        while not written.exists() or written.read_bytes().count(b"\n") < 20:
            assert not launch.ended, launch.output[-4000:]
            time.sleep(0.1)
        launch.terminate()
        done = launch.wait()
    assert done.returncode == 0 and "stopped; start again" in done.output, done.output[-4000:]
    before = written.read_bytes()
    assert 20 <= before.count(b"\n") < 400
    elsewhere = ["--generate.output", str(written), "--generate.at-once", "64"]
    again = run(tmp_path / "again", [*args, *elsewhere], nproc=2, command="generate")
    assert again.returncode == 0, again.output[-4000:]
    assert written.read_bytes().startswith(before)
    records = [json.loads(line) for line in written.read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(400))
    assert all(record["row"] == {"word": f"{record['index']:04d}"} for record in records)
    assert all(1 <= record["completions"][0]["tokens"] <= 40 for record in records)


def test_a_prompt_that_is_too_long_is_said_in_its_row(model: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"word": "x" * 99}) + "\n" + json.dumps({"word": "y"}) + "\n")
    args = ["--model.name", model, "--seq-len", "64", "--orchestrator.sampling.max-tokens", "4"]
    args += ["--generate.input", str(rows), "--generate.prompt", "{word}"]
    done = run(tmp_path / "run", args, nproc=2, command="generate")
    assert done.returncode == 0, done.output[-4000:]
    first, second = map(json.loads, (tmp_path / "run/generations.jsonl").read_text().splitlines())
    assert first["completions"][0]["stop_reason"] == "too_long" and "99 tokens" in first["completions"][0]["error"]
    assert second["completions"][0]["tokens"] == 4 or second["completions"][0]["stop_reason"] == "stop"
