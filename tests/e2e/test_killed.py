"""A rank that is killed while others still look for it; what happens later is in test_killed_phases.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.e2e.runner import QUICKSTART, Launch, Run

HEARTBEAT_S = 5
TALK = f"{Path(__file__).with_name('environments.py')}:Talk"
ENDLESS = [
    *("--config", QUICKSTART, "--warmup.steps", "0", "--max-steps", "100000", "--orchestrator.eval.tasks", "0"),
    *("--orchestrator.batch-size", "32", "--orchestrator.group-size", "8", "--orchestrator.source.0.env", TALK),
    *("--deadlines.heartbeat-s", str(HEARTBEAT_S)),
]


ROLES = ["orchestrator", "trainer", "inference"]


def test_a_rank_that_is_killed_at_start_is_named(model, tmp_path):
    """While the others still look for it."""
    with Launch(tmp_path / "run", [*ENDLESS, "--model.name", model]) as launch:
        os.kill(launch.pid_of(2), signal.SIGKILL)
        done = launch.wait(120)
    assert_killed(done, 2)


def assert_killed(done: Run, rank: int) -> None:
    assert done.returncode != 0
    assert f"rank      : {rank} (" in done.last_lines() and "SIGKILL" in done.last_lines(), done.output[-4000:]
