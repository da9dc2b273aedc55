"""The doctor as ranks: a world that is well, ranks that never come, die or hang, a slow link, hosts that differ.

Every case is a launch of its own with real process groups; only the machine that the checks of a host see is a fake.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.doctor_worker import AHEAD_S
from tests.distributed.launch import ROOT, Started, environment, start_ranks

WAIT_S = 240.0  # for ranks on a busy machine


@dataclass
class Outcome:
    """What a launch left."""

    codes: dict[int, int]  # of the ranks that end
    output: str
    report: dict[str, Any]

    def lines(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.report["lines"] if line["what"] == what]

    def line(self, what: str) -> dict[str, Any]:
        (one,) = self.lines(what)
        return one


def launch(case: str, size: int, folder: Path, gone: int = -1) -> Outcome:
    """Run a case; rank `gone` does not end by itself."""
    with start_ranks("doctor_worker.py", size, folder, case) as started:
        codes = {rank: wait(started, rank) for rank in range(size) if rank != gone}
        path = folder / "report.json"
        return Outcome(codes, started.output(), json.loads(path.read_text()) if path.exists() else {})


def wait(started: Started, rank: int) -> int:
    try:
        return started.processes[rank].wait(WAIT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"rank {rank} is still running:\n{started.output()}") from None


def test_a_world_that_is_well(tmp_path: Path) -> None:
    seen = launch("well", 3, tmp_path)
    assert set(seen.codes.values()) == {not seen.report["fit"]}, seen.output
    failed = [line["what"] for line in seen.report["lines"] if line["status"] == "FAIL"]
    assert set(failed) <= {"/dev/shm"}, seen.output  # of the machine that runs the tests
    for group in ("ctl", "data", "weights/0", "replica/0", "trainer", "ckpt"):
        assert group in seen.line("groups")["value"]
    assert seen.line("ranks")["value"] == "3 on 1 host"
    assert "code, config, python" in seen.line("equal")["value"]
    assert "6 of 6" in seen.line("links over gloo")["value"]
    assert sorted(pair[:2] for pair in seen.report["links over gloo"]) == [
        [a, b] for a in range(3) for b in range(3) if a != b
    ]
    first, _, others = seen.output.partition("== screen_1.txt")
    assert "sum over gloo" in first and not others.replace("== screen_2.txt", "").strip()  # rank 0 speaks for all


def test_a_slow_link_and_a_clock_that_is_ahead_are_named_with_their_hosts(tmp_path: Path) -> None:
    seen = launch("slow", 4, tmp_path)
    assert len(set(seen.codes.values())) == 1
    named = f"rank 1 ({host(seen, 1)}) → rank 2 ({host(seen, 2)}):"
    (slow,) = (line for line in seen.lines("slow link") if line["value"].startswith(named))
    assert slow["status"] in ("FAIL", "warn") and "cable" in slow["to_do"]
    assert host(seen, 1) == host(seen, 0) != host(seen, 2)  # one machine that says it is two
    clock = seen.line("clocks")
    assert clock["hosts"] == [host(seen, 2)] and clock["status"] == "warn"
    found = float(re.search(r"ahead by ([\d.]+) ms", clock["value"]).group(1)) / 1e3
    assert abs(found - AHEAD_S) < 5.0
    (common,) = (line for line in seen.lines("output folder") if line["group"] == "world")
    assert common["status"] == "ok" and "one folder for all 2 hosts" in common["value"]
    assert not list(Path(ROOT).rglob(".doctor-*")) and not list(tmp_path.rglob(".doctor-*"))


def host(seen: Outcome, rank: int) -> str:
    return seen.report["ranks"][rank]["host"]


def test_a_rank_with_another_config_is_named_and_no_group_is_tried(tmp_path: Path) -> None:
    seen = launch("differ", 3, tmp_path)
    assert set(seen.codes.values()) == {1}
    (config,) = (line for line in seen.lines("config") if line["group"] == "the same everywhere")
    assert config["status"] == "FAIL" and "on rank 2 (" in config["value"] and "flags" in config["to_do"]
    assert not seen.lines("groups")  # they might differ, and the ranks would wait for each other
    assert seen.line("links over gloo")["status"] == "ok"  # the rest is looked at all the same


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_never_comes_is_named(tmp_path: Path, gone: int) -> None:
    seen = launch(f"absent {gone}", 3, tmp_path, gone)
    assert set(seen.codes.values()) == {1}
    assert seen.line("ranks")["value"] == f"of 3 ranks these never came: {gone}"
    assert "torchrun" in seen.line("ranks")["to_do"]
    assert seen.output.count("these never came") == 1, seen.output  # one speaks for all


@pytest.mark.parametrize("case", ["killed", "stopped"])
def test_a_rank_that_is_lost_on_the_way_is_named_with_its_process(tmp_path: Path, case: str) -> None:
    seen = launch(case, 3, tmp_path, gone=1)
    assert set(seen.codes.values()) == {1}
    pid = (tmp_path / "pid_1").read_text()
    assert any(
        line["status"] == "FAIL" and f"rank 1 ({host(seen, 1)}), process {pid}" in line["value"]
        for line in seen.lines("ranks")
    ), seen.output
    assert seen.line("connections")["status"] == "ok"  # what was found before is still said


def test_a_store_that_can_not_be_reached_is_said_by_every_rank(tmp_path: Path) -> None:
    seen = launch("unreachable", 2, tmp_path)
    assert set(seen.codes.values()) == {1}
    assert seen.output.count("no connection to 127.0.0.1:1 within") >= 2, seen.output


@pytest.mark.slow
def test_under_torchrun_with_everything_real(tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "report.json"
    words = f"--config configs/quickstart.toml --model.name some/model --output-dir {run} --json {path}".split()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*command, "spmd_rl/main.py", "doctor", *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    report = json.loads(path.read_text())
    assert done.returncode == (not report["fit"]), done.stderr
    assert not any("could not be checked" in line["value"] for line in report["lines"])
    said = {line["what"]: line["status"] for line in report["lines"]}
    assert said["connections"] == said["groups"] == said["torch"] == said["vllm"] == "ok", done.stdout
    assert not run.exists()  # looking changes nothing
