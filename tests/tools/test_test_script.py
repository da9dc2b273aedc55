"""tools/test.sh with stand-ins for the checkers: all parts run, one failure is enough, the closing lines stay."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PARTS = 6


@pytest.fixture
def checkout(tmp_path):
    for folder in ("launch", "tools", ".venv/bin", ".ci"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("tools/test.sh", ".ci/run"):
        shutil.copy(REPO / name, tmp_path / name)
    (tmp_path / "launch/setup.sh").write_text('[ "$1" = dev ]\n')
    for name in ("ruff", "mypy", "pytest"):
        command = tmp_path / ".venv/bin" / name
        command.write_text(
            '#!/bin/bash\necho "$(basename "$0") $* ${TORCH_DISTRIBUTED_DEBUG:-} ran" | tee -a "$CALLS"\n'
            'case "$0 $*" in *"$FAILS_ON"*) echo it broke; exit 1 ;; esac\n'
        )
        command.chmod(0o755)
    return tmp_path


def run(checkout: Path, fails_on: str) -> tuple[int, str, list[str]]:
    calls = checkout / "calls"
    done = subprocess.run(
        [checkout / ".ci/run"],
        cwd=checkout,
        env=os.environ | {"FAILS_ON": fails_on, "CALLS": str(calls)},
        text=True,
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout, calls.read_text().splitlines()


def test_all_parts_run_and_pass(checkout):
    code, output, calls = run(checkout, "nothing at all")
    assert (code, len(calls)) == (0, PARTS)
    (groups,) = (call for call in calls if "tests/distributed" in call and "ignore" not in call)
    assert groups.endswith("DETAIL ran")
    assert [call.endswith("DETAIL ran") for call in calls].count(True) == 1
    closing = output.splitlines()[-PARTS:]
    assert all(line.startswith("ok") and line.endswith("ran") for line in closing)


@pytest.mark.parametrize(
    "broken", ["ruff check", "ruff format", "mypy", "--ignore tests/e2e", "loadfile tests/distributed", "20 tests/e2e"]
)
def test_one_failure_fails_the_whole_after_all_parts_ran(checkout, broken):
    code, output, calls = run(checkout, broken)
    assert code != 0 and len(calls) == PARTS
    (failed,) = [line for line in output.splitlines()[-PARTS:] if line.startswith("FAILED")]
    assert failed.endswith("it broke")
