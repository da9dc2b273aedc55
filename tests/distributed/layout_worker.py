"""One trainer rank that tries layouts one after the other: `layout_worker.py OUT FOLDER`, which holds the models.

Every layout trains the same samples in a fresh learner; what it computed lands in OUT/rank{r}.pt by run. As in a run of
RL, the first process does not train: so the trainer ranks are not the default group.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.config.tree import MoeConfig, ParallelConfig, TrainerModelConfig
from spmd_rl.models.tiny import make_tiny
from spmd_rl.rollouts.packing import pack
from spmd_rl.trainer.gather import Gather
from spmd_rl.trainer.learner import Learner
from spmd_rl.trainer.parallel import TrainerMeshes
from spmd_rl.world.buckets import Plan
from spmd_rl.world.groups import as_default
from spmd_rl.world.trainer_mesh import TrainerDims
from tests.trainer.algorithm_cases import make_learner, make_samples
from tests.trainer.rows import VOCAB

SEQ_LEN, LR = 32, 1e-3
SEQUENCES = [np.arange(1, 10, dtype=np.int32), np.arange(30, 20, -1, dtype=np.int32)]
SHAPE = {"vocab_size": VOCAB, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ff": 50}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "other": {"seed": 1},  # to compare with
    "llama": {"architecture": "llama", "tied": True},
    "qwen3_moe": {"architecture": "qwen3_moe", "experts": 8, "expert_ff": 16},
}
MOE = MoeConfig(sequence_coef=0.1, bias_rate=0.01)
LAYOUTS = {
    "fsdp 4": TrainerDims(dp_shard=4),
    "hsdp 2x2": TrainerDims(dp_replicate=2, dp_shard=2),
    "replicas 4": TrainerDims(dp_replicate=4),
    "ulysses 4": TrainerDims(cp=4),
    "ring 4": TrainerDims(cp=4),
    "fsdp 2, ulysses 2": TrainerDims(dp_shard=2, cp=2),
    "hsdp 2x1, ring 2": TrainerDims(dp_replicate=2, cp=2),
    "hsdp 2x2, ep 2": TrainerDims(dp_replicate=2, dp_shard=2, ep=2),
    "fsdp 2, ring 2, ep 4": TrainerDims(dp_shard=2, cp=2, ep=4),
    "hsdp 2x2, ulysses 2": TrainerDims(2, 2, 2),
    "hsdp 2x2, ring 2, ep 4": TrainerDims(2, 2, 2, ep=4),
}
BOTH = ["fsdp 2, ulysses 2", "hsdp 2x1, ring 2"]
TABLE: dict[tuple[str, str], list[str]] = {
    ("qwen3", "grpo"): [layout for layout, dims in LAYOUTS.items() if dims.ep == 1],
    ("qwen3", "gspo"): BOTH[1:],
    ("qwen3", "ppo_critic"): ["hsdp 2x2", *BOTH],
    ("qwen3", "opsd"): BOTH[:1],
    ("qwen3", "kl in the loss"): BOTH[1:],
    ("llama", "grpo"): BOTH[:1],
    ("qwen3_moe", "grpo"): ["hsdp 2x2", *BOTH, "hsdp 2x2, ep 2", "fsdp 2, ring 2, ep 4", "hsdp 2x2, ring 2, ep 4"],
}

HALF = " in bfloat16"  # behind a model's name
HALVES = [(f"qwen3{HALF}", "grpo", layout) for layout in ("fsdp 4", *BOTH)]

Run = tuple[str, str, str]  # model, case of the algorithm, layout


def runs(ranks: int = 0) -> list[Run]:
    """All that are tried in float32; of so many ranks those in bfloat16 too."""
    every = [(model, case, layout) for (model, case), layouts in TABLE.items() for layout in layouts]
    every += HALVES if ranks else []
    return [run for run in every if ranks in (0, LAYOUTS[run[2]].ranks)]


def make_models(folder: Path) -> None:
    """The models of the table."""
    for name, settings in MODELS.items():
        make_tiny(str(folder / name), **({"seed": 0, "init_std": 0.2} | SHAPE | settings))


def two_steps(
    folder: Path, run: Run, rank: int, meshes: TrainerMeshes | None, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Metrics of two steps, gradients of the first, scores and weights after both."""
    model, case, layout = run
    dims = LAYOUTS.get(layout, TrainerDims())
    style: Literal["ulysses", "ring"] = "ring" if "ring" in layout else "ulysses"
    trainer = {"parallel": ParallelConfig(cp_style=style)} | ({"moe": MOE} if "moe" in model else {})
    if model.endswith(HALF):
        model, trainer["model"] = model.removesuffix(HALF), TrainerModelConfig(dtype="bfloat16")
    learner = make_learner([str(folder / model), str(folder / "other")], case, meshes, group, trainer)
    # Two rows at least, of uneven documents, so that copies add up gradients of several backwards. Three samples leave
    # one of four ranks without work; its token without weight would be counted as the experts' load.
    counts = (7, 5) if "moe" in model else (7, 3)
    packed = [pack(make_samples(case, count), dims.data_ranks, SEQ_LEN) for count in counts]
    rows = [row for batch in packed for row in batch.rows[dims.data_rank(rank)]]
    first = learner.step([rows], LR)
    gradients = {name: whole(parameter.grad) for name, parameter in learner.model.named_parameters()}
    second = learner.step([rows], LR)
    return {
        "metrics": [first, second],
        "gradients": gradients,
        "scores": learner.score(SEQUENCES),
        "validation": learner.validate(rows) if case == "grpo" else {},
        "weights": {name: tensor.clone() for name, tensor in learner.full_tensors()},
        "sent": sent(learner),
        "table": learner.shards.table(),
    }


def sent(learner: Learner) -> dict[str, torch.Tensor]:
    """The tensors that this rank would send to engines, in buckets of some tensors each."""
    plan = Plan.build(learner.shards.table(), 4096, learner.shards.ranks)
    mine = [piece for bucket in plan.buckets if bucket.sender == learner.shards.rank for piece in bucket.pieces]
    views = {piece.name: torch.full(piece.shape, torch.nan, dtype=learner.dtype) for piece in mine}
    assert list(Gather(learner.shards, plan).write(views)) == list(views)
    return views


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def main(out: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group(list(range(1, dist.get_world_size())))
    if dist.get_rank():
        rank = group.rank()
        with as_default(group):
            fitting = {layout: dims for layout, dims in LAYOUTS.items() if dims.ranks == group.size()}
            meshes = {layout: TrainerMeshes.build(dims, "cpu") for layout, dims in fitting.items()}
        results = {run: two_steps(Path(folder), run, rank, meshes[run[2]], group) for run in runs(group.size())}
        torch.save(results, Path(out) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
