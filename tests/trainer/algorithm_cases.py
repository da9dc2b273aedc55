"""Algorithms that ask something of the trainer beside the default loss, with rows as rank 0 would send them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.config.tree import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    KLConfig,
    ModelConfig,
    OptimConfig,
    OrchestratorConfig,
    TrainerConfig,
)
from spmd_rl.rollouts.types import TrainSample
from spmd_rl.trainer.learner import Learner
from spmd_rl.trainer.parallel import TrainerMeshes
from tests.trainer.rows import VOCAB

CPU = torch.device("cpu")
CASES = {
    "grpo": {},
    "gspo": {"type": "gspo"},
    "cispo": {"type": "cispo"},
    "ppo, decoupled": {"type": "ppo", "proximal": True},
    "ppo_critic": {"type": "ppo_critic", "critic": CriticConfig(lr=1e-2, lam=0.9, gamma=0.95)},
    "opd": {"type": "opd", "reference": "OTHER"},
    "opsd": {"type": "opsd"},
    "kl in the loss": {"kl": KLConfig(coef=0.1), "reference": "OTHER", "entropy_bonus": 0.1},
    "kl in the reward": {"kl": KLConfig(coef=0.1, place="reward", estimator="k1"), "reference": "OTHER"},
}


def make_learner(
    folders: list[str],
    name: str,
    meshes: TrainerMeshes | None = None,
    group: dist.ProcessGroup | None = None,
    trainer: dict[str, Any] | None = None,
    **optim: float,
) -> Learner:
    """A learner of the case on the first folder's model; the second one is the reference, where one is named."""
    fields = {key: folders[1] if value == "OTHER" else value for key, value in CASES[name].items()}
    config = Config(
        model=ModelConfig(name=folders[0]),
        trainer=TrainerConfig(optim=OptimConfig(**({"lr": 1e-3, "max_norm": 0.0} | optim)), **(trainer or {})),
        orchestrator=OrchestratorConfig(algorithm=AlgorithmConfig(**fields)),
    )
    return Learner(config, meshes, CPU, group)


def make_samples(name: str, count: int = 5) -> list[TrainSample]:
    """As `weigh` would make them for the case."""
    samples = []
    for i in range(count):
        rng = np.random.default_rng(i)
        prompt, length = 2 + i % 3, 6 + 2 * i
        mask = ((np.arange(length) >= prompt) & (rng.random(length) < 0.8)).astype(np.uint8)
        mask[prompt] = 1
        share = 1 / 40
        samples.append(
            TrainSample(
                tokens=rng.integers(1, VOCAB, length).astype(np.int32),
                mask=mask,
                logprobs=(np.log(rng.uniform(0.01, 0.05, length)) * mask).astype(np.float32),
                temperatures=np.where(mask, 0.8, 1.0).astype(np.float32),
                pg_weight=0.0
                if name in ("opd", "opsd")
                else share * (1.0 if "critic" in name else float(rng.normal())),
                kl_weight=share if name in ("opd", "opsd") else 0.1 * share * ("kl" in name),
                entropy_weight=0.1 * share * (name == "kl in the loss"),
                reward=float(i % 2) if "critic" in name else 0.0,
                hint=rng.integers(1, VOCAB, 4 + i).astype(np.int32) if name == "opsd" else None,
            )
        )
    return samples
