"""Jobs on a real Slurm of two nodes: run to the end, pre-empted, at the time limit, cancelled, a rank killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.observe.metrics import read_metrics
from spmd_rl.world.checkpoints import complete
from tests.e2e.runner import QUICKSTART, ROOT, _environments
from tests.e2e.slurm_cluster import Cluster, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm runs here")]

SFT = ["--data.type", "fake", "--data.batch-size", "4", "--data.fake-length", "32", "--seq-len", "64"]
SFT += ["--data.validation-share", "0", "--log.no-timeline", "--log.no-tensorboard", "--max-steps", "100000"]
NODES = ["--slurm.nodes", "2", "--slurm.cpus", "2"]
AGAIN = ["--slurm.requeue", "--ckpt.interval", "100000"]  # what is saved is saved for the end that is near
URGENT = "#!/bin/bash\n#SBATCH --nodes=2 --exclusive --partition=high --output=/dev/null\nsleep 2\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One Slurm for all tests, in a folder with a name that munge's socket has room for."""
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, Cluster(Path(folder)) as running:
        yield running


class Job:
    """One that `main.py` has submitted; its output folder has a space in its name."""

    def __init__(self, cluster: Cluster, folder: Path, command: str, *args: str) -> None:
        self.cluster, self.folder = cluster, folder
        start = [sys.executable, str(ROOT / "spmd_rl/main.py"), command, *args, *NODES]
        clean = {key: value for key, value in cluster.env.items() if not key.startswith(("SLURM_J", "MASTER"))}
        done = subprocess.run(
            [*start, "--output-dir", str(folder)], env=clean, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        self.id = (folder / "job/id").read_text().strip()
        assert f"job {self.id} " in done.stdout

    @property
    def output(self) -> str:
        path = self.folder / f"job/slurm-{self.id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def steps(self) -> list[int]:
        path = self.folder / "metrics.jsonl"
        records: list[dict[str, Any]] = list(read_metrics(path)) if path.exists() else []
        return [record["step"] for record in records if record["phase"] in ("rl", "sft")]

    def wait_until(self, true: Callable[[], bool], what: str, timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            state = self.cluster.show(self.id, "JobState")
            assert time.monotonic() < deadline, f"{what}: not after {timeout_s:g} s, job is {state}\n{self.output}"
            time.sleep(0.2)

    def wait_for_steps(self, beyond: int = 0) -> None:
        self.wait_until(lambda: max(self.steps, default=0) > beyond + 2, f"steps beyond {beyond}")

    def wait_for_restart(self) -> None:
        """Until the job is queued again, for the first time."""
        self.wait_until(lambda: self.cluster.show(self.id, "Restarts") == "1", "a restart")

    def wait_until_it_goes_on(self) -> None:
        """Until it trains again, from where it was."""
        saved = int(complete(self.folder / "checkpoints")[-1].name[-6:])
        self.wait_for_steps(saved)
        steps = self.steps
        assert steps == list(range(1, len(steps) + 1)), "every step once"
        assert f"stopped after step {saved}" in self.output

    def processes(self) -> dict[int, str]:
        """Live processes of the job, with their ranks."""
        mark, found = f"SLURM_JOB_ID={self.id}".encode(), {}
        for pid, environ in _environments():
            words = environ.split(b"\0")
            if mark in words and f"SLURM_CONF={self.cluster.env['SLURM_CONF']}".encode() in words:
                found[pid] = next((word[5:].decode() for word in words if word.startswith(b"RANK=")), "")
        return found

    def assert_gone(self) -> None:
        self.wait_until(lambda: not self.processes(), "no process left", 30)


def test_a_job_runs_to_its_end(cluster: Cluster, model: str, tmp_path: Path) -> None:
    """RL over two nodes: orchestrator and trainer on one, two engines on the other."""
    args = ["--config", QUICKSTART, "--model.name", model, "--max-steps", "12", "--warmup.steps", "20"]
    args += ["--orchestrator.batch-size", "32", "--orchestrator.group-size", "8", "--orchestrator.eval.tasks", "0"]
    args += ["--deployment.infer-ranks", "2", "--slurm.processes", "2", "--log.console-ranks", "0", "2"]
    job = Job(cluster, tmp_path / "a run", "rl", *args, "--slurm.pre-run", "echo before everything")
    assert cluster.wait_for(job.id) == "COMPLETED", job.output
    assert job.steps == list(range(1, 13)) and (job.folder / "hf/model.safetensors").exists()
    logs = [(job.folder / f"logs/rank_{rank:05d}.log").read_text() for rank in range(4)]
    assert job.output.startswith("before everything\n") and "rl       12/12" in job.output
    said = [{line for line in log.splitlines() if line.strip()} for log in logs]
    shown = set(job.output.splitlines())
    assert said[2] and said[2] <= shown, "a chosen rank"
    assert said[3] and not (said[3] - said[2] - said[0]) & shown, "and no other"
    job.assert_gone()


def test_a_preempted_job_goes_on_and_a_cancelled_one_does_not(cluster: Cluster, model: str, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path / "a run", "sft", *SFT, *AGAIN, "--model.name", model, "--slurm.processes", "1")
    job.wait_for_steps()
    urgent = tmp_path / "urgent.sbatch"
    urgent.write_text(URGENT)
    first = cluster.call("sbatch", "--parsable", str(urgent)).strip()
    job.wait_for_restart()
    job.wait_until_it_goes_on()
    assert cluster.wait_for(first) == "COMPLETED"
    cluster.call("scancel", job.id)
    job.assert_gone()
    assert cluster.wait_for(job.id) == "CANCELLED" and cluster.show(job.id, "Restarts") == "1", job.output
    assert job.output.count("stopped after step") == 2, "it has saved once more"


def test_at_its_time_limit_a_job_saves_and_goes_on_by_itself(cluster: Cluster, model: str, tmp_path: Path) -> None:
    """And then a rank is killed, which ends all nodes, and the job, with its name."""
    limit = ["--slurm.time", "1", "--slurm.signal-s", "20"]
    job = Job(cluster, tmp_path / "a run", "sft", *SFT, *AGAIN, *limit, "--model.name", model, "--slurm.processes", "1")
    job.wait_for_restart()
    cluster.call("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    job.wait_until_it_goes_on()
    os.kill(next(pid for pid, rank in job.processes().items() if rank == "1"), signal.SIGKILL)
    assert cluster.wait_for(job.id) == "FAILED", job.output
    assert "SIGKILL" in job.output and "rank      : 1 (" in job.output
    job.assert_gone()
