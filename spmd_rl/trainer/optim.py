"""AdamW, gradient clipping and the learning-rate schedule.

It refuses to know about the model, the loss and ranks: parameters may be plain tensors or DTensors. The schedule is a
pure function of the step, so there is no scheduler state to save.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from spmd_rl.config.tree import OptimConfig, SchedulerConfig


def make_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """torch's AdamW over all parameters, decay on all of them alike (Loshchilov and Hutter 2019).

    `fused` works on CPU and CUDA, for plain parameters and for DTensors. The learning rate of a step is set in
    `param_groups` before the step.
    """
    groups = [{"params": group} for group in by_mesh(parameters)]
    return torch.optim.AdamW(
        groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of all gradients together, over all shards: a collective when gradients are DTensors."""
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group]) for group in by_mesh(with_gradient(parameters))]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(whole))


def clip_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scales all gradients in place by max_norm / norm where that is below 1; max_norm 0 never clips."""
    if max_norm > 0:
        for group in by_mesh(with_gradient(parameters)):
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)


def with_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those that have one."""
    return [parameter for parameter in parameters if parameter.grad is not None]


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters, grouped by the mesh that they are sharded over: one operation can't take DTensors of several."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def learning_rate(step: int, optim: OptimConfig, scheduler: SchedulerConfig, max_steps: int) -> float:
    """The learning rate of the optimizer step that `step` steps came before (0 for the first).

    Warm-up rises linearly and its last step has the full rate: lr · (step + 1) / warmup_steps. After it, with
    t = (step − warmup_steps) / decay_steps held at 1 from there on: `constant` stays at lr, `linear` is
    lr + (min_lr − lr) · t, `cosine` is min_lr + (lr − min_lr) · (1 + cos πt) / 2 (Loshchilov and Hutter 2017).
    decay_steps = 0 means "until max_steps". Raises ValueError for a negative step or an unknown schedule.
    """
    if step < 0:
        raise ValueError(f"learning_rate counts optimizer steps from 0, got step {step}")
    if step < scheduler.warmup_steps:
        return optim.lr * (step + 1) / scheduler.warmup_steps
    decay_steps = scheduler.decay_steps or max(max_steps - scheduler.warmup_steps, 1)
    t = min((step - scheduler.warmup_steps) / decay_steps, 1.0)
    match scheduler.type:
        case "constant":
            return optim.lr
        case "linear":
            return optim.lr + (scheduler.min_lr - optim.lr) * t
        case "cosine":
            return scheduler.min_lr + (optim.lr - scheduler.min_lr) * (1 + math.cos(math.pi * t)) / 2
        case other:
            raise ValueError(f"unknown scheduler.type {other!r}; choose constant, linear or cosine")
