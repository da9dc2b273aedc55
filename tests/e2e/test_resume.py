"""A free-running run that is killed or told to stop goes on where it was, on another layout too."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from spmd_rl.orchestrator.past import JOURNAL
from spmd_rl.orchestrator.records import AnyRecord, Rolled, Took
from spmd_rl.world.journal import read
from tests.e2e.runner import Launch, Run, run
from tests.e2e.test_killed import ENDLESS

RUN = [*ENDLESS, "--ckpt.interval", "3", "--trainer.scheduler.type", "constant"]
RESUME = ["--ckpt.resume", "latest"]


def check_whole(done: Run, steps: int) -> None:
    """Every step has one record, one batch and rollouts of its own."""
    assert done.returncode == 0, done.output[-4000:]
    assert [record["step"] for record in done.phase("rl")] == list(range(1, steps + 1))
    records = [record for _, record in read(done.folder / JOURNAL, AnyRecord)]
    taken = [record for record in records if isinstance(record, Took)]
    assert [record.step for record in taken] == list(range(1, steps + 1))
    assert set(Counter(group for record in taken for group in record.groups).values()) == {1}
    rolled = Counter((record.group, record.sample) for record in records if isinstance(record, Rolled))
    assert set(rolled.values()) == {1}
    assert (done.folder / "hf/model.safetensors").exists()


def test_a_killed_run_goes_on_with_more_trainers_and_engines(model, tmp_path):
    folder = tmp_path / "run"
    with Launch(folder, [*RUN, "--model.name", model]) as launch:
        launch.wait_for_step(5)
        os.kill(launch.pid_of(1), signal.SIGKILL)
        assert launch.wait().returncode != 0
    steps = len(launch._records()) + 6
    layout = ["--deployment.train-ranks", "2", "--deployment.infer-ranks", "2", "--max-steps", str(steps)]
    done = run(folder, [*RUN, *RESUME, *layout, "--model.name", model], nproc=5)
    check_whole(done, steps)
    assert "taken up from" in done.output
    for record in done.phase("rl")[-3:]:
        assert record["mismatch/k3_mean"] < 1e-8


def test_sigterm_saves_and_ends_well_and_torchrun_starts_again_by_itself(model, tmp_path):
    folder = tmp_path / "run"
    with Launch(folder, [*RUN, "--model.name", model], torchrun=False) as launch:
        launch.wait_for_step(4)
        launch.terminate()
        stopped = launch.wait(60)
    assert stopped.returncode == 0 and "stopped after step" in stopped.output, stopped.output[-4000:]
    at = int(stopped.output.rpartition("stopped after step ")[2].split(";")[0])
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())][-1] == f"step_{at:06d}"
    args = [*RUN, *RESUME, "--model.name", model, "--max-steps", str(at + 8)]
    with Launch(folder, args, restarts=1) as launch:
        launch.wait_for_step(at + 4)
        os.kill(launch.pid_of(2), signal.SIGKILL)
        done = launch.wait()
    check_whole(done, at + 8)
    assert done.output.count("taken up from") == 2


def test_sigterm_to_torchrun_saves_as_well(model, tmp_path):
    """torchrun itself ends with 1, whatever its ranks do; what matters is on the disk."""
    with Launch(tmp_path / "run", [*RUN, "--model.name", model]) as launch:
        launch.wait_for_step(4)
        launch.terminate()
        done = launch.wait(60)
    assert "stopped after step" in done.output, done.output[-4000:]
    newest = sorted(Path(tmp_path / "run/checkpoints").iterdir())[-1]
    assert int(newest.name[-6:]) >= 4
