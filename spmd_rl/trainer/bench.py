"""Measuring the trainer that a config describes: its model, layout, optimizer and loss, on made-up documents.

    load → (warm-up steps → measured steps) × kinds of lengths → hand the weights out → table, JSON

Every rank makes the same batch, packs it and keeps its own rows, as in supervised training; a step is `Learner.step`,
between two barriers. Its learning rate is 0: as much work, and the weights stay those that were loaded. It refuses to
know what the loss is (`bench_rl.py`, `bench_sft.py`) and what becomes of the figures (`bench_report.py`).

Invariant: one batch per kind of lengths, so the spread of its steps is the machine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from spmd_rl.config.tree import Config
from spmd_rl.models.hf_config import read_config
from spmd_rl.rollouts.cost import TrainingCost
from spmd_rl.rollouts.packing import Packed, pack
from spmd_rl.rollouts.types import Row, TrainSample
from spmd_rl.trainer.bench_report import Kind, Step, phases_of, report
from spmd_rl.trainer.gather import Gather
from spmd_rl.trainer.learner import DTYPES, Learner
from spmd_rl.trainer.peak import peak_flops
from spmd_rl.trainer.role import build_learner
from spmd_rl.trainer.stopping import EarlyStop
from spmd_rl.world import host_memory
from spmd_rl.world.buckets import Plan, views
from spmd_rl.world.world import World

MIB = 2**20


@dataclass(frozen=True)
class Batch:
    """What one call of `Learner.step` consumes, over all ranks."""

    minibatches: list[list[TrainSample]]  # one optimizer step each
    documents_of_run: int  # the run's own batch has so many


BatchOf = Callable[[Config, str, int, int], Batch]  # config, kind of lengths, data ranks, size of the vocabulary


def bench(world: World, command: str, batch_of: BatchOf) -> None:
    """Measure on all ranks; the first one reports."""
    config, watchdog = world.config, world.watchdog
    started = time.perf_counter()
    learner = build_learner(world)
    learner.reset_optimizer(config.trainer.optim)
    load_s = time.perf_counter() - started
    with watchdog.stage("measure the processor", config.deadlines.start_s):
        peak, peak_of = _peak(world)
    about = read_config(learner.folder)
    vocabulary = int(about.get("text_config", about)["vocab_size"])
    stop = EarlyStop(dist.distributed_c10d._get_default_store(), world.rank, config.output_dir, watchdog.hurry)
    stop.heed_signals()
    ranks, done = world.mesh.dims.data_ranks, 0
    kinds = []
    for name in ("fixed", "variable") if config.bench.lengths == "both" else (config.bench.lengths,):
        batch = batch_of(config, name, ranks, vocabulary)
        cost = TrainingCost.known(about)
        packed = [pack(minibatch, ranks, config.seq_len, cost) for minibatch in batch.minibatches]
        steps = list(_steps(world, learner, packed, stop, done))
        done += config.bench.warmup + config.bench.steps
        of_ranks = _gathered(world, steps)
        if steps:
            kinds.append(Kind.of(name, batch.minibatches, batch.documents_of_run, packed, cost, of_ranks))
    facts = _gathered(world, {"load_s": load_s, "gather_s": _hand_out(world, learner), "peak_flops": peak})
    if world.rank == 0:
        worst = {name: max(fact[name] for fact in facts) for name in facts[0]}
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
        report(config, command, world.mesh, device, worst, peak_of, kinds)


def _peak(world: World) -> tuple[float, str]:
    if world.config.bench.peak_tflops:
        return world.config.bench.peak_tflops * 1e12, "bench.peak_tflops"
    return peak_flops(world.device, DTYPES[world.config.trainer.model.dtype], world.config.trainer.threads)


def _steps(world: World, learner: Learner, packed: list[Packed], stop: EarlyStop, before: int) -> Iterator[Step]:
    """The measured steps on one batch; fewer, perhaps none, where somebody asks for the end."""
    bench = world.config.bench
    index = world.mesh.dims.data_rank(world.mesh.trainers.index(world.rank))
    rows: list[list[Row]] = [minibatch.rows[index] for minibatch in packed]
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    host_memory.forget_peak()
    for number in range(bench.warmup + bench.steps):
        if stop.stopped_at >= 0 or stop(before + number):
            return
        with world.watchdog.stage("train", world.config.deadlines.step_s):
            dist.barrier(group=world.groups["ckpt"])
            started = time.perf_counter()
            metrics = learner.step(rows, lr=0.0)
            dist.barrier(group=world.groups["ckpt"])
            seconds = time.perf_counter() - started
        if number >= bench.warmup:
            tokens, loss, cp_bytes = metrics["tokens/packed"], metrics["loss"], metrics.get("perf/cp_bytes", 0.0)
            yield Step(seconds, tokens, loss, phases_of(metrics), cp_bytes, *_memory(world.device))


def _memory(device: torch.device) -> tuple[float, float]:
    """Most MiB that were allocated, and reserved, since the warm-up began; on a CPU they are resident ones."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB, torch.cuda.max_memory_reserved(device) / MIB
    peak = host_memory.peak_resident() / MIB
    return peak, peak


def _hand_out(world: World, learner: Learner) -> float:
    """Seconds to gather every weight once, each on the rank that would send it to engines."""
    shards, bucket_bytes = learner.shards, int(world.config.weights.bucket_mb * MIB)
    plan = Plan.build(shards.table(), bucket_bytes, shards.ranks)
    gather = Gather(shards, plan)
    mine = {bucket.index: bucket.allocate(world.device) for bucket in plan.buckets if bucket.sender == shards.rank}
    wanted = views(plan.buckets, mine)
    with world.watchdog.stage("gather the weights", world.config.deadlines.step_s):
        started = time.perf_counter()
        for _ in gather.write(wanted):
            pass
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        return time.perf_counter() - started


def _gathered(world: World, mine: object) -> list:
    """What every trainer rank says, in their order."""
    everyone: list = [None] * len(world.mesh.trainers)
    with world.watchdog.stage("compare ranks", world.config.deadlines.step_s):
        dist.all_gather_object(everyone, mine, group=world.groups["ckpt"])
    return everyone
