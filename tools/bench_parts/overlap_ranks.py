"""The ranks of `bench overlap`: the product's own roles, but the engine and the learner sleep.

Arguments: model folder, settings as JSON (capacity in batches, max_lag, order), result file. All settings run one after
the other in the same processes.
"""

from __future__ import annotations

import heapq
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.config.tree import (
    AlgorithmConfig,
    Config,
    DeploymentConfig,
    EvalConfig,
    InferenceConfig,
    LogConfig,
    ModelConfig,
    OrchestratorConfig,
    SamplingConfig,
    SourceConfig,
    WeightsConfig,
)
from spmd_rl.inference import role as inference
from spmd_rl.orchestrator import role as orchestrator
from spmd_rl.orchestrator.seeds import seed_of
from spmd_rl.orchestrator.window import Window
from spmd_rl.rollouts.types import Row
from spmd_rl.trainer import role as trainer
from spmd_rl.trainer.learner import Learner
from spmd_rl.world.mesh import Mesh
from spmd_rl.world.messages import Generate, Generated, Partial
from spmd_rl.world.watchdog import Watchdog
from spmd_rl.world.world import World

BATCH, STEPS, SKIP = 32, 16, 3  # rollouts; steps per setting; steps at both ends that do not count
SEED = 9  # of a run whose steps are like a long run's, by `plan`: a rare straggler may cost one of 10 steps much
LONG_RUN = 400  # steps
MEDIAN, SIGMA, LONGEST = 24, 1.0, 1024  # tokens
STEP_S = 0.005


def length_of(seed: int) -> int:
    """Tokens of the request with this seed."""
    return int(np.clip(np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA), 1, LONGEST))


def lengths_of_batches(steps: int = STEPS, seed: int = SEED) -> list[list[int]]:
    """Of the rollouts that the steps of a run consume, as far as they keep to the order of admission."""
    names = (("rollout", "fixed", index, 0) for index in range(steps * BATCH))
    lengths = [length_of(seed_of(seed, *name)) for name in names]
    return [lengths[i : i + BATCH] for i in range(0, len(lengths), BATCH)]


def steps_alone(lengths: Sequence[int], capacity: int) -> int:
    """Engine steps until all are generated, `capacity` at a time, first come first served."""
    ends = [0] * capacity
    for length in lengths:
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return max(ends)


def ideal_s(capacity: int) -> float:
    """Seconds to sample a batch alone, in the mean over the steps that count: that long training takes, too."""
    return STEP_S * statistics.mean(steps_alone(lengths, capacity) for lengths in lengths_of_batches()[SKIP:-SKIP])


def plan(batches: list[list[int]], capacity: int, max_lag: int, order: Any) -> float:
    """A step over the ideal in the mean, were there nothing but the window, engine steps and training."""
    training = round(statistics.mean(steps_alone(lengths, capacity) for lengths in batches[SKIP:-SKIP]))
    window, lengths = Window(BATCH, max_lag, order=order), [length for batch in batches for length in batch]
    live: dict[int, int] = {}  # group: tokens to go; groups are numbered as they are admitted
    queue: deque[list[int]] = deque()  # batches that were taken
    ends: list[int] = []
    taken = admitted = until = now = 0
    while len(ends) < len(batches):
        if queue and now >= until:
            window.release(queue.popleft())
            ends.append(now)
            until = now + training
        while admitted < len(lengths) and window.can_admit():
            live[window.admit(len(ends))] = lengths[admitted]
            admitted += 1
        while taken < len(batches) and (batch := window.take()) is not None:
            taken += 1
            until = until if queue else now + training
            queue.append(batch)
        for group in list(live)[:capacity]:
            live[group] -= 1
            if not live[group]:
                del live[group]
                window.finish(group)
        now += 1
    return (ends[-SKIP - 1] - ends[SKIP - 1]) / (len(batches) - 2 * SKIP) / training


def config(model: str, output_dir: str, batches: float, max_lag: int, order: Any) -> Config:
    return Config(
        output_dir=output_dir,
        max_steps=STEPS,
        seq_len=2 * LONGEST,
        seed=SEED,
        model=ModelConfig(name=model),
        orchestrator=OrchestratorConfig(
            batch_size=BATCH,
            group_size=1,
            max_lag=max_lag,
            order=order,
            sampling=SamplingConfig(max_tokens=LONGEST),
            algorithm=AlgorithmConfig(type="reinforce_pp"),  # its baseline is the batch's
            source=(SourceConfig(env="tools.bench_parts.fixed_env:Fixed"),),
            eval=EvalConfig(tasks=0),
        ),
        inference=InferenceConfig(vllm={"max_num_seqs": int(batches * BATCH)}),
        deployment=DeploymentConfig(train_ranks=1, infer_ranks=1),
        weights=WeightsConfig(probe_sequences=0),  # there is no model on the engine's side
        log=LogConfig(tensorboard=False, rollouts_per_step=0, progress="off"),
    )


def capacity_of(config: Config) -> int:
    """Sequences that the engine runs at a time."""
    return config.inference.vllm["max_num_seqs"]


@dataclass
class InFlight:
    """A request in flight."""

    asked: Generate
    salt: str
    left: int
    versions: list[int]


class SleepingEngine:
    """What `inference.engine.Engine` is to its role, without a model: the oldest `capacity` requests get a token each
    in every step."""

    def __init__(self, capacity: int, rank: int) -> None:
        self._capacity, self._rank, self.version = capacity, rank, -1
        self._live: dict[int, InFlight] = {}  # in order of arrival
        self._weights: dict[str, torch.Tensor] = {}
        self.probing = False
        self.steps, self.step_s, self.tokens = 0, 0.0, 0

    @property
    def busy(self) -> bool:
        return bool(self._live)

    def add(self, request: Generate) -> None:
        self._live[request.id] = InFlight(request, request.salt or f"v{self.version}", length_of(request.seed), [])

    def cancel(self, id: int) -> Generated | None:
        sequence = self._live.pop(id, None)
        return sequence and self._generated(sequence, "aborted")

    def restart(self) -> list[Partial]:
        return []

    def swap(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], names: list[str]) -> None:
        for name, tensor in tensors:
            self._weights.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        if set(self._weights) != set(names):
            raise RuntimeError("the weights that came are not those of the plan")
        self.version = version

    def step(self) -> list[Generated]:
        started = time.perf_counter()
        running = list(self._live.values())[: self._capacity]
        time.sleep(STEP_S)
        for sequence in running:
            sequence.left -= 1
            sequence.versions.append(self.version)
        finished = [sequence for sequence in running if not sequence.left]
        for sequence in finished:
            del self._live[sequence.asked.id]
            self.tokens += len(sequence.versions)
        self.steps += 1
        self.step_s += time.perf_counter() - started
        return [self._generated(sequence, "stop") for sequence in finished]

    def _generated(self, sequence: InFlight, stop_reason: str) -> Generated:
        asked, count = sequence.asked, len(sequence.versions)
        tokens = np.random.default_rng(asked.seed).integers(0, 256, count).astype(np.int32)
        logprobs, versions = np.full(count, -5.5, np.float32), np.asarray(sequence.versions, dtype=np.int32)
        return Generated(asked.id, tokens, logprobs, versions, stop_reason, sequence.salt)


class SleepingLearner(Learner):
    """Holds the model and sends its weights, but learns nothing."""

    def __init__(self, config: Config, *others: Any) -> None:
        super().__init__(config, *others)
        self._train_s = ideal_s(capacity_of(config))

    def step(self, minibatches: Sequence[Sequence[Row]], lr: float, train_policy: bool = True) -> dict[str, float]:
        time.sleep(self._train_s)
        return {"loss": 0.0, "lr": lr}


def measure(config: Config) -> dict[str, float]:
    """Rank 0: the figures of a finished run."""
    o = config.orchestrator
    lines = (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()
    records = [record for line in lines if (record := json.loads(line))["phase"] == "rl"]
    sampled, planned = sum(record["tokens/sampled"] for record in records), sum(map(sum, lengths_of_batches()))
    if o.max_lag == 0 and sampled != planned:
        raise RuntimeError(f"{sampled} tokens were sampled, not {planned}: the ideal is of other lengths than the run")
    records = records[SKIP:-SKIP]
    wall_s, capacity = sum(record["time/step_s"] for record in records), capacity_of(config)
    step_s = wall_s / len(records)
    return {
        "capacity": capacity,
        "max_lag": o.max_lag,
        "order": o.order,
        "step_s": step_s,
        "over_ideal": step_s / ideal_s(capacity),
        "planned": plan(lengths_of_batches(), capacity, o.max_lag, o.order),
        "long_run": plan(lengths_of_batches(LONG_RUN), capacity, o.max_lag, o.order),
        "lag_mean": statistics.mean(record["lag/mean"] for record in records),
        "lag_max": max(record["lag/max"] for record in records),
        "engine_idle": 1 - sum(record["perf/engine_busy"] * record["time/step_s"] for record in records) / wall_s,
        "slots_idle": 1 - sum(record["tokens/sampled"] for record in records) * STEP_S / wall_s / capacity,
        "trainer_idle": sum(record["time/wait_s"] for record in records) / wall_s,
    }


def run_all(world: World, configs: list[Config], out: str) -> None:
    """One run after the other, on the same groups."""
    cases, output = [], None
    if world.rank == 0:
        from spmd_rl.observe.logs import redirect_rank_output

        output = redirect_rank_output(Path(world.config.output_dir), 0, console=False)
    for one in configs:
        now = replace(world, config=one)
        if world.rank == 0:
            Path(one.output_dir).mkdir()
            orchestrator.run(now, output)
            cases.append(measure(one))
        else:
            (trainer if world.role == "trainer" else inference).run(now)
        with world.watchdog.stage("between two settings"):
            dist.barrier()
    if world.rank == 0:
        batches = lengths_of_batches()
        figures = {
            "batch": BATCH,
            "tokens": statistics.mean(map(statistics.mean, batches)),
            "engine_step_s": STEP_S,
            "steps": STEPS - 2 * SKIP,
            "ideal_s": {capacity: ideal_s(capacity) for capacity in sorted({case["capacity"] for case in cases})},
            "cases": cases,
        }
        Path(out).write_text(json.dumps(figures))


def main() -> None:
    model, settings, out = sys.argv[1:]
    folder = Path(tempfile.gettempdir()) / f"bench_overlap_{os.environ['MASTER_PORT']}"
    configs = [config(model, str(folder / f"run_{i}"), *setting) for i, setting in enumerate(json.loads(settings))]
    inference.build_engine = lambda config, *others: capacity_of(config)
    inference.Engine = SleepingEngine
    trainer.Learner = SleepingLearner
    rank, mesh = int(os.environ["RANK"]), Mesh.build(configs[0], 3)
    watchdog = Watchdog(rank, 3, mesh.role(rank), 60)
    watchdog.start()
    try:
        world = World.join(replace(configs[0], output_dir=str(folder)), mesh, watchdog)
        run_all(world, configs, out)
        world.leave()
        if rank == 0:
            shutil.rmtree(folder)
    except BaseException as error:
        watchdog.fail(error)
    os._exit(0)


if __name__ == "__main__":
    main()
