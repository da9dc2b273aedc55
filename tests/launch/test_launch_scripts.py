"""The scripts of launch/: what they start on one machine, on several, and how they refuse; the Kubernetes example."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from spmd_rl.observe.metrics import read_metrics

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SFT = ["--data.type", "fake", "--data.batch-size", "4", "--data.fake-length", "32", "--seq-len", "64"]
SFT += ["--data.validation-share", "0", "--log.no-timeline", "--log.no-tensorboard"]
JOBSET = LAUNCH / "k8s/jobset.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from spmd_rl.models.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, make_byte_tokenizer
    from spmd_rl.models.tiny import make_tiny

    folder = str(tmp_path_factory.mktemp("model"))
    make_byte_tokenizer(folder)
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "ff": 64}
    return make_tiny(folder, seed=0, vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID, pad_token_id=PAD_ID, **sizes)


def started(script: str, *args: str, wrap: tuple[str, ...] = (), **env: str) -> subprocess.Popen[str]:
    """A script of launch/ with this interpreter, in a session of its own."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "MASTER", "NPROC"))}
    return subprocess.Popen(
        [*wrap, "bash", str(LAUNCH / script), *args],
        env=clean | {"PYTHON": shutil.which("python") or "", "SPMD_RL_MEET_S": "60"} | env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(script: str, *args: str, **env: str) -> tuple[int, str]:
    process = started(script, *args, **env)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def free_port() -> int:
    with socket.create_server(("", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCH.glob("*.sh")))
def test_every_script_is_one(script: str) -> None:
    assert subprocess.run(["bash", "-n", LAUNCH / script]).returncode == 0


# --- one machine ---------------------------------------------------------------------------------------------------


def test_local_starts_what_the_config_needs(model: str) -> None:
    code, output = run("local.sh", "rl", "--model.name", model, "--dry-run")
    assert code == 0 and "mesh of 3 ranks" in output, output
    code, output = run("local.sh", "rl", "--model.name", model, "--dry-run", NPROC="5")
    assert code == 0 and "mesh of 5 ranks" in output, output


def test_a_signal_to_every_process_saves_and_ends_well(model: str, tmp_path: Path) -> None:
    """As clusters send it: to the launcher, to torchrun and to the ranks."""
    folder = tmp_path / "run"
    process = started("local.sh", "sft", *SFT, "--model.name", model, "--max-steps", "100000",
                      "--output-dir", str(folder), NPROC="2")  # fmt: skip
    try:
        wait_for_step(process, folder, 3)
        for pid in family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    finally:
        end(process)
    assert process.returncode == 0 and "stopped after step" in output, output
    assert list((folder / "checkpoints").glob("step_*[0-9]"))


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while not any(record["phase"] == "sft" and record["step"] >= step for record in records(folder)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=30)[0]
        time.sleep(0.1)


def records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return list(read_metrics(path)) if path.exists() else []


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def end(process: subprocess.Popen[str]) -> None:
    for pid in family(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


# --- several machines by hand --------------------------------------------------------------------------------------


def test_two_nodes_train_as_one_world(model: str, tmp_path: Path) -> None:
    """On one machine, with two processes and with one; the console shows what rank 0 says, and no more."""
    world = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    args = ["sft", *SFT, "--model.name", model, "--max-steps", "3", "--output-dir", str(tmp_path / "run")]
    nodes = [started("node.sh", *args, NODE_RANK=rank, FIRST_NPROC="2", NPROC="1", **world) for rank in "10"]
    second, first = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], first + second
    assert "sft       3/3" in first and second == ""
    assert len(first.splitlines()) < 20
    logs = sorted(path.name for path in (tmp_path / "run/logs").iterdir())
    assert logs == ["rank_00000.log", "rank_00001.log", "rank_00002.log"]


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, ...]]]:
    """Commands that run others on two hosts, which are network namespaces with one cable between them."""
    names = [f"spmd{os.getpid()}{end}" for end in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"cable{i}")
            ip("-n", name, "link", "set", f"cable{i}", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"") or str(error).encode()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        pytest.skip(f"no network namespaces here: {reason.decode().strip()}")
    yield [("ip", "netns", "exec", name) for name in names]
    for name in names:
        ip("netns", "del", name)


def test_two_hosts_find_the_interface_between_them(model: str, tmp_path: Path, hosts: list[tuple[str, ...]]) -> None:
    """Neither host knows the other's name, and lo leads nowhere."""
    world = {"NNODES": "2", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "NPROC": "1"}
    args = ["sft", *SFT, "--model.name", model, "--max-steps", "100000", "--output-dir", str(tmp_path / "run")]
    nodes = [started("node.sh", *args, wrap=host, NODE_RANK=str(i), **world) for i, host in enumerate(hosts)]
    try:
        wait_for_step(nodes[0], tmp_path / "run", 2)
        for i, node in enumerate(nodes):
            seen = {word for pid in family(node.pid) for word in Path(f"/proc/{pid}/environ").read_text().split("\0")}
            assert {f"GLOO_SOCKET_IFNAME=cable{i}", f"NCCL_SOCKET_IFNAME=cable{i}"} <= seen
        (tmp_path / "run/stop").touch()
        outputs = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        for node in nodes:
            end(node)
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)


def test_a_world_that_does_not_fit_is_refused_on_every_node(model: str, tmp_path: Path) -> None:
    world = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NPROC": "1"}
    args = ["rl", "--model.name", model, "--inference.tp", "2", "--output-dir", str(tmp_path / "run")]
    nodes = [started("node.sh", *args, NODE_RANK=rank, **world) for rank in "01"]
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2]
    assert all("2 ranks do not fit" in output for output in outputs) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({}, "NNODES is not set"),
        ({"NNODES": "2", "NPROC": "1"}, "NODE_RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({"NNODES": "2", "NODE_RANK": "1", "NPROC": "1", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"},
         "can't be resolved"),
        ({"NNODES": "2", "NODE_RANK": "1", "NPROC": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
          "SPMD_RL_MEET_S": "1"}, "could not reach node 0 at 127.0.0.1:1"),
        ({"NNODES": "2", "NODE_RANK": "1", "NPROC": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
         "--nproc-per-node needs a number"),
    ],
)  # fmt: skip
def test_node_refuses_what_it_can_not_work_with(model: str, env: dict[str, str], says: str) -> None:
    code, output = run("node.sh", "sft", *SFT, "--model.name", model, **env)
    assert code == 2 and says in output, output


# --- a task of Slurm -----------------------------------------------------------------------------------------------

TASK = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[3-4]",
}
SCONTROL = """#!/bin/bash
case "$*" in
    "show hostnames gpu[3-4]") printf 'gpu3\\ngpu4\\n' ;;
    "--oneliner show node gpu3") echo "NodeName=gpu3 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=gpu3" ;;
    *) exit 1 ;;
esac
"""


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """scontrol, and an interpreter that only says what it was given."""
    python = '#!/bin/bash\necho "$NNODES $NODE_RANK $MASTER_ADDR $MASTER_PORT ${*:2}"\n'
    for name, text in (("scontrol", SCONTROL), ("python", python)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python")}


def test_a_task_knows_its_node_and_the_first(programs: dict[str, str]) -> None:
    assert run("srun.sh", "rl", **TASK, **programs, NPROC="8") == (0, "2 1 10.1.2.3 22345 rl --nproc-per-node 8\n")
    given = {"MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "5"}
    assert run("srun.sh", "rl", **TASK, **programs, **given) == (0, "2 1 10.9.9.9 5 rl\n")
    first = TASK | {"SLURM_NODEID": "0"}
    assert run("srun.sh", "rl", **first, **programs, NPROC="8", FIRST_NPROC="9")[1].endswith("rl --nproc-per-node 9\n")


def test_srun_refuses_what_is_no_task_or_too_many() -> None:
    code, output = run("srun.sh", "rl")
    assert code == 2 and "no task of Slurm" in output
    code, output = run("srun.sh", "rl", **TASK | {"SLURM_NTASKS": "8"})
    assert code == 2 and "8 tasks on 2 nodes" in output and "--ntasks-per-node=1" in output


# --- Kubernetes ----------------------------------------------------------------------------------------------------


def jobset_problems(example: Any) -> list[str]:
    schema = json.loads(Path(__file__).with_name("jobset_schema.json").read_text())
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(example)]


def test_the_jobset_fits_its_schema_and_its_own_names() -> None:
    example = yaml.safe_load(JOBSET.read_text())
    assert jobset_problems(example) == []
    replicated = example["spec"]["replicatedJobs"][0]
    job = replicated["template"]["spec"]
    env = {entry["name"]: entry.get("value") for entry in job["template"]["spec"]["containers"][0]["env"]}
    assert env["NNODES"] == str(job["parallelism"]) == str(job["completions"])
    pod = f"{example['metadata']['name']}-{replicated['name']}-0-0.{example['spec']['network']['subdomain']}"
    assert env["MASTER_ADDR"] == pod and {"NODE_RANK", "MASTER_PORT"} <= set(env)
    volumes = {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in job["template"]["spec"]["containers"][0]["volumeMounts"]} == volumes


@pytest.mark.parametrize(
    ("old", "new"),
    [("parallelism: 2", "parallelism: two"), ("parallelism: 2", "paralelism: 2"), ("maxRestarts: 5", "maxRestarts: x"),
     ("restartPolicy: Never", "restartPolicy: [Never]"), ("mountPath: /dev/shm", "path: /dev/shm")],
)  # fmt: skip
def test_the_schema_sees_mistakes(old: str, new: str) -> None:
    text = JOBSET.read_text()
    assert old in text and jobset_problems(yaml.safe_load(text.replace(old, new)))


def test_the_jobset_runs_what_there_is() -> None:
    container = yaml.safe_load(JOBSET.read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert (ROOT / container["command"][1]).exists()
    code, output = run("local.sh", *container["args"], "--dry-run")
    assert code == 0, output
