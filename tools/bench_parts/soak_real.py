"""Does the memory of every rank stay flat? A real run of three ranks for half an hour (SOAK_MINUTES overrides).

Rollouts of three turns, evaluations and checkpoints on the way. Resident memory is read every ten seconds; the verdict
compares the last quarter with the second. An engine touches the pages of its KV cache one by one until all were used
once, so its first quarter rises and says nothing.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.e2e.runner import QUICKSTART, ROOT, Launch  # which finds a run's processes, and ends what is left of it
from tools.bench_parts.ranks import finish, make_model

MINUTES, EVERY_S, TARGET = 30.0, 10.0, 0.02
ROLES = ("orchestrator", "trainer", "engine")
SIZES = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ff": 384}
RUN = [
    *("--config", QUICKSTART, "--warmup.steps", "0", "--max-steps", "1000000", "--trainer.scheduler.type", "constant"),
    *("--orchestrator.batch-size", "64", "--orchestrator.group-size", "8", "--ckpt.interval", "100"),
    *("--orchestrator.eval.tasks", "8", "--orchestrator.eval.interval", "200", "--trainer.optim.lr", "1e-5"),
    *("--orchestrator.source.0.env", f"{ROOT / 'tests/e2e/environments.py'}:Talk"),
]


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    minutes = float(os.environ.get("SOAK_MINUTES", MINUTES))
    samples: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        args = [*RUN, "--model.name", make_model(f"{folder}/model", **SIZES)]
        with Launch(Path(folder) / "run", args) as launch:
            launch.wait_for_step(5)
            pids = [launch.pid_of(rank) for rank in range(len(ROLES))]
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                time.sleep(EVERY_S)
                samples.append([resident_mb(pid) for pid in pids])
            launch.folder.joinpath("stop").touch()
            done = launch.wait(300)
        steps = len(done.phase("rl"))
    quarter = len(samples) // 4
    figures: dict[str, Any] = {"minutes": minutes, "steps": steps, "returncode": done.returncode}
    print(f"{minutes:g} minutes, {steps} steps of 64 rollouts; resident memory in MB, means of the quarters")
    for rank, role in enumerate(ROLES):
        means = [statistics.mean(s[rank] for s in samples[i * quarter : (i + 1) * quarter]) for i in range(4)]
        change = means[3] / means[1] - 1
        verdict = "met" if abs(change) <= TARGET else "MISSED"
        print(f"{role:<13}" + "".join(f"{m:9.1f}" for m in means) + f"   {change:+.2%} ({verdict}: target ± 2%)")
        figures[role] = {"quarters_mb": means, "change": change}
    return finish(figures, json_path)


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
