"""The command that shows what a reward does, on rewards that are fine and on some that are not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = """
def right(completion, row): return float(completion == row["a"])
def same(completion): return 1
def reversed_(completion, row): return float(completion != row["a"])
def length(completion): return min(len(completion), 1)
def raises(completion): raise RuntimeError("no judge")
def text(completion): return "good"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"q": f"{i}", "a": f"{i + 1}"}) for i in range(12)))
    return folder


def check(folder: Path, name: str, *flags: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "tools/check_reward.py"), f"own.py:{name}", "rows.jsonl", *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_a_good_reward(folder):
    code, said = check(folder, "right", "--answer", "a")
    assert code == 0 and "fine" in said
    assert said.count("\nrow ") + said.startswith("row ") == 10 and said.count("right answer") == 11


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("same", "every call gave the same reward"),
        ("reversed_", "does not score highest on rows [0, 1"),
        ("length", "another row's answer scores as much"),
        ("raises", "40 calls gave an error (never a zero"),
        ("text", "must return a number"),
    ],
)
def test_rewards_that_teach_nothing_or_the_wrong_thing(folder, name, says):
    code, said = check(folder, name, "--answer", "a")
    assert code == 1 and says in said, said


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("right", ["--answer", "b"], "has no column 'b'; it has q, a"),
        ("wrong", [], "has no 'wrong'; it has right"),
        ("right", ["--args", "{"], "error: "),
    ],
)
def test_bad_input(folder, name, flags, says):
    code, said = check(folder, name, *flags)
    assert code == 1 and says in said and "Traceback" not in said
