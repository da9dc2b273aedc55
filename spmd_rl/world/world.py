"""What every rank shares: its place in the mesh, its groups, its watchdog, and the check that all ranks run the same.

`World.join` is the start-up of every rank, in one order: heartbeat, world, comparison of config, packages and code,
hosts and what they share, output folders, models, groups. `leave` is the orderly end. What a rank then does is its
role's business.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from spmd_rl.config.show import config_hash, write_toml
from spmd_rl.config.tree import Config
from spmd_rl.world import flight_recorder, model_copies
from spmd_rl.world.checkpoints import complete, marks
from spmd_rl.world.fingerprint import code_hash, versions
from spmd_rl.world.groups import init_world, make_groups
from spmd_rl.world.hosts import Everyone, Hosts, common_part, folder_problem, savers
from spmd_rl.world.launcher import JOB_FOLDER, STOP_FILE
from spmd_rl.world.mesh import Mesh, Role
from spmd_rl.world.model_copies import Lacks
from spmd_rl.world.pipe import Loopback
from spmd_rl.world.placement import crossings, wrong_hosts
from spmd_rl.world.stop_relay import StopRelay
from spmd_rl.world.watchdog import Watchdog

RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT")


class StartError(RuntimeError):
    """The ranks do not fit together."""


@dataclass(frozen=True)
class World:
    """One rank's view of the run."""

    config: Config  # as this host reads it: with models where they are here
    given: Config  # as the run was given it, equal on all ranks
    mesh: Mesh
    hosts: Hosts
    rank: int
    role: Role
    device: torch.device
    local_rank: int  # index of this rank's accelerator on its host
    groups: dict[str, dist.ProcessGroup]
    watchdog: Watchdog
    resume: str = ""  # the checkpoint to go on from: what the config names, or after a restart by torchrun the latest
    lock: TextIO | None = None  # the keeper of an output folder holds it as long as this is open
    relay: StopRelay | None = None  # of a keeper, where there are several
    loopbacks: dict[str, tuple[Loopback, Loopback]] = field(default_factory=dict)  # of a rank 0 with two roles

    @classmethod
    def join(cls, config: Config, mesh: Mesh, watchdog: Watchdog) -> World:
        """Start this rank; `watchdog` is already posting, so that a rank that dies in here is named."""
        rank, deadlines, began = int(os.environ["RANK"]), config.deadlines, time.time()
        role = mesh.role(rank)
        local_rank = accelerator_index(mesh.spare)
        flight_recorder.arm(config.output_dir)
        with watchdog.stage("join the world", deadlines.start_s):
            init_world(deadlines.collective_s)
        everyone = Everyone(dist.distributed_c10d._get_default_store(), rank, mesh.world_size, deadlines.collective_s)
        with watchdog.stage("compare ranks", deadlines.start_s):
            _compare_ranks(everyone, config, mesh)
            hosts = Hosts.find(everyone, config.output_dir, int(os.environ["LOCAL_RANK"]))
            if rank == 0:
                _judge_placement(config, mesh, hosts)
            lacks = Lacks.of(hosts, everyone.say("models", model_copies.folders_here(config)))
            resume = _judge_hosts(everyone, config, mesh, hosts, lacks)
            lock = prepare_output(config, resume) if rank == hosts.keepers[rank] else None
            everyone.say("folders are ready", None)
        relay = None
        if lock and not hosts.common_folder:
            relay = StopRelay(rank, config.output_dir, began, max(5.0, deadlines.heartbeat_s))
        given, config = config, _fetch_models(everyone, config, lacks, watchdog)
        device = pick_device(config, role, local_rank)
        if device.type == "cuda":
            watchdog.last_words = flight_recorder.FlightRecorder(rank).write
        with watchdog.stage("make groups", deadlines.start_s):
            groups = make_groups(mesh, rank, device, deadlines.collective_s)
        names = ("ctl", "data") if mesh.shares and rank == 0 else ()
        loopbacks = {name: Loopback.both_ends(deadlines.collective_s) for name in names}
        ours = (groups, watchdog, resume, lock, relay, loopbacks)
        return cls(config, given, mesh, hosts, rank, role, device, local_rank, *ours)

    @property
    def common_folder(self) -> bool:
        """Whether all ranks see rank 0's output folder."""
        return self.hosts.common_folder

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
            if self.config != self.given:
                model_copies.remove(self.config)
            if self.relay:
                self.relay.close()
        self.watchdog.close()


def start_beside(run: Callable[[World, Any], None], world: World, output: Any) -> threading.Thread:
    """Rank 0 has another role too: it orchestrates on a thread, whose failure is the rank's."""

    def guarded() -> None:
        try:
            run(world, output)
        except BaseException as error:
            world.watchdog.fail(error)

    import_module("transformers")  # it puts another module in its place while it is imported: not for two threads
    thread = threading.Thread(target=guarded, name="orchestrator", daemon=True)
    thread.start()
    return thread


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
    """An empty output folder with the resolved config in it. An earlier run there moves aside or is resumed.

    Returns the lock, which holds as long as it is open. StartError when another run holds it.
    """
    folder = Path(config.output_dir)
    if (folder / "lock").exists():
        take_lock(folder).close()
    if (folder / "config.toml").exists() and not resume:
        older = next(path for n in range(1, 10**6) if not (path := Path(f"{folder}.{n}")).exists())
        folder.rename(older)
        if (older / JOB_FOLDER).exists():  # of the job that is starting, as is a wish for its end
            folder.mkdir()
            for name in (JOB_FOLDER, STOP_FILE):
                if (older / name).exists():
                    (older / name).rename(folder / name)
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
    facts = {"config": config_hash(config), "code": code_hash(), "python": platform.python_version()}
    return facts | {"mesh": hashlib.sha256(mesh.describe().encode()).hexdigest()[:8]} | versions()


def _compare_ranks(everyone: Everyone, config: Config, mesh: Mesh) -> None:
    """Rank 0 compares all fingerprints and says which ranks differ in what."""
    fingerprints = everyone.say("fingerprint", _fingerprint(config, mesh))
    if everyone.rank == 0 and (difference := describe_differences(fingerprints)):
        raise StartError(difference)


def _judge_hosts(everyone: Everyone, config: Config, mesh: Mesh, hosts: Hosts, lacks: Lacks) -> str:
    """Where to go on from, equal on all ranks; where hosts share no folder, what all of them have a part of.

    StartError on rank 0, with all others waiting, when checkpoints or models can't be where they are needed.
    """
    resume: str = everyone.say("resume", where_to_resume(config))[0]
    problem = folder_problem(config, mesh, hosts, resume)
    if resume and not problem and not hosts.share(savers(mesh)):
        folder = Path(config.output_dir) / "checkpoints" if resume == "latest" else Path(resume).parent
        name, problem = common_part(everyone.say("checkpoints", marks(folder)), hosts, savers(mesh), resume)
        resume = str(folder / name)
    if not config.model.from_rank_0:
        problem = problem or lacks.problem(config, mesh)
    if everyone.rank == 0 and problem:
        raise StartError(problem)
    everyone.say("hosts will do", None)
    return resume


def _judge_placement(config: Config, mesh: Mesh, hosts: Hosts) -> None:
    """On rank 0: warn of groups that cross hosts for nothing. StartError when the mesh took other hosts for granted."""
    if problem := wrong_hosts(config, mesh, hosts.first):
        raise StartError(problem)
    for warning in crossings(mesh, hosts.first):
        print(f"warning: {warning}", file=sys.stderr)


def _fetch_models(everyone: Everyone, config: Config, lacks: Lacks, watchdog: Watchdog) -> Config:
    """The config with models where this host has them."""
    takers = {rank for key in lacks.by_key for rank in lacks.takers(key)}
    if not config.model.from_rank_0 or not takers:
        return config
    takes_part = everyone.rank in {0, *takers}
    with watchdog.stage("copy the model", config.deadlines.start_s if takes_part else None):
        found = model_copies.fetch(config, everyone.rank, lacks, watchdog.beat)
        everyone.say("models are copied", None)
    return found


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
