"""A recorded run is taken again: whole, or its training alone; and what differs is found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.observe.metrics import read_metrics
from spmd_rl.orchestrator.past import JOURNAL
from spmd_rl.orchestrator.records import AnyRecord, Steered
from spmd_rl.world.journal import Journal, read
from tests.e2e.runner import ROOT, Run, run
from tests.e2e.test_lockstep import LOCKSTEP, assert_its_lag, assert_same


def replay(*args: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "tools/replay.py"), *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def recorded(model, tmp_path_factory) -> Run:
    """A run in lockstep with lag 1, one engine that computes anew what new weights change, and a word from outside."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    (folder / "steer").mkdir(parents=True)
    (folder / "steer/1.txt").write_text("@3 set lr=1e-3")
    done = run(folder, [*LOCKSTEP, "--orchestrator.max-lag", "1", "--weights.mode", "recompute", "--model.name", model])
    assert done.returncode == 0, done.output[-4000:]
    assert [record["lr"] for record in done.phase("rl")] == [2e-5, 4e-5, 1e-3, 1e-3, 1e-3]
    return done


def test_a_run_in_lockstep_comes_out_again(recorded):
    """To the last byte of its journal, metrics and weights, as other pairs of runs in test_lockstep.py."""
    assert_its_lag(recorded, 1, "recompute")
    code, said = replay(str(recorded.folder))
    assert code == 0 and "equal: " in said, said[-4000:]
    copy = Path(f"{recorded.folder}-replay")
    assert [r for _, r in read(copy / JOURNAL, AnyRecord) if isinstance(r, Steered)] == [Steered(3, "set lr=1e-3")]
    assert_same(recorded, Run(code, said, copy, list(read_metrics(copy / "metrics.jsonl"))))


def test_its_training_alone_comes_out_again_also_on_two_ranks(recorded):
    code, said = replay(str(recorded.folder), "--train-only")
    assert code == 0 and "equal: 5 optimizer steps" in said and "nearly" not in said, said[-4000:]
    code, said = replay(str(recorded.folder), "--train-only", "--trainers", "2")
    assert code == 0 and "nearly equal, on another number of ranks: 5 optimizer steps" in said, said[-4000:]


def test_what_differs_is_found(recorded, tmp_path):
    """One token of one rollout is another: the journals differ there, and training from that step on."""
    changed = tmp_path / "changed"
    changed.mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        shutil.copy(recorded.folder / name, changed)
    journal = Journal(changed / JOURNAL)
    rolled = 0
    for _, record in read(recorded.folder / JOURNAL, AnyRecord):
        if type(record).__name__ == "Rolled":
            rolled += 1
            if rolled == 40:  # of the second batch
                tokens = record.episode["samples"][0]["tokens"].copy()
                tokens[-2] ^= 1
                record.episode["samples"][0]["tokens"] = tokens
        journal.append(record)
    journal.close()
    code, said = replay(str(recorded.folder), "--against", str(changed))
    assert code == 1 and "differs; before it, in both" in said and "Rolled(" in said
    code, said = replay(str(changed), "--train-only")
    assert code == 1 and "step 2 is the first one that differs: " in said, said[-4000:]


def test_bad_input(recorded, tmp_path):
    code, said = replay(str(tmp_path))
    assert code == 2 and "error:" in said
    free = tmp_path / "free"
    shutil.copytree(recorded.folder, free)
    text = (free / "config.toml").read_text().replace('mode = "lockstep"', 'mode = "free"')
    (free / "config.toml").write_text(text)
    code, said = replay(str(free))
    assert code == 2 and "--train-only takes its training again" in said
