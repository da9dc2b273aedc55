"""Whether a rank that trains and infers in turns has the memory for it, said before anything is allocated.

An estimate from below: parameters, gradients, moments and what the engine reserves; activations come on top. It refuses
to know how memory is given back; it counts what is there at the same time.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from spmd_rl.config.tree import Config
from spmd_rl.world.host_memory import memory_total

MASTER, GRADIENT, MOMENTS = 4, 4, 8  # bytes per parameter, float32
GB = 1e9


class TooLittleMemory(RuntimeError):
    """The model does not fit where it was placed."""


@dataclass(frozen=True)
class Budget:
    """Bytes of one rank."""

    kept: int  # of the trainer, always
    gradients: int
    engine: int  # weights and KV cache, while it is awake
    releases: bool  # the engine gives its own back while the trainer works

    @property
    def infer(self) -> int:
        """While the engine is awake."""
        return self.kept + self.engine

    @property
    def train(self) -> int:
        """While the trainer works, without activations."""
        return self.kept + self.gradients + (0 if self.releases else self.engine)


def budget(config: Config, parameters: int, ranks: int, engine: int, releases: bool) -> Budget:
    """`parameters` of the model, sharded over so many trainer `ranks`; `engine` bytes are the engine's."""
    algorithm = config.orchestrator.algorithm
    critic = algorithm.type == "ppo_critic"
    reference = bool(algorithm.kl.coef) or algorithm.type == "opd"
    share = math.ceil(parameters / ranks)
    kept = share * (MASTER + MOMENTS) * (1 + critic) + share * MASTER * reference
    return Budget(kept, share * GRADIENT * (1 + critic), engine, releases)


def check_room(config: Config, parameters: int, ranks: int, device: torch.device, ranks_here: int) -> None:
    """Raise TooLittleMemory when the device, or this host's memory for its `ranks_here` ranks, can't hold both."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        engine = int(config.inference.vllm.get("gpu_memory_utilization", 0.9) * total)
        lower = "lower inference.vllm.gpu_memory_utilization"
    else:
        total = memory_total() // ranks_here
        wire = 4 if config.trainer.model.dtype == "float32" else 2
        cache = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * 2**30)
        engine = parameters * wire // config.inference.tp + cache
        lower = "lower VLLM_CPU_KVCACHE_SPACE (GiB)"
    releases = config.deployment.release_memory and device.type == "cuda"  # the CPU's engine keeps its weights
    problem = shortage(budget(config, parameters, ranks, engine, releases), total, lower)
    if problem:
        raise TooLittleMemory(problem)


def shortage(need: Budget, total: int, lower: str) -> str:
    """What does not fit and the way out; empty when all does."""
    for phase, size in (("infer", need.infer), ("train", need.train)):
        if size > total:
            return (
                f"too little memory to train and infer in turns: to {phase} takes at least {size / GB:.1f} GB on this "
                f"rank ({need.kept / GB:.1f} the trainer always, {need.gradients / GB:.1f} gradients, "
                f"{need.engine / GB:.1f} the engine), and there are {total / GB:.1f} GB: {lower}, start more ranks, "
                "or set deployment.placement = disaggregated"
            )
    return ""
