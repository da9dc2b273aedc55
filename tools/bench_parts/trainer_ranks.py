"""Two trainer ranks of the benchmark: the same batch on one layout after the other.

`trainer_ranks.py FOLDER STEPS OUT`. Sequences of 32 to 1,024 made-up tokens, packed for each layout's data ranks as a
run packs them. `idle` is what ranks wait for the heaviest row of their micro-steps, by the operations of rows: as they
are packed, by tokens; and if they were packed by operations.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.config.tree import Config, ModelConfig, ParallelConfig, TrainerConfig
from spmd_rl.models.context import bytes_per_layer
from spmd_rl.rollouts.cost import TrainingCost
from spmd_rl.rollouts.packing import describe, lay_out
from spmd_rl.trainer.bench_report import phases_of
from spmd_rl.trainer.learner import Learner
from spmd_rl.trainer.parallel import TrainerMeshes
from spmd_rl.world.host_memory import peak_resident
from spmd_rl.world.trainer_mesh import TrainerDims
from tools.bench_parts.trainer_steps import SEQ_LEN, SHAPE, make_row

LAYOUTS = {
    "fsdp 2": (TrainerDims(dp_shard=2), "ulysses"),
    "replicas 2": (TrainerDims(dp_replicate=2), "ulysses"),
    "ulysses 2": (TrainerDims(cp=2), "ulysses"),
    "ring 2": (TrainerDims(cp=2), "ring"),
}
SEQUENCES = 12


def measure(folder: str, name: str, steps: int) -> dict[str, Any]:
    """One layout; figures of this rank, speed of both."""
    dims, style = LAYOUTS[name]
    rank = dist.get_rank()
    lengths = np.random.default_rng(0).integers(32, SEQ_LEN + 1, SEQUENCES)
    cost = TrainingCost.of(json.loads(Path(folder, "config.json").read_text()))
    layout, by_cost = (lay_out(lengths, dims.data_ranks, SEQ_LEN, by) for by in (None, cost.flops))
    rows = [make_row(lengths[row].tolist(), seed=row[0]) for row in layout[dims.data_rank(rank)] if row]
    parallel = ParallelConfig(cp_style=style)  # type: ignore[arg-type]
    config = Config(model=ModelConfig(folder), trainer=TrainerConfig(parallel=parallel))
    learner = Learner(config, TrainerMeshes.build(dims, "cpu"), torch.device("cpu"), dist.group.WORLD)
    seconds, metrics = [], []
    for number in range(2 + steps):
        dist.barrier()
        started = time.perf_counter()
        one = learner.step([rows], 1e-4)
        dist.barrier()
        if number >= 2:
            seconds.append(time.perf_counter() - started)
            metrics.append(one)
    step_s = statistics.median(seconds)
    phases = [phases_of(one) for one in metrics]
    sent = metrics[-1].get("perf/cp_bytes", 0.0)
    check_bytes(style, dims, layout[dims.data_rank(rank)], lengths, sent)
    return {
        "layout": name,
        "tokens_per_s": float(lengths.sum()) / step_s,
        "flops_per_s": float(cost.flops(lengths).sum()) / step_s,
        "phases": {key: statistics.median(one[key] for one in phases) for key in phases[0]},
        "peak_mib": peak_resident() / 2**20,
        "idle": describe(layout, lengths, SEQ_LEN, cost.flops).idle,
        "idle_by_cost": describe(by_cost, lengths, SEQ_LEN, cost.flops).idle,
        "cp_bytes": sent,
    }


def check_bytes(style: Any, dims: TrainerDims, rows: list[list[int]], lengths: np.ndarray, sent: float) -> None:
    """RuntimeError unless attention sent what the formula says; a token more or less per rank and row is allowed."""
    if dims.cp == 1:
        return
    shape = (SHAPE["heads"], SHAPE["kv_heads"], SHAPE["head_dim"], 4)
    expected = sum(sum(bytes_per_layer(style, int(lengths[row].sum()), dims.cp, *shape)) for row in rows)
    expected *= SHAPE["layers"]
    if abs(sent - expected) > 0.01 * expected:
        raise RuntimeError(f"{style}: attention sent {sent:.0f} bytes in a step, the formula says {expected:.0f}")


def main(folder: str, steps: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layouts = [measure(folder, name, int(steps)) for name in LAYOUTS]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"layouts": layouts}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
