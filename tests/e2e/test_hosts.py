"""Several machines without a common folder: what a run needs, what it says, and how it ends when one is lost."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.observe.metrics import read_metrics
from tests.e2e.hosts import Hosts, Launched, why_not
from tests.e2e.test_layouts import SHORT

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

PORT = "29500"  # in networks of their own, nobody else has it
HEARTBEAT_S = 5
SILENCE = ["--deadlines.heartbeat-s", str(HEARTBEAT_S)]
PER_NODE = ["--ckpt.per-node", "--ckpt.interval", "2", "--ckpt.keep", "2"]
FAKE = ["--config", "configs/sft.toml", "--data.type", "fake", "--data.fake-length", "64", "--data.batch-size", "8"]
FAKE += ["--seq-len", "256", "--max-steps", "4", "--trainer.scheduler.type", "constant"]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path, 2) as both:
        yield both


def torchrun(hosts: Hosts, processes: list[int], command: str, *args: str) -> Launched:
    """Plain torchrun on every machine."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(processes))]
    start += ["--master-addr", hosts[0].address, "--master-port", PORT]
    program = ["spmd_rl/main.py", command, *args, "--output-dir", str(hosts.disk / "run")]
    places = [["--node-rank", str(i), "--nproc-per-node", str(n)] for i, n in enumerate(processes)]
    return Launched(hosts, [[*start, *place, *program] for place in places], [{} for _ in places])


def node_sh(hosts: Hosts, processes: list[int], command: str, *args: str) -> Launched:
    """launch/node.sh on every machine."""
    program = ["bash", "launch/node.sh", command, *args, "--output-dir", str(hosts.disk / "run")]
    common = {"NNODES": str(len(processes)), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT}
    common |= {"PYTHON": sys.executable}
    envs = [common | {"NODE_RANK": str(i), "NPROC": str(n)} for i, n in enumerate(processes)]
    return Launched(hosts, [program] * len(processes), envs)


def records(hosts: Hosts, phase: str = "rl") -> list[dict[str, Any]]:
    metrics = hosts[0].disk / "run/metrics.jsonl"
    return [record for record in read_metrics(metrics) if record["phase"] == phase] if metrics.exists() else []


def losses(hosts: Hosts) -> list[float]:
    """Of supervised training, by step."""
    return [record["loss"] for record in records(hosts, "sft")]


def checkpoints(hosts: Hosts) -> list[list[str]]:
    return [sorted(path.name for path in (host.disk / "run/checkpoints").iterdir()) for host in hosts]


def only_on_the_first(hosts: Hosts, model: str) -> list[str]:
    """The model's folder on the first machine's disk alone, and the flags for it."""
    shutil.copytree(model, hosts[0].disk / "model")
    return ["--model.name", str(hosts.disk / "model")]


def test_parts_of_checkpoints_outlive_a_cut_link_and_sigterm_anywhere_saves(hosts, model):
    """A trainer on each machine, the model on the first one alone."""
    args = [*SHORT, *SILENCE, *PER_NODE, *only_on_the_first(hosts, model), "--model.from-rank-0"]
    args += ["--deployment.train-ranks", "2", "--max-steps", "100000"]
    with node_sh(hosts, [2, 2], "rl", *args) as run:
        run.until(lambda: len(records(hosts)) >= 5)
        hosts.cut(1)
        codes = run.wait(90)
        assert all(codes), run.screens()
        assert "on host1" in run.screen(0) and "no sign of life for" in run.screen(0)
        assert "lost torchrun's store (no answer from 10.77.0.1:29500" in run.screen(1), run.screen(1)
    hosts.join(1)
    reached = len(records(hosts))
    with node_sh(hosts, [2, 2], "rl", *args, "--ckpt.resume", "latest") as run:
        run.until(lambda: len(records(hosts)) >= reached + 3)
        run.terminate(1)
        assert run.wait(90) == [0, 0], run.screens()
        assert "taken up from" in run.screen(0) and "stopped after step" in run.screen(0)
    steps = [record["step"] for record in records(hosts)]
    assert steps == list(range(1, len(steps) + 1))
    assert all(record["mismatch/k3_mean"] <= 1e-8 for record in records(hosts)[-2:])
    first, second = checkpoints(hosts)  # what was being written when the link was cut is gone
    assert first == second and len(first) == 2 and first[-1] == f"step_{steps[-1]:06d}"
    assert not (hosts[1].disk / "run/from_rank_0").exists()
    assert len(list(hosts[1].disk.glob("run/checkpoints/*/__1_*"))) == 2  # and nothing of the other trainer's
    assert not list(hosts[1].disk.glob("run/checkpoints/*/__0_*"))


def test_one_and_two_processes_over_a_slow_link(hosts, model):
    """The orchestrator alone on its machine; weights stay on the other one, batches and events travel."""
    hosts.slow_down(1)
    with torchrun(hosts, [1, 2], "rl", *SHORT, "--model.name", model) as run:
        assert run.wait() == [0, 0], run.screens()
    assert [record["step"] for record in records(hosts)] == [1, 2, 3, 4]
    assert (hosts[1].disk / "run/hf/model.safetensors").exists()  # where the first trainer is
    assert not (hosts[0].disk / "run/hf").exists()


def test_a_machine_that_dies_is_named_by_the_others(hosts, model):
    args = [*SHORT, *SILENCE, "--model.name", model, "--deployment.train-ranks", "2", "--max-steps", "100000"]
    with torchrun(hosts, [2, 2], "rl", *args) as run:
        run.until(lambda: len(records(hosts)) >= 2)
        hosts[1].kill()
        assert run.wait(90)[0], run.screens()
        assert "on host1" in run.screen(0) and "no sign of life" in run.screen(0), run.screens()


def test_what_needs_a_common_folder_says_so_at_start(hosts, model):
    """And nothing on any disk is touched: the folder of an earlier run stays where it is."""
    for host in hosts:
        (host.disk / "run").mkdir()
        (host.disk / "run/config.toml").write_text("")
    with torchrun(hosts, [1, 1], "sft", *FAKE, "--model.name", model, "--ckpt.interval", "2") as run:
        assert all(run.wait(90)), run.screens()
        for index in (0, 1):
            assert "ckpt.interval = 2 needs a folder" in run.screen(index)
            assert "host0 (rank 0) and host1 (rank 1)" in run.screen(index)
            assert "ckpt.per_node = true" in run.screen(index)
    assert [sorted(path.name for path in host.disk.iterdir()) for host in hosts] == [["run"], ["run"]]
    args = ["--ckpt.interval", "0", *only_on_the_first(hosts, model)]
    with torchrun(hosts, [1, 1], "sft", *FAKE, *args) as run:
        assert all(run.wait(90)), run.screens()
        assert "and not on host1 (rank 1)" in run.screen(1) and "model.from_rank_0 = true" in run.screen(1)
    assert not list(hosts[1].disk.glob("run.*"))


def test_supervised_training_goes_on_from_parts_and_from_all_parts_together(hosts, model):
    """The same ranks need their own parts, and go on exactly; others need all parts. What is missing is said."""
    args = [*FAKE, *PER_NODE, "--ckpt.keep", "0", *only_on_the_first(hosts, model), "--model.from-rank-0"]
    with torchrun(hosts, [1, 1], "sft", *args) as run:
        assert run.wait() == [0, 0], run.screens()
    undisturbed = losses(hosts)
    assert checkpoints(hosts) == [["step_000002", "step_000004"]] * 2
    resume = ["--ckpt.resume", str(hosts.disk / "run/checkpoints/step_000002")]
    parts = [host.disk / "run/checkpoints/step_000002" for host in hosts]
    parts[1].rename(hosts[1].disk / "elsewhere")
    with torchrun(hosts, [1, 1], "sft", *args, *resume) as run:
        assert all(run.wait(90)), run.screens()
        assert "host0 has step_000002, step_000004; host1 has step_000004" in run.screen(0), run.screens()
    (hosts[1].disk / "elsewhere").rename(parts[1])
    with torchrun(hosts, [1, 2], "sft", *args, *resume) as run:
        assert all(run.wait(90)), run.screens()
        assert "it was written by 2 trainer ranks" in run.screens()
    with torchrun(hosts, [1, 1], "sft", *args, *resume) as run:
        assert run.wait() == [0, 0], run.screens()
    assert losses(hosts) == undisturbed
    for path in [path for part in parts for path in part.glob("*.distcp")]:
        for part in parts:
            if part != path.parent:
                shutil.copy(path, part)
    with torchrun(hosts, [1, 2], "sft", *args, *resume) as run:
        assert run.wait() == [0, 0], run.screens()
    assert losses(hosts) == pytest.approx(undisturbed, abs=1e-4)
