"""What one batch costs rank 0: advantages, weight streams, packing for 8,192 rollouts of 8,192 tokens, in CPU seconds.

Rollouts are views of a few base columns, so that the *input* fits a small machine; rows are written in full. The raw
limit is to copy as many bytes as the rows hold, from other memory into fresh memory. Garbage of one run is collected
before the next one, outside the clock.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.algorithms import resolve
from spmd_rl.algorithms.weigh import weigh
from spmd_rl.config.tree import AlgorithmConfig, OrchestratorConfig, SamplingConfig
from spmd_rl.rollouts.packing import pack
from spmd_rl.rollouts.types import Episode, Group, Reward, Row, Sample, Task

ROLLOUTS, GROUP, LENGTH, PROMPT = 8192, 16, 8192, 512
RANKS, SEQ_LEN, RUNS = 64, 32768, 3
MAX_SECONDS = 1.0


def main(json_path: str | None) -> None:
    """Print the figures and write them as JSON."""
    groups = make_groups()
    config = OrchestratorConfig(
        algorithm=AlgorithmConfig(), sampling=SamplingConfig(max_tokens=LENGTH), group_size=GROUP
    )
    algorithm = resolve(config.algorithm)
    weighing, packing, copying = [], [], []
    for _ in range(RUNS):
        gc.collect()
        started = time.process_time()
        weighed = weigh(groups, algorithm, config, {})
        weighing.append(time.process_time() - started)
        started = time.process_time()
        packed = pack(weighed.minibatches[0], RANKS, SEQ_LEN)
        packing.append(time.process_time() - started)
        size = sum(column.nbytes for rank in packed.rows for row in rank for column in columns(row))
        del packed, weighed
        gc.collect()
        copying.append(copy_seconds(size))
    medians = [statistics.median(times) for times in (weighing, packing, copying)]
    result: dict[str, Any] = dict(zip(("weigh_s", "pack_s", "copy_s"), medians, strict=True))
    result |= {
        "rollouts": ROLLOUTS,
        "length": LENGTH,
        "rows_gb": size / 1e9,
        "total_s": result["weigh_s"] + result["pack_s"],
        "target_s": MAX_SECONDS,
    }
    result["target_met"] = result["total_s"] <= MAX_SECONDS
    result["over_copy"] = result["total_s"] / result["copy_s"]
    for name, value in result.items():
        print(f"{name:<12}{value:.3f}" if isinstance(value, float) else f"{name:<12}{value}")
    if json_path:
        Path(json_path).write_text(json.dumps(result, indent=2) + "\n")


def make_groups() -> list[Group]:
    """Groups of rollouts with 0 or 1 for a reward; lengths differ a little, as views of common columns."""
    rng = np.random.default_rng(0)
    bases = [make_sample(rng) for _ in range(16)]
    groups = []
    for g in range(ROLLOUTS // GROUP):
        task = Task("bench", g, {})
        episodes = []
        for _ in range(GROUP):
            base, cut = bases[int(rng.integers(len(bases)))], LENGTH - int(rng.integers(64))
            names = ("tokens", "mask", "logprobs", "versions", "temperatures")
            sample = Sample(**{name: getattr(base, name)[:cut] for name in names})
            episodes.append(Episode(task, (sample,), Reward(float(rng.integers(2)))))
        groups.append(Group(g, task, tuple(episodes), 0))
    return groups


def make_sample(rng: np.random.Generator) -> Sample:
    """A prompt, and an answer with everything that comes off the wire."""
    mask = (np.arange(LENGTH) >= PROMPT).astype(np.uint8)
    return Sample(
        tokens=rng.integers(0, 150_000, LENGTH).astype(np.int32),
        mask=mask,
        logprobs=(-rng.random(LENGTH) * mask).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        temperatures=np.ones(LENGTH, np.float32),
    )


def columns(row: Row) -> list[np.ndarray]:
    """What the row holds."""
    return [column for field in fields(Row) if (column := getattr(row, field.name)) is not None]


def copy_seconds(size: int) -> float:
    """CPU seconds to copy `size` bytes into fresh memory, in pieces as large as a row's columns."""
    source = np.ones(4 * SEQ_LEN, np.uint8)
    started = time.process_time()
    kept = [source.copy() for _ in range(size // source.nbytes)]
    seconds = time.process_time() - started
    del kept
    return seconds


if __name__ == "__main__":
    main(None)
