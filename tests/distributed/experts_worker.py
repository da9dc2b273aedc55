"""One rank of a world that tries layouts with expert parallelism: `experts_worker.py OUT MODEL_FOLDER`.

Rank 0 takes no part, as an orchestrator. Every layout trains the same samples in a fresh learner of the other ranks;
what it computed lands in OUT/rank{r}.pt by layout, r counting the trainers.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.config.tree import (
    AlgorithmConfig,
    Config,
    KLConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    OrchestratorConfig,
    TrainerConfig,
    TrainerModelConfig,
)
from spmd_rl.rollouts.packing import pack
from spmd_rl.rollouts.types import Row
from spmd_rl.trainer.checkpoint import Checkpoints
from spmd_rl.trainer.learner import Learner
from spmd_rl.trainer.parallel import TrainerMeshes
from spmd_rl.world.groups import as_default
from spmd_rl.world.trainer_mesh import TrainerDims
from tests.trainer.algorithm_cases import make_samples

SEQ_LEN, LR, MAX_NORM = 32, 1e-3, 0.5
LAYERS, EXPERTS, TOP_K = 2, 12, 3
SEQUENCES = [np.arange(1, 10, dtype=np.int32), np.arange(30, 20, -1, dtype=np.int32)]
LAYOUTS = {
    "fsdp4": TrainerDims(dp_shard=4),
    "ep4": TrainerDims(dp_shard=4, ep=4),
    "fsdp2 ep2": TrainerDims(dp_shard=4, ep=2),
    "hsdp2 ep2": TrainerDims(dp_replicate=2, dp_shard=2, ep=2),
    "cp2 ep2": TrainerDims(dp_shard=2, cp=2, ep=2),
}
SAVED, LOADED = "fsdp2 ep2", ["ep4", "fsdp4", "hsdp2 ep2"]
MORE = [("critic, kl", "float32"), ("grpo", "bfloat16")]  # in the layout of SAVED


ALGORITHMS = {
    "grpo": AlgorithmConfig(),
    "critic, kl": AlgorithmConfig(type="ppo_critic", kl=KLConfig(coef=0.1)),  # samples are made by these words
}


def make_learner(
    folder: str,
    meshes: TrainerMeshes | None = None,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "grpo",
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Learner:
    """With every kind of balancing on."""
    config = Config(
        model=ModelConfig(name=folder),
        trainer=TrainerConfig(
            model=TrainerModelConfig(dtype=dtype),
            optim=OptimConfig(lr=LR, max_norm=MAX_NORM),
            moe=MoeConfig(bias_rate=0.01, sequence_coef=0.1),
        ),
        orchestrator=OrchestratorConfig(algorithm=ALGORITHMS[algorithm]),
    )
    return Learner(config, meshes, torch.device("cpu"), group)


def rows_of(dims: TrainerDims, rank: int, samples: str = "grpo") -> list[Row]:
    """This rank's rows, some of them with routes; with few samples some ranks have a row that only takes part."""
    many, few = (pack(make_samples(samples, count=count), dims.data_ranks, SEQ_LEN).rows for count in (7, 3))
    return [*many[dims.data_rank(rank)], *map(with_routes, few[dims.data_rank(rank)])]


def with_routes(row: Row) -> Row:
    """With experts that depend on the token alone, and so not on the layout; those of token 0 are not known."""
    offsets_LK = np.arange(LAYERS)[:, None] + 5 * np.arange(TOP_K)
    routes_TLK = (row.tokens[:, None, None] + offsets_LK) % EXPERTS
    routes_TLK[row.tokens % 7 == 0] = -1
    return replace(row, routed_experts=routes_TLK.astype(np.int16))


def two_steps(learner: Learner, dims: TrainerDims, rank: int, samples: str = "grpo") -> dict:
    """Metrics of two steps, gradients of the first, scores and weights after both."""
    rows = rows_of(dims, rank, samples)
    first = learner.step([rows], LR)
    gradients = {name: whole(p.grad) for name, p in learner.model.named_parameters()}
    second = learner.step([rows], LR)
    return {"metrics": [first, second], "gradients": gradients} | state(learner)


def state(learner: Learner) -> dict:
    """What the weights are and say; the routers' bias; the optimizer's moments."""
    named, optimizer = learner.checkpoint_parts()["policy"]
    return {
        "scores": learner.score(SEQUENCES),
        "weights": {name: tensor.clone() for name, tensor in learner.full_tensors()},
        "table": learner.shards.table(),
        "biases": {name: bias.clone() for name, bias in learner.checkpoint_parts()["routers"][0]},
        "moments": {name: whole(optimizer.state[p]["exp_avg_sq"]) for name, p in named},
        "held": sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for _, p in named),
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def main(out: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainers = list(range(1, dist.get_world_size()))
    group, saving = dist.new_group(trainers), dist.new_group(trainers)
    if dist.get_rank() in trainers:
        train(Path(out), folder, group, Checkpoints(saving, keep=0))
    dist.barrier()
    dist.destroy_process_group()


def train(out: Path, folder: str, group: dist.ProcessGroup, checkpoints: Checkpoints) -> None:
    """All layouts, one after the other."""
    with as_default(group):
        meshes = {layout: TrainerMeshes.build(dims, "cpu") for layout, dims in LAYOUTS.items()}
    rank, results, checkpoint = group.rank(), {}, str(out / "step_000002")
    for layout, dims in LAYOUTS.items():
        learner = make_learner(folder, meshes[layout], group)
        results[layout] = two_steps(learner, dims, rank)
        if layout == SAVED:
            checkpoints.save(checkpoint, learner.checkpoint_parts(), {"step": 2})
            checkpoints.wait()
            learner.export(out / "export")
    for layout in LOADED:
        learner = make_learner(folder, meshes[layout], group)
        checkpoints.load(checkpoint, learner.checkpoint_parts())
        results["loaded", layout] = state(learner)
    dims = LAYOUTS[SAVED]
    for algorithm, dtype in MORE:
        learner = make_learner(folder, meshes[SAVED], group, algorithm, dtype)
        results[algorithm, dtype] = two_steps(learner, dims, rank, algorithm)
    torch.save(results, out / f"rank{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
