"""How long until a run decides something, and how long until it goes on after a machine was lost?

`start`: eight processes on this machine, from the command to the first record of the journal. The raw limit, in the
same run: as many processes at once that only import what their roles need; models and engines are built in the first
figure only. CPU seconds are said too, of all processes together: other load on the machine does not change them.

`lost`: two machines in network namespaces without a common folder, the link between them is cut; from the moment the
first one notices, over the end of both, the mended link and the restart by the same command, to the first rollout of
the new attempt. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmd_rl.orchestrator.past import JOURNAL
from spmd_rl.orchestrator.records import AnyRecord, Began, Rolled
from spmd_rl.world.journal import read
from tests.e2e.hosts import Hosts, Launched, why_not
from tests.e2e.runner import QUICKSTART, Launch
from tools.bench_parts.ranks import finish, make_model

TRAINERS, ENGINES = 3, 4  # and the orchestrator
START_S, LOST_S, TIMEOUT_S = 25.0, 60.0, 600.0  # targets of the first two
SIZES = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ff": 384}
RUN = [
    *("--config", QUICKSTART, "--warmup.steps", "0", "--max-steps", "100000", "--trainer.scheduler.type", "constant"),
    *("--orchestrator.eval.tasks", "0", "--orchestrator.batch-size", "64", "--orchestrator.group-size", "8"),
    *("--trainer.optim.lr", "1e-5"),
]
IMPORTS = {
    "orchestrator": "import spmd_rl.orchestrator.role; from transformers import AutoTokenizer",
    "trainer": "import spmd_rl.trainer.role; from transformers import AutoConfig",
    "engine": "import spmd_rl.inference.role; from vllm.v1.engine.llm_engine import LLMEngine",
}


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(f"{folder}/model", **SIZES)
        figures: dict[str, Any] = {"start": measure_start(Path(folder), model)}
        if why_not():
            print(f"lost machine: not measured, {why_not()}")
        else:
            figures["lost"] = measure_lost(Path(folder), model)
    return finish(figures, json_path)


def measure_start(folder: Path, model: str) -> dict[str, float]:
    """Seconds from the command to the first record, and of bare imports."""
    count = 1 + TRAINERS + ENGINES
    layout = ["--deployment.train-ranks", str(TRAINERS), "--deployment.infer-ranks", str(ENGINES)]
    raw_s, raw_cpu_s = seconds_of_imports()
    started = time.monotonic()
    with Launch(folder / "start", [*RUN, *layout, "--model.name", model], count) as launch:
        wait_for(lambda: first_decision(folder / "start"))
        start_s = time.monotonic() - started
        cpu_s = sum(cpu_seconds(pid) for pid in launch.processes())
        launch.wait_for_step(1)
        first_step_s = time.monotonic() - started
    cores = len(os.sched_getaffinity(0))
    verdict = "met" if start_s <= START_S else "MISSED"
    print(f"{count} processes on {cores} cores: {start_s:.1f} s to the first decision ({verdict}: target {START_S:g})")
    print(f"  {cpu_s:.1f} s of CPU; bare imports of the same roles, all at once: {raw_cpu_s:.1f} s, in {raw_s:.1f} s")
    print(f"  to the end of the first step: {first_step_s:.1f} s")
    figures = {"start_s": start_s, "cpu_s": cpu_s, "first_step_s": first_step_s}
    return figures | {"raw_s": raw_s, "raw_cpu_s": raw_cpu_s, "cores": cores}


def seconds_of_imports() -> tuple[float, float]:
    """Of as many processes as the run has, at once, which only import: on the clock, and of CPU in all."""
    roles = ["orchestrator", *["trainer"] * TRAINERS, *["engine"] * ENGINES]
    started, cpu = time.monotonic(), children_s()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    processes = [subprocess.Popen([sys.executable, "-c", IMPORTS[role]], env=env) for role in roles]
    for process in processes:
        if process.wait(TIMEOUT_S):
            raise RuntimeError(f"{process.args} failed")
    return time.monotonic() - started, children_s() - cpu


def measure_lost(folder: Path, model: str) -> dict[str, float]:
    """Seconds from the first word of a lost machine to the end of the run, and to the new run's first rollout."""
    args = [*RUN, "--model.name", model, "--deployment.train-ranks", "2", "--ckpt.per-node", "--ckpt.interval", "2"]
    args += ["--deadlines.heartbeat-s", "5"]
    (folder / "lost").mkdir()
    with Hosts(folder / "lost", 2) as hosts:
        journal = hosts[0].disk / "run" / JOURNAL
        with node_sh(hosts, args) as run:
            run.until(lambda: (hosts[0].disk / "run/checkpoints/step_000002").exists())
            hosts.cut(1)
            wait_for(lambda: "no sign of life" in run.screen(0))
            noticed = time.monotonic()
            run.wait(TIMEOUT_S)
        ended_s = time.monotonic() - noticed
        hosts.join(1)
        with node_sh(hosts, [*args, "--ckpt.resume", "latest"]) as run:
            wait_for(lambda: rollouts_since_the_last_start(journal) > 0)
            restart_s = time.monotonic() - noticed
    verdict = "met" if restart_s <= LOST_S else "MISSED"
    print(f"a lost machine of two: from the notice {ended_s:.1f} s to the end of both,")
    print(f"  {restart_s:.1f} s to the first rollout of the next attempt ({verdict}: target {LOST_S:g})")
    return {"ended_s": ended_s, "restart_s": restart_s}


def node_sh(hosts: Hosts, args: list[str]) -> Launched:
    """launch/node.sh with two processes on both machines."""
    command = ["bash", "launch/node.sh", "rl", *args, "--output-dir", str(hosts.disk / "run")]
    common = {"NNODES": "2", "NPROC": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
    common |= {"PYTHON": sys.executable}
    return Launched(hosts, [command] * 2, [common | {"NODE_RANK": str(index)} for index in range(2)])


def first_decision(folder: Path) -> bool:
    """Whether rank 0 has decided anything beyond that it begins."""
    journal = folder / JOURNAL
    return journal.exists() and any(not isinstance(record, Began) for _, record in read(journal, AnyRecord))


def rollouts_since_the_last_start(journal: Path) -> int:
    """Finished rollouts of the last attempt; 0 before it has begun."""
    records = [record for _, record in read(journal, AnyRecord)] if journal.exists() else []
    starts = [place for place, record in enumerate(records) if isinstance(record, Began)]
    if len(starts) < 2:
        return 0
    return sum(isinstance(record, Rolled) for record in records[starts[-1] :])


def cpu_seconds(pid: int) -> float:
    """What a process has taken so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def children_s() -> float:
    """CPU seconds of children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def wait_for(what: Callable[[], bool]) -> None:
    """RuntimeError when it does not become true in time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not what():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited for {TIMEOUT_S:g} s")
        time.sleep(0.05)
