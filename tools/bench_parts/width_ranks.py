"""The ranks of `bench width`: `width_ranks.py MODEL TRAINERS ENGINES OUT`. Rank 0 only looks on."""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_rl.config.tree import Config, DeploymentConfig, ModelConfig, WeightsConfig
from spmd_rl.trainer.gather import Gather
from spmd_rl.trainer.learner import Learner
from spmd_rl.trainer.parallel import TrainerMeshes
from spmd_rl.world.buckets import Plan
from spmd_rl.world.groups import as_default, init_world, make_groups
from spmd_rl.world.mesh import Mesh
from spmd_rl.world.weights import Receiver, Sender

BUCKET_MB = 8.0  # many buckets for every sender, as in a large model
ROUNDS = 6  # the first, in which memory is touched for the first time, does not count
CPU = torch.device("cpu")


def die(error: BaseException) -> None:
    print(error, flush=True)
    os._exit(1)


class Watch:
    """The most that this process has grown by since it was begun; None of its numbers is asked for while it sleeps."""

    def __init__(self) -> None:
        self.begin, self.most, self._going = resident(), 0, True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._going:
            self.most = max(self.most, resident() - self.begin)
            time.sleep(0.002)

    def end(self) -> int:
        self._going = False
        self._thread.join()
        return self.most


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train(world: dict, mesh: Mesh, config: Config, index: int) -> dict:
    """A trainer rank: sends every round."""
    with as_default(world["trainer"]):
        meshes = TrainerMeshes.build(mesh.dims, "cpu")
    group = world["trainer"] if len(mesh.trainers) > 1 else None
    learner = Learner(config, meshes if group else None, CPU, group)
    plan = Plan.build(learner.shards.table(), int(config.weights.bucket_mb * 2**20), len(mesh.trainers))
    gather = Gather(learner.shards, plan)
    watch = Watch()
    sender = Sender(plan, index, world[f"weights/{index}"], CPU, die)
    for version in range(ROUNDS):
        sender.wait(60)
        dist.barrier()
        if index == 0:
            dist.broadcast(torch.zeros(plan.nbytes, dtype=torch.uint8), 1, group=raw)
        dist.barrier()
        sender.send(version, gather.write, 60)
        sender.wait(60)
        dist.barrier()
    grown = watch.end()
    sender.close(60)
    sent = sum(bucket.nbytes for bucket in plan.buckets if bucket.sender == index)
    return {"sent": sent, "bytes": plan.nbytes, "grown": grown - (plan.nbytes if index == 0 else 0)}


def infer(world: dict, mesh: Mesh) -> dict:
    """An inference rank: receives every round."""
    arrived = threading.Event()
    receiver = Receiver([world[f"weights/{i}"] for i in range(len(mesh.trainers))], CPU, lambda v: arrived.set(), die)
    plan = receiver.plan(120)
    buffer, raw_s, pull_s = torch.zeros(plan.nbytes, dtype=torch.uint8), [], []
    for version in range(ROUNDS):
        arrived.clear()
        dist.barrier()
        started = time.perf_counter()
        dist.broadcast(buffer, 1, group=raw)
        raw_s.append(time.perf_counter() - started)
        dist.barrier()
        started = time.perf_counter()
        receiver.begin(version)
        arrived.wait(60)
        for _ in receiver.tensors(60):
            pass
        pull_s.append(time.perf_counter() - started)
        dist.barrier()
    receiver.close(60)
    return {"raw_s": statistics.median(raw_s[1:]), "pull_s": statistics.median(pull_s[1:])}


if __name__ == "__main__":
    folder, trainers, engines, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    deployment = DeploymentConfig(train_ranks=trainers, infer_ranks=engines)
    weights = WeightsConfig(bucket_mb=BUCKET_MB)
    config = Config(model=ModelConfig(name=folder), deployment=deployment, weights=weights)
    mesh = Mesh.build(config, 1 + trainers + engines)
    init_world(300)
    rank = dist.get_rank()
    groups = make_groups(mesh, rank, CPU, 300)
    raw = dist.new_group([1, *mesh.inference], backend="gloo")
    said: dict = {}
    if rank in mesh.trainers:
        said = train(groups, mesh, config, mesh.trainers.index(rank))
    elif rank in mesh.inference:
        said = infer(groups, mesh)
    else:
        for _ in range(3 * ROUNDS):
            dist.barrier()
    everyone: list = [None] * mesh.world_size
    dist.all_gather_object(everyone, said)
    if rank == 0:
        senders, receivers = everyone[1 : 1 + trainers], everyone[1 + trainers :]
        pull_s, raw_s = (max(r[name] for r in receivers) for name in ("pull_s", "raw_s"))
        memory = max(s["grown"] for s in senders[1:] or senders) / senders[0]["bytes"]
        figures = {"bytes": senders[0]["bytes"], "sent": [s["sent"] for s in senders], "memory": memory}
        Path(out).write_text(json.dumps(figures | {"pull_s": pull_s, "raw_s": raw_s, "ratio": raw_s / pull_s}))
    dist.destroy_process_group()
