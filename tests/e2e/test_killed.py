"""A rank that is killed or stopped in mid-run ends the run everywhere, and the screen ends with its name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runner import QUICKSTART, Launch

HEARTBEAT_S = 5
TALK = f"{Path(__file__).with_name('environments.py')}:Talk"
ENDLESS = [
    *("--config", QUICKSTART, "--warmup.steps", "0", "--max-steps", "100000", "--orchestrator.eval.tasks", "0"),
    *("--orchestrator.batch-size", "32", "--orchestrator.group-size", "8", "--orchestrator.source.0.env", TALK),
    *("--deadlines.heartbeat-s", str(HEARTBEAT_S)),
]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("rank", "role"), [(0, "orchestrator"), (1, "trainer"), (2, "inference")])
def test_a_rank_that_is_gone_is_named(model, tmp_path, rank, role, how):
    """A killed one by torchrun, which sees its child end; one that is stopped by the others, who miss its heartbeat."""
    with Launch(tmp_path / "run", [*ENDLESS, "--model.name", model]) as launch:
        launch.wait_for_step(2)
        os.kill(launch.pid_of(rank), how)
        done = launch.wait(120)
    assert done.returncode != 0
    end = done.last_lines(8)
    if how == signal.SIGKILL:
        assert f"rank      : {rank} (" in end and "SIGKILL" in end, done.output[-4000:]
    else:
        assert f"rank {rank} ({role})" in end and "no sign of life for" in end, done.output[-4000:]
