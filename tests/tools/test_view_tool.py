"""The command that writes the page: where it goes, what it says, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spmd_rl.observe.samples import write_samples
from spmd_rl.rollouts.types import Episode, Reward, Sample, Task

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Steps 1 to 4 with two episodes each."""
    ones = np.ones(3, np.float32)
    sample = Sample(np.arange(97, 100, dtype=np.int32), np.ones(3, np.uint8), -ones, np.zeros(3, np.int32), ones)
    folder = tmp_path_factory.mktemp("runs") / "first"
    for step in range(1, 5):
        episodes = [Episode(Task("abc", 1, {}), (sample,), Reward(1.0))] * 2
        write_samples(folder, step, episodes, lambda ids: "".join(map(chr, ids)))
    return folder


def view(*words: str | Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, ROOT / "tools/view.py", *map(str, words)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def steps_of(page: Path) -> list[int]:
    line = next(line for line in page.read_text("utf-8").splitlines() if 'id="run">' in line)
    return json.loads(line.partition('id="run">')[2].partition("</script>")[0])["facts"]["step"]


def test_the_page_stands_beside_the_rollouts(run):
    code, said = view(run)
    assert code == 0, said
    assert said == f"{run / 'view.html'}: 8 episodes of 4 steps, 0.1 MB\n"
    assert steps_of(run / "view.html") == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize(
    ("given", "steps"), [("2:3", [2, 2, 3, 3]), (":1", [1, 1]), ("4:", [4, 4]), ("3", [3, 3]), ("4:99", [4, 4])]
)
def test_steps_are_chosen_with_both_ends(run, tmp_path, given, steps):
    code, said = view(run, "--steps", given, "--out", tmp_path / "deep/er.html")
    assert code == 0, said
    assert steps_of(tmp_path / "deep/er.html") == steps


def test_what_is_left_out_is_said(run, tmp_path):
    view(run, "--out", tmp_path / "whole.html")
    size = (tmp_path / "whole.html").stat().st_size
    code, said = view(run, "--out", tmp_path / "view.html", "--max-mb", f"{(size + 3000) / 1e6:.6f}")
    assert code == 0 and "left out to stay within" in said and "--steps" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "9:3"], "ends before it begins"),
        (["--steps", "a:b"], "'a:b' is no range of steps; write 10:20"),
        (["--steps", "²:3"], "is no range of steps"),
        (["--steps", ""], "is no range of steps"),
        (["--steps", "50:60"], "no rollouts of these steps; it has 4 from 1 to 4"),
        (["--max-mb", "0"], "is no size in megabytes"),
        (["--max-mb", "much"], "is no size in megabytes"),
        (["--max-mb", "0.01"], "not one of 8 episodes fits into 0.01 MB"),
    ],
)
def test_what_can_not_be_done_is_said(run, tmp_path, words, says):
    code, said = view(run, "--out", tmp_path / "view.html", *words)
    assert code == 2 and says in said and "Traceback" not in said
    assert not (tmp_path / "view.html").exists()


def test_folders_without_a_run_are_refused(tmp_path):
    code, said = view(tmp_path / "nowhere")
    assert code == 2 and said.startswith("error: there is no folder")
    code, said = view(tmp_path)
    assert code == 2 and "has no rollouts/step_*.jsonl: is it the output folder of a run" in said


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/step_000007.jsonl").write_text('{"step": 7}\n{"step"\n')
    code, said = view(tmp_path)
    assert code == 2 and "step_000007.jsonl, line 1 is broken" in said and "Traceback" not in said
