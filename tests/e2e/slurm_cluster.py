"""A real Slurm of two nodes on this machine: munge, controller and node daemons, in a folder and on ports of its own.

Both nodes are this machine under two names; jobs are confined by nothing, so they share its cores.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = ("a", "b")
START_S = 30.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,batch_sched_delay=1,sched_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
ReturnToService=2
SlurmdParameters=config_overrides
PartitionName=low Nodes={nodes} Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes={nodes} PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str:
    """What keeps Slurm from running here; empty when nothing does."""
    if os.geteuid():
        return "a Slurm of one's own needs root"
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    return f"not installed: {', '.join(missing)} (apt install slurm-wlm munge)" if missing else ""


class Cluster:
    """Runs while the context is open. folder: a short path, for it holds munge's socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        (self.folder / "munge").mkdir(mode=0o700)
        (self.folder / "state").mkdir()
        key = self.folder / "munge/key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        host, (port, *node_ports) = socket.gethostname(), free_ports(1 + len(NODES))
        lines = [CONF.format(host=host, port=port, folder=self.folder, nodes=",".join(NODES))]
        for name, node_port in zip(NODES, node_ports, strict=True):
            lines.append(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs=4\n")
        (self.folder / "slurm.conf").write_text("".join(lines))
        files = [f"--{name}-file={self.folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        try:
            self._start("munged", "--force", "--foreground", f"--socket={self.folder}/munge/socket", *files)
            self._start("slurmctld", "-D")
            for name in NODES:
                self._start("slurmd", "-D", "-N", name)
            self._wait_for_nodes()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if len(self._daemons) > 1:
            subprocess.run(["scancel", "--user", "root", "--signal", "KILL"], env=self.env, timeout=30, check=False)
            subprocess.run(["scancel", "--user", "root"], env=self.env, timeout=30, check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}-{len(self._daemons)}.log", "wb") as log:
            self._daemons.append(
                subprocess.Popen(command, env=self.env, stdout=log, stderr=log, preexec_fn=_end_with_parent)
            )

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            asked = subprocess.run(["sinfo", "-hN", "-o", "%N %T"], env=self.env, capture_output=True, text=True)
            if set(asked.stdout.splitlines()) == {f"{name} idle" for name in NODES}:
                return
            assert time.monotonic() < deadline, f"no nodes: {asked.stdout}{asked.stderr}{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.log")))

    def call(self, *command: str, timeout_s: float = 60.0) -> str:
        """Output of a command that must do well."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{command}: {done.stderr}{done.stdout}"
        return done.stdout

    def show(self, job: str, key: str) -> str:
        """A field of `scontrol show job`, such as JobState."""
        match = re.search(rf"\b{key}=(\S*)", self.call("scontrol", "--oneliner", "show", "job", job))
        assert match, key
        return match[1]

    def wait_for(self, job: str, states: Sequence[str] = ENDED, timeout_s: float = 300.0) -> str:
        """The state of a job, as soon as it is one of these."""
        deadline = time.monotonic() + timeout_s
        while (state := self.show(job, "JobState")) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state} after {timeout_s:g} s, not {states}"
            time.sleep(0.2)
        return state


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
