"""One trainer rank under torchrun: `trainer_worker.py MODEL_FOLDER OUT_FOLDER DTYPE IMPL`.

It leaves what it computed in OUT_FOLDER/rank{r}.pt and an export in OUT_FOLDER/export.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.config.tree import Config, ModelConfig, OptimConfig, TrainerConfig, TrainerModelConfig
from spmd_rl.trainer.learner import Learner
from spmd_rl.trainer.parallel import TrainerMeshes
from spmd_rl.world.trainer_mesh import TrainerDims
from tests.trainer.rows import make_document, make_row, padding_row

LR = 1e-3
SEQUENCES = [np.arange(1, 10, dtype=np.int32), np.arange(30, 20, -1, dtype=np.int32)]


def make_config(folder: str | Path, dtype: str, impl: str = "custom") -> Config:
    return Config(
        model=ModelConfig(name=str(folder)),
        trainer=TrainerConfig(
            model=TrainerModelConfig(impl=impl, dtype=dtype), optim=OptimConfig(lr=LR, max_norm=0.05)
        ),
    )


def rows_of(rank: int, world: int) -> list:
    """This rank's share of five uneven rows, filled up with padding to equal counts."""
    rows = [
        make_row(*(make_document(n, 10 * i + n) for n in ns))
        for i, ns in enumerate([(9, 4), (17,), (3,), (6, 6), (2,)])
    ]
    share = rows[rank::world]
    return share + [padding_row(5)] * (-(-len(rows) // world) - len(share))


def train(learner: Learner, rank: int, world: int) -> dict:
    """Two steps, with a forward without backward in between, which must leave nothing gathered behind."""
    first = learner.step([rows_of(rank, world)], LR)
    scores = learner.score(SEQUENCES)
    second = learner.step([rows_of(rank, world)], LR)
    return {
        "metrics": [first, second],
        "scores": scores,
        "final_scores": learner.score(SEQUENCES),
        "weights": {name: tensor.clone() for name, tensor in learner.full_tensors()},
        "table": learner.shards.table(),
        "master_dtypes": {parameter.dtype for parameter in learner.model.parameters()},
    }


def refused_export(learner: Learner, out: Path) -> str:
    """An export that rank 0 cannot write; what this rank is told about it."""
    (out / "file").write_text("not a folder")
    try:
        learner.export(out / "file" / "export")
    except OSError:
        return "could not write"
    return "no error"


def poisoned_step(learner: Learner, rank: int, world: int) -> str:
    """A nan on the last rank alone; what this rank is told about it."""
    rows = rows_of(rank, world)
    if rank == world - 1:
        rows[0] = replace(rows[0], ce_weight=np.full_like(rows[0].ce_weight, np.nan))
    try:
        learner.step([rows], LR)
    except FloatingPointError as error:
        return str(error)
    return "no error"


def main(folder: str, out: str, dtype: str, impl: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    meshes = TrainerMeshes.build(TrainerDims(dp_shard=world), "cpu")
    learner = Learner(make_config(folder, dtype, impl), meshes, torch.device("cpu"), dist.group.WORLD)
    result = train(learner, rank, world)
    learner.export(Path(out) / "export")
    result["refused"] = refused_export(learner, Path(out))
    result["poisoned"] = poisoned_step(learner, rank, world)
    result["untouched"] = all(torch.equal(result["weights"][name], tensor) for name, tensor in learner.full_tensors())
    torch.save(result, Path(out) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
