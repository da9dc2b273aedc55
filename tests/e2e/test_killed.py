"""A rank that is killed or stopped in mid-run ends the run everywhere, and the screen ends with its name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runner import QUICKSTART, Launch, Run

HEARTBEAT_S = 5
TALK = f"{Path(__file__).with_name('environments.py')}:Talk"
ENDLESS = [
    *("--config", QUICKSTART, "--warmup.steps", "0", "--max-steps", "100000", "--orchestrator.eval.tasks", "0"),
    *("--orchestrator.batch-size", "32", "--orchestrator.group-size", "8", "--orchestrator.source.0.env", TALK),
    *("--deadlines.heartbeat-s", str(HEARTBEAT_S)),
]


ROLES = ["orchestrator", "trainer", "inference"]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_is_killed_is_named(model, tmp_path, rank):
    """By torchrun, which sees its child end."""
    with Launch(tmp_path / "run", [*ENDLESS, "--model.name", model]) as launch:
        launch.wait_for_step(2)
        os.kill(launch.pid_of(rank), signal.SIGKILL)
        done = launch.wait(120)
    assert_killed(done, rank)


def test_a_rank_that_is_killed_at_start_is_named(model, tmp_path):
    """While the others still look for it."""
    with Launch(tmp_path / "run", [*ENDLESS, "--model.name", model]) as launch:
        os.kill(launch.pid_of(2), signal.SIGKILL)
        done = launch.wait(120)
    assert_killed(done, 2)


def assert_killed(done: Run, rank: int) -> None:
    assert done.returncode != 0
    assert f"rank      : {rank} (" in done.last_lines() and "SIGKILL" in done.last_lines(), done.output[-4000:]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_is_stopped_is_named(model, tmp_path, rank):
    """By the others, who miss its heartbeat; it is killed too."""
    with Launch(tmp_path / "run", [*ENDLESS, "--model.name", model]) as launch:
        launch.wait_for_step(2)
        os.kill(launch.pid_of(rank), signal.SIGSTOP)
        done = launch.wait(120)
    assert done.returncode != 0
    assert f"rank {rank} ({ROLES[rank]})" in done.last_lines(), done.output[-4000:]
    assert "no sign of life for" in done.last_lines(), done.output[-4000:]
