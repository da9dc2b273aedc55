"""What the other tests of this folder count on: a launch that leaves something behind, or never ends, is an error."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.runner import Launch, run


def instead(script: str) -> tuple[str, ...]:
    """A shell script in place of torchrun."""
    return ("sh", "-c", script, "sh")


def test_a_process_left_behind_is_an_error_and_is_killed(tmp_path):
    launch = Launch(tmp_path / "run", [], wrap=instead("setsid sleep 1000 & sleep 0.2"))
    with launch, pytest.raises(AssertionError, match="still there"):
        launch.wait(60)
    deadline = time.monotonic() + 10
    while launch.processes() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not launch.processes()


def test_shared_memory_left_behind_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.e2e.runner.LEFT_S", 0.5)  # launches beside this one wait longer for it to go
    path = Path("/dev/shm") / f"left-{tmp_path.parent.name}-{tmp_path.name}"
    try:
        with pytest.raises(AssertionError, match=path.name):
            run(tmp_path / "run", [], wrap=instead(f"touch {path}"))
    finally:
        path.unlink()


def test_a_run_without_an_end_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match=r"no end after 0\.5 s"):
        run(tmp_path / "run", [], timeout_s=0.5, wrap=instead("sleep 1000"))
