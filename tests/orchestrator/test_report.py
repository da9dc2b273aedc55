"""What a run leaves behind: records with all the figures people look for, readable rollouts, warnings."""

from __future__ import annotations

import asyncio
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spmd_rl.config.tree import Config, LogConfig
from spmd_rl.observe.metrics import Metrics, read_metrics
from spmd_rl.observe.progress import Progress
from spmd_rl.orchestrator import report as report_module
from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.report import Report
from tests.orchestrator.fake_cluster import BYTES, Delays, Misbehaviour
from tests.orchestrator.fake_run import PROMPT, FakeEnvironment, Run, make_config, train

STEP_KEYS = {
    "": ["step", "version", "loss", "grad_norm", "entropy", "rollouts"],
    "reward/": ["mean", "std"],
    "tokens/": ["trained", "sampled"],
    "lag/": ["mean", "max"],
    "mismatch/": ["k3_mean", "k3_max", "tokens"],
    "offpolicy/": ["k3_mean"],
    "time/": ["step_s", "wait_s"],
    "weights/": ["bytes", "pull_s", "stall_s"],
    "perf/": ["trainer_tokens_per_s", "engine_tokens_per_s"],
}


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that makes a run with a real report, in virtual time too; (records, screen, run)."""
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time(), process_time=time.process_time)
    monkeypatch.setattr(report_module, "time", clock)

    def make(config: Config, *args: Any, **options: Any) -> tuple[list[dict[str, Any]], str, Run]:
        screen = io.StringIO()
        folder = tmp_path / "run"
        config = replace(config, output_dir=str(folder))

        def report(link: Link) -> Report:
            metrics = Metrics(folder, tensorboard=False)
            totals = {"warmup": config.warmup.steps, "rl": config.max_steps}
            return Report(config, link, metrics, Progress("plain", totals, screen), decode=str)

        made = train(config, *args, report=report, **options)
        return list(read_metrics(folder / "metrics.jsonl")), screen.getvalue(), made

    return make


def of_phase(records: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [record for record in records if record["phase"] == phase]


def rollouts_of(made: Run, name: str) -> list[dict[str, Any]]:
    text = (Path(made.config.output_dir) / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_leaves_one_record_per_step_and_evaluation_in_order(reported) -> None:
    records, _, made = reported(make_config(max_steps=4, warmup_steps=2, eval_tasks=1, eval_interval=2, max_lag=1))
    assert [(record["phase"], record["step"]) for record in records] == [
        ("warmup", 1),
        ("warmup", 2),
        ("start", 0),
        ("eval", 0),
        ("rl", 1),
        ("rl", 2),
        ("eval", 2),
        ("rl", 3),
        ("rl", 4),
        ("eval", 4),
    ]
    assert all("eval/reward" in record and "eval/greedy" in record for record in of_phase(records, "eval"))
    assert [record["step"] for record in made.report.evaluations] == [0, 2, 4]


def test_a_step_says_everything(reported) -> None:
    records, screen, _ = reported(make_config(max_steps=3, groups=3, group_size=4, max_lag=0), replicas=2)
    for step, record in enumerate(of_phase(records, "rl"), start=1):
        missing = [part + key for part, keys in STEP_KEYS.items() for key in keys if record.get(part + key) is None]
        assert missing == []
        assert record["version"] == record["step"] == step
        assert record["rollouts"] == 12
        assert record["weights/bytes"] == BYTES
        assert record["mismatch/tokens"] == 2 * 7
        assert record["lag/mean"] == record["lag/max"] == 0
        assert "nonfinite" not in record
    assert screen.count("rl ") == 3


def test_without_a_probe_no_record_speaks_of_a_mismatch(reported) -> None:
    records, screen, _ = reported(make_config(max_steps=2), probe=[])
    assert not [key for record in records for key in record if key.startswith("mismatch")]
    assert "warning" not in screen


def test_lags_are_those_of_the_batch(reported) -> None:
    records, _, _ = reported(make_config(max_steps=6, max_lag=1), delays=Delays(train=50.0))
    assert [record["lag/mean"] for record in of_phase(records, "rl")] == [0, 1, 1, 1, 1, 1]


def test_the_largest_lag_is_not_the_mean(reported) -> None:
    steps = of_phase(reported(make_config(max_steps=8, max_lag=3, groups=3), delays=Delays(train=2.0))[0], "rl")
    assert all(record["lag/max"] == int(record["lag/max"]) >= record["lag/mean"] for record in steps)
    assert any(record["lag/max"] > record["lag/mean"] for record in steps)


def test_times_and_rates_add_up(reported) -> None:
    records, _, made = reported(make_config(max_steps=6, groups=3), delays=Delays(train=3.0), replicas=2)
    steps = of_phase(records, "rl")
    lengths = [sum(map(len, documents)) for documents in made.cluster.trained()]
    assert [record["perf/trainer_tokens_per_s"] for record in steps] == pytest.approx([n / 3 for n in lengths])
    sampled = sum(len(answer.tokens) for answer in made.cluster.answers.values())
    assert sum(record["tokens/sampled"] for record in steps) == sampled
    for record in steps:
        assert record["perf/engine_tokens_per_s"] == pytest.approx(record["tokens/sampled"] / record["time/step_s"])
        assert 0 <= record["perf/engine_busy"] <= 1
    export_s, start_s = made.cluster.delays.export, 0.1 + 0.4 + 0.1  # to version 0 on the slower replica, and its probe
    assert sum(record["time/step_s"] for record in steps) == pytest.approx(made.seconds - export_s - start_s)


def test_the_first_evaluation_is_no_part_of_the_first_step(reported) -> None:
    delays = Delays(generate=1000.0, tail=1e9, train=1.0)  # generations of 100 s
    alone, after = (
        of_phase(reported(make_config(max_steps=1, eval_tasks=tasks), delays=delays)[0], "rl")[0] for tasks in (0, 2)
    )
    assert after["time/step_s"] == pytest.approx(alone["time/step_s"], abs=0.5)
    assert after["tokens/sampled"] <= 4 * 4  # four rollouts of at most four tokens


def test_a_later_evaluation_runs_beside_training_and_no_time_or_token_is_lost(reported) -> None:
    delays = Delays(generate=100.0, tail=9.0)
    records, _, made = reported(make_config(max_steps=5, eval_tasks=3, eval_interval=2, max_lag=1), delays=delays)
    steps = of_phase(records, "rl")
    assert min(record["time/step_s"] for record in steps) > 0.5
    before = {id for id in made.cluster.requests if id < 9}  # the evaluation at the start: 3 tasks × (1 + 2)
    after = set(sorted(made.cluster.requests)[-9:])  # and the one at the end
    meanwhile = set(made.cluster.requests) - before - after
    tokens = sum(len(made.cluster.answers[id].tokens) for id in meanwhile)
    assert sum(record["tokens/sampled"] for record in steps) == tokens


def test_a_mismatch_is_warned_of_on_the_screen_with_its_version(reported) -> None:
    wrong = Misbehaviour(disagree=lambda rank, version, logprobs: logprobs + np.float32(version in (0, 2)))
    records, screen, _ = reported(make_config(max_steps=3), misbehaviour=wrong)
    assert [line.split(":")[1] for line in screen.splitlines() if line.startswith("warning")] == [
        " version 0",
        " version 2",
    ]
    assert "k3 3.68e-01 over 7 tokens" in screen
    assert [record["mismatch/above_limit"] for record in records if record["phase"] in ("start", "rl")] == [1, 0, 1, 0]


def test_written_rollouts_show_the_advantages_that_were_trained_on(reported) -> None:
    async def fails_once(number: int, task) -> None:
        if number == 5:
            raise RuntimeError

    config = replace(make_config(max_steps=2, groups=2, group_size=4), log=LogConfig(rollouts_per_step=100))
    _, _, made = reported(config, [FakeEnvironment(act=fails_once)], trainers=1)
    for step in (1, 2):
        rows = rollouts_of(made, f"rollouts/step_{step:06d}.jsonl")
        assert len(rows) == 8
        failed = [row for row in rows if row["reward"] is None]
        assert [row["status"] for row in failed] == (["failed"] if step == 1 else [])
        rows = [row for row in rows if row["reward"] is not None]
        for task in {row["task"] for row in rows}:
            rewards = [row["reward"] for row in rows if row["task"] == task]
            advantages = [row["advantage"] for row in rows if row["task"] == task]
            assert advantages == pytest.approx([reward - np.mean(rewards) for reward in rewards])
        assert any(row["advantage"] for row in rows)
        on_the_wire = weights_on_the_wire(made, step).values()
        sampled = sum(row["sampled_tokens"] for row in rows)
        assert sorted(on_the_wire) == pytest.approx(sorted(row["advantage"] / sampled for row in rows), rel=1e-6)


def weights_on_the_wire(made: Run, step: int) -> dict[tuple[int, ...], float]:
    """The policy weight that each document of a step was trained with, by the document's tokens."""
    (order,) = [orders[0] for orders in made.cluster.orders if getattr(orders[0], "step", None) == step]
    found = {}
    for row in (row for minibatch in order.rows for row in minibatch):
        starts = row["cu_seqlens"][1:-1]
        for tokens, weights in zip(np.split(row["tokens"], starts), np.split(row["pg_weight"], starts), strict=True):
            if tokens[0] >= PROMPT:
                found[tuple(tokens.tolist())] = float(weights[np.argmax(np.abs(weights))])
    return found


@pytest.mark.parametrize(("limit", "written"), [(0, None), (3, 3)])
def test_as_many_rollouts_are_written_as_asked_for(reported, limit: int, written: int | None) -> None:
    config = replace(make_config(max_steps=1, groups=2, group_size=4), log=LogConfig(rollouts_per_step=limit))
    _, _, made = reported(config)
    file = Path(made.config.output_dir) / "rollouts/step_000001.jsonl"
    assert file.exists() == (written is not None)
    assert written is None or len(file.read_text().splitlines()) == written


def test_evaluations_write_their_greedy_rollouts(reported) -> None:
    _, _, made = reported(make_config(max_steps=1, eval_tasks=3))
    rows = rollouts_of(made, "eval/rollouts/step_000001.jsonl")
    assert [row["task"] for row in rows] == [0, 1, 2]
