"""Real engines and trainers in lockstep: two runs are equal bit for bit, and so is one that was killed and taken up.

One more pair of runs is compared in test_replay.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd_rl.observe.names import is_time
from spmd_rl.orchestrator.past import JOURNAL
from spmd_rl.orchestrator.records import AnyRecord, Rolled
from spmd_rl.rollouts.plain import episode_from
from spmd_rl.rollouts.types import Episode, Task
from spmd_rl.world.journal import read
from tests.e2e.runner import QUICKSTART, Launch, Run, run

TALK = f"{Path(__file__).with_name('environments.py')}:Talk"  # of three turns
LOCKSTEP = [
    *("--config", QUICKSTART, "--warmup.steps", "0", "--max-steps", "5", "--trainer.scheduler.type", "constant"),
    *("--orchestrator.eval.tasks", "0", "--orchestrator.batch-size", "32", "--orchestrator.group-size", "8"),
    *("--orchestrator.sampling.max-tokens", "24", "--orchestrator.source.0.env", TALK, "--clock.mode", "lockstep"),
    *("--deadlines.stall-s", "60"),
]


def finished(folder: Path, *args: str, ranks: int = 3) -> Run:
    done = run(folder, [*LOCKSTEP, *args], nproc=ranks)
    assert done.returncode == 0, done.output[-4000:]
    return done


def assert_same(one: Run, other: Run) -> None:
    assert (one.folder / JOURNAL).read_bytes() == (other.folder / JOURNAL).read_bytes(), "see tools/replay.py"
    assert [timeless(record) for record in one.records] == [timeless(record) for record in other.records]
    weights = [load_file(done.folder / "hf/model.safetensors") for done in (one, other)]
    assert all(tensor.tobytes() == weights[1][name].tobytes() for name, tensor in weights[0].items())


def timeless(record: dict) -> dict:
    return {name: value for name, value in record.items() if not is_time(name)}


TASK = Task("talk", 0, {})
STREAMING = ["--weights.staging", "buckets", "--weights.bucket-mb", "0.1"]
TOGETHER = [  # with few requests at a time, so that some are under way when the engines are put to sleep
    *("--deployment.placement", "colocated", "--deployment.train-ranks", "0", "--inference.vllm.max_num_seqs", "6"),
    *("--deployment.infer-ranks", "2"),
]
CASES = [  # with train_ticks 1 the next version is due at the trainer before the last one has left it
    (0, 1, "in_flight", []),
    (0, 2, "drain", STREAMING),
    (1, 2, "in_flight", [*STREAMING, "--clock.train-ticks", "1"]),
    (3, 1, "drain", []),
    (3, 2, "recompute", STREAMING),
]


@pytest.mark.parametrize(("max_lag", "engines", "mode", "flags"), CASES)
def test_two_runs_are_equal(model, tmp_path, max_lag, engines, mode, flags):
    args = [*LOCKSTEP, "--model.name", model, "--orchestrator.max-lag", str(max_lag), "--weights.mode", mode]
    args += ["--deployment.infer-ranks", str(engines), *flags]
    with Launch(tmp_path / "one", args, 2 + engines) as first, Launch(tmp_path / "other", args, 2 + engines) as second:
        one, other = first.wait(), second.wait()  # beside each other: the timing differs all the more
    assert one.returncode == other.returncode == 0, one.output[-4000:]
    assert_same(one, other)
    assert len(one.phase("rl")) == 5
    assert_its_lag(one, max_lag, mode)


def assert_its_lag(done: Run, max_lag: int, mode: str) -> None:
    """Rollouts ran ahead, if they may; and answers hold tokens of several versions, if they may."""
    lags = [record["lag/max"] for record in done.phase("rl")]
    assert max(lags) == 0 if max_lag == 0 else max(lags) >= 1
    turns = [versions for episode in episodes(done) for versions in versions_by_turn(episode)]
    mixed = sum(len(set(versions)) > 1 for versions in turns)
    assert mixed == 0 if mode == "drain" or max_lag == 0 else mixed > 0


def episodes(done: Run) -> list[Episode]:
    """All that were sampled for training."""
    records = read(done.folder / JOURNAL, AnyRecord)
    return [episode_from(record.episode, TASK) for _, record in records if isinstance(record, Rolled)]


def versions_by_turn(episode: Episode) -> list[list[int]]:
    """The versions that sampled each turn."""
    (sample,) = episode.samples
    edges = np.flatnonzero(np.diff(sample.mask.astype(int))) + 1
    return [part.tolist() for part in np.split(sample.versions, edges) if part[0] >= 0]


@pytest.mark.parametrize(("flags", "killed"), [([], 2), (TOGETHER, 1)], ids=["apart", "together on two ranks"])
def test_eight_steps_are_four_steps_a_kill_and_four_steps(model, tmp_path, flags, killed):
    """With requests in flight at the fence, and rollouts that were lost between fence and kill."""
    args = ["--model.name", model, "--max-steps", "8", "--ckpt.interval", "4", "--orchestrator.max-lag", "2", *flags]
    with Launch(tmp_path / "run", [*LOCKSTEP, *args]) as launch:
        launch.wait_for_step(6)
        os.kill(launch.pid_of(killed), signal.SIGKILL)
        assert launch.wait().returncode != 0
    again = finished(tmp_path / "run", *args, "--ckpt.resume", "latest")
    assert "step_000004: version 4 serves" in again.output
    assert_same(finished(tmp_path / "whole", *args), again)
    assert_its_lag(again, 2, "in_flight")
