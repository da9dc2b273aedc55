"""The ranks of `bench weights`: rank 0 sends, rank 1 holds an engine. Arguments: model folder, staging, result
file."""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from spmd_rl.config.tree import Config, InferenceConfig, ModelConfig, WeightsConfig
from spmd_rl.world.buckets import Plan
from spmd_rl.world.groups import init_world
from spmd_rl.world.messages import Generate
from spmd_rl.world.weights import Receiver, Sender

ROUNDS, REQUESTS = 9, 64
median = statistics.median


def die(error: BaseException) -> None:
    print(error, flush=True)
    os._exit(1)


def copied(tensors: dict[str, torch.Tensor], views: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """What a rank writes that has the whole model."""
    for name, view in views.items():
        view.copy_(tensors[name])
        yield name


def send(folder: str, group: dist.ProcessGroup, bucket_mb: float) -> None:
    """Rank 0."""
    tensors = load_file(Path(folder) / "model.safetensors")
    plan = Plan.build([(n, tuple(t.shape), "float32") for n, t in tensors.items()], int(bucket_mb * 2**20), 1)
    sender = Sender(plan, 0, group, torch.device("cpu"), die)
    raw = torch.zeros(plan.nbytes, dtype=torch.uint8)
    version = 0
    for _ in range(ROUNDS):
        sender.wait(60)
        dist.barrier()
        dist.broadcast(raw, 0)  # on the default group: `group` belongs to the sender's thread
        for _kind in ("idle", "busy"):
            dist.barrier()
            sender.send(version, partial(copied, tensors), 60)
            sender.wait(60)
            dist.barrier()
            version += 1
    sender.close(60)


def serve(config: Config, folder: str, weights: dist.ProcessGroup, replica: dist.ProcessGroup, out: str) -> None:
    """Rank 1."""
    from spmd_rl.inference.build import build_engine
    from spmd_rl.inference.engine import Engine

    engine = Engine(build_engine(config, folder, replica, 0, 0, torch.device("cpu")), 1)
    arrived = threading.Event()
    receiver = Receiver(
        [weights], torch.device("cpu"), lambda version: arrived.set(), die, staging=config.weights.staging
    )
    plan = receiver.plan(60)
    raw = torch.zeros(plan.nbytes, dtype=torch.uint8)
    figures: dict[str, list[float]] = {
        k: [] for k in ("raw", "idle", "busy", "swap", "both", "step", "step_pull", "memcpy")
    }
    version = 0

    def pull(kind: str) -> None:
        nonlocal version
        arrived.clear()
        dist.barrier()
        started = time.perf_counter()
        receiver.begin(version)
        steps = []
        if kind == "busy":
            while not arrived.is_set():
                steps.append(one_step(engine))
        arrived.wait(60)
        figures[kind].append(time.perf_counter() - started)
        swapping = time.perf_counter()
        engine.swap(version, receiver.tensors(60), plan.names)
        figures["swap"].append(time.perf_counter() - swapping)
        if kind == "idle":
            figures["both"].append(time.perf_counter() - started)
        figures["step_pull"] += steps
        dist.barrier()
        version += 1

    for _ in range(ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        dist.broadcast(raw, 0)
        figures["raw"].append(time.perf_counter() - started)
        started = time.perf_counter()
        raw.clone()
        figures["memcpy"].append(time.perf_counter() - started)
        pull("idle")
        refill(engine)
        figures["step"] += [one_step(engine) for _ in range(20)]
        pull("busy")
        for request in range(REQUESTS):  # to finish them would take most of the bench's time
            engine.cancel(request)
    receiver.close(60)
    Path(out).write_text(json.dumps(summary(figures, plan.nbytes) | {"staging_bytes": receiver.staging_bytes}))


def summary(figures: dict[str, list[float]], nbytes: int) -> dict[str, float]:
    """Medians and ratios; the first round, in which memory is touched for the first time, does not count."""
    m = {name: median(values[1:]) for name, values in figures.items()}
    return {
        "bytes": nbytes,
        "rounds": ROUNDS - 1,
        **{f"{name}_s": value for name, value in m.items()},
        "idle_ratio": m["raw"] / m["idle"],
        "busy_ratio": m["raw"] / m["busy"],
        "busy_slowdown": m["step_pull"] / m["step"],
        "busy_worst": max(figures["step_pull"]) / m["step"],
    }


def refill(engine) -> None:
    """Requests long enough to outlast the pull."""
    rng = np.random.default_rng(0)
    for i in range(REQUESTS):
        engine.add(Generate(i, rng.integers(0, 256, 16).astype(np.int32), 400, 1.0, i, []))
    for _ in range(3):
        engine.step()


def one_step(engine) -> float:
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started


def main() -> None:
    folder, staging, out = sys.argv[1:]
    config = Config(
        model=ModelConfig(name=folder),
        seq_len=512,
        inference=InferenceConfig(vllm={"max_num_seqs": REQUESTS}),
        weights=WeightsConfig(staging=staging),
    )
    torch.set_num_threads(1)
    init_world(600)
    weights, replica = dist.new_group([0, 1]), dist.new_group([1])
    if dist.get_rank() == 0:
        send(folder, weights, WeightsConfig().bucket_mb)
    else:
        serve(config, folder, weights, replica, out)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
