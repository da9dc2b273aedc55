"""One trainer rank under torchrun, through all cases: `algorithm_worker.py OUT MODEL_FOLDER REFERENCE_FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_rl.rollouts.packing import pack
from spmd_rl.trainer.parallel import TrainerMeshes
from spmd_rl.world.trainer_mesh import TrainerDims
from tests.trainer.algorithm_cases import CASES, make_learner, make_samples

SEQ_LEN, LR = 32, 1e-3


def two_steps(
    folders: list[str], name: str, rank: int, world: int, meshes: TrainerMeshes | None, group: dist.ProcessGroup | None
) -> dict:
    """Metrics of two steps on this rank's rows, and the weights after them."""
    learner = make_learner(folders, name, meshes, group)
    rows = pack(make_samples(name), world, SEQ_LEN).rows[rank]
    metrics = [learner.step([rows], LR) for _ in range(2)]
    return {"metrics": metrics, "weights": {name: tensor.clone() for name, tensor in learner.full_tensors()}}


def main(out: str, *folders: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    meshes = TrainerMeshes.build(TrainerDims(dp_shard=world), "cpu")
    results = {name: two_steps(list(folders), name, rank, world, meshes, dist.group.WORLD) for name in CASES}
    torch.save(results, Path(out) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
