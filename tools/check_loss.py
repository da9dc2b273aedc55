"""Does your own loss or advantage keep the invariants that every built-in one is tested for?

    python tools/check_loss.py configs/own_loss.py:tanh_ratio
    python tools/check_loss.py configs/own_loss.py:ranks --kind advantage

A loss is `fn(inputs: LossInputs) -> float[T]` (spmd_rl/trainer/inputs.py), an advantage
`fn(rewards, group) -> float[n]`.
Each check prints ok, FAILED or a note; it ends with 1 when one failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmd_rl.config.imports import load_object
from spmd_rl.rollouts.types import Episode, Group, Reward, Task

LENGTHS = (5, 3, 7)
EXTREME = 80.0  # nats
Finding = tuple[str, str, str]  # what was checked, "ok" | "FAILED" | "note", what was seen


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("function", help="file.py:function or pkg.mod:function")
    parser.add_argument("--kind", choices=("loss", "advantage"), default="loss")
    given = parser.parse_args()
    try:
        function = load_object(given.function, "function")
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    checks = LOSS_CHECKS if given.kind == "loss" else ADVANTAGE_CHECKS
    failed = False
    for check in checks:
        try:
            findings = list(check(function))
        except Exception as error:  # whatever a user's function raises
            findings = [(str(check.__doc__).splitlines()[0], "FAILED", f"it raised {type(error).__name__}: {error}")]
        for what, verdict, seen in findings:
            print(f"{verdict:<8}{what:<62}{seen}")
            failed |= verdict == "FAILED"
        if failed and check is checks[0]:
            break  # nothing else makes sense with a wrong shape
    return int(failed)


# --- losses --------------------------------------------------------------------------------------------------------


def make_inputs(seed: int = 0, order: tuple[int, ...] = (0, 1, 2), spread: float = 0.3) -> Any:
    """A row of documents; each has its own random columns, whatever the order and the other documents."""
    import torch

    from spmd_rl.trainer.inputs import LossInputs

    columns: dict[str, list[Any]] = {}
    for document in order:
        generator = torch.Generator().manual_seed(100 * seed + document)
        n = LENGTHS[document]
        draw = {name: torch.randn(n, generator=generator, dtype=torch.float64) for name in ("b", "d", "w", "r")}
        mask = torch.arange(n) > 0
        columns.setdefault("logprobs_T", []).append(-2 + 0.5 * draw["b"] + spread * draw["d"])
        columns.setdefault("behaviour_T", []).append((-2 + 0.5 * draw["b"]) * mask)
        columns.setdefault("mask_T", []).append(mask)
        columns.setdefault("pg_weight_T", []).append(draw["w"].mean() * mask / 20)
        columns.setdefault("reference_T", []).append(-2 + 0.5 * draw["r"])
    lengths = torch.tensor([LENGTHS[document] for document in order])
    made = {name: torch.cat(parts) for name, parts in columns.items()}
    zeros = torch.zeros(int(lengths.sum()), dtype=torch.float64)
    return LossInputs(
        **made,
        entropies_T=zeros + 1,
        document_T=torch.arange(len(order)).repeat_interleave(lengths),
        documents=len(order),
        ce_weight_T=zeros,
        kl_weight_T=zeros,
        entropy_weight_T=zeros,
        proximal_T=made["logprobs_T"].clone(),
    )


def evaluate(function: Callable[..., Any], inputs: Any) -> tuple[Any, Any]:
    """(loss of every sampled token, gradient of the log-probabilities), as the trainer takes them."""
    import torch

    logprobs_T = inputs.logprobs_T.detach().clone().requires_grad_()
    term_T = torch.where(inputs.mask_T, function(replace(inputs, logprobs_T=logprobs_T)), 0.0)
    if not term_T.requires_grad:
        return term_T.detach(), torch.zeros_like(term_T)
    (gradient_T,) = torch.autograd.grad(term_T.sum(), logprobs_T)
    return term_T.detach(), gradient_T


def verdict(what: str, error: float, limit: float = 1e-9) -> Finding:
    """ok when an error is below its limit; NaN is not."""
    return what, "ok" if error <= limit else "FAILED", f"largest difference {error:.1e}"


def check_shape(function: Callable[..., Any]) -> Iterator[Finding]:
    """one finite number per token"""
    import torch

    inputs = make_inputs()
    result = function(inputs)
    if not isinstance(result, torch.Tensor) or result.shape != inputs.logprobs_T.shape:
        shape = tuple(getattr(result, "shape", ())) if isinstance(result, torch.Tensor) else type(result).__name__
        yield "one finite number per token", "FAILED", f"expected {tuple(inputs.logprobs_T.shape)}, got {shape}"
        return
    finite = bool(result[inputs.mask_T].isfinite().all())
    yield "one finite number per token", "ok" if finite else "FAILED", "" if finite else "not finite"
    _, gradient_T = evaluate(function, inputs)
    moves = bool((gradient_T != 0).any())
    yield "the loss has a gradient", "ok" if moves else "FAILED", "" if moves else "all zero: nothing would be learned"


def check_packing(function: Callable[..., Any]) -> Iterator[Finding]:
    """packing, micro-batches and data-parallel layout change nothing"""
    import torch

    packed, alone = make_inputs(), [make_inputs(order=(document,)) for document in range(3)]
    turned = make_inputs(order=(2, 0, 1))
    whole, parts = evaluate(function, packed), [evaluate(function, inputs) for inputs in alone]
    for i, what in ((0, "loss"), (1, "gradient")):
        apart = torch.cat([part[i] for part in parts])
        yield verdict(f"documents apart or in one row: same {what}", float((whole[i] - apart).abs().max()))
        pieces = evaluate(function, turned)[i].split([LENGTHS[2], LENGTHS[0], LENGTHS[1]])
        in_order = torch.cat([pieces[1], pieces[2], pieces[0]])
        yield verdict(f"documents in another order: same {what}", float((whole[i] - in_order).abs().max()))


def check_weights(function: Callable[..., Any]) -> Iterator[Finding]:
    """weights carry the denominator"""
    inputs = make_inputs()
    once, _ = evaluate(function, inputs)
    twice, _ = evaluate(function, replace(inputs, pg_weight_T=2 * inputs.pg_weight_T))
    yield verdict("twice the weight is twice the loss", float((twice - 2 * once).abs().max()))
    none, gradient_T = evaluate(function, replace(inputs, pg_weight_T=0 * inputs.pg_weight_T))
    yield verdict("no weight: no loss", float(none.abs().max()), 0.0)
    yield verdict("no weight: no gradient", float(gradient_T.abs().max()), 0.0)


def check_prompt(function: Callable[..., Any]) -> Iterator[Finding]:
    """what was given has no influence"""
    import torch

    inputs = make_inputs()
    moved = torch.where(inputs.mask_T, inputs.logprobs_T, inputs.logprobs_T - 7.0)
    before, after = evaluate(function, inputs), evaluate(function, replace(inputs, logprobs_T=moved))
    yield verdict("tokens that were not sampled: no influence", float((before[0] - after[0]).abs().max()))
    yield verdict("tokens that were not sampled: no gradient", float(before[1][~inputs.mask_T].abs().max()), 0.0)


def check_gradient(function: Callable[..., Any]) -> Iterator[Finding]:
    """the gradient is that of the loss"""
    inputs, step = make_inputs(spread=0.05), 1e-6
    _, gradient_T = evaluate(function, inputs)
    error = 0.0
    for t in range(len(gradient_T)):
        sums = []
        for sign in (step, -step):
            moved = inputs.logprobs_T.clone()
            moved[t] += sign
            sums.append(float(evaluate(function, replace(inputs, logprobs_T=moved))[0].sum()))
        error = max(error, abs((sums[0] - sums[1]) / (2 * step) - float(gradient_T[t])))
    what = "gradient equals finite differences (float64)"
    if error <= 1e-6 * max(1.0, float(gradient_T.abs().max())):
        yield what, "ok", f"largest difference {error:.1e}"
    else:
        yield what, "note", f"it differs by {error:.1e}: fine where a part is detached on purpose"


def check_extremes(function: Callable[..., Any]) -> Iterator[Finding]:
    """log-ratios of ±80 in float32"""
    import torch

    for sign in (1, -1):
        inputs = make_inputs()
        behaviour = torch.where(inputs.mask_T, inputs.logprobs_T - sign * EXTREME, 0.0)
        changes = {name: getattr(inputs, name).float() for name in ("logprobs_T", "pg_weight_T", "entropies_T")}
        inputs = replace(inputs, behaviour_T=behaviour.float(), **changes)
        loss_T, gradient_T = evaluate(function, inputs)
        fine = bool(loss_T.isfinite().all() and gradient_T.isfinite().all() and gradient_T.square().sum().isfinite())
        seen = f"loss up to {float(loss_T.abs().max()):.1e}, gradient up to {float(gradient_T.abs().max()):.1e}"
        yield (
            f"log-ratio {sign * EXTREME:+.0f}: loss, gradient and its norm are finite",
            "ok" if fine else "FAILED",
            seen,
        )


# --- advantages ----------------------------------------------------------------------------------------------------


def advantages(function: Callable[..., Any], rewards: list[float]) -> np.ndarray:
    """As rank 0 takes them."""
    task = Task("check", 0, {})
    group = Group(0, task, tuple(Episode(task, (), Reward(reward)) for reward in rewards), 0)
    return np.asarray(function(np.array(rewards), group), dtype=np.float64)


def check_numbers(function: Callable[..., Any]) -> Iterator[Finding]:
    """one finite number per rollout"""
    for rewards in ([1.0, 0.0, 0.0], [0.5], [1e6, -1e6], [0.0, 0.0]):
        values = advantages(function, rewards)
        fine = values.shape == (len(rewards),) and bool(np.isfinite(values).all())
        yield f"one finite number per rollout, rewards {rewards}", "ok" if fine else "FAILED", f"{values}"


def check_order(function: Callable[..., Any]) -> Iterator[Finding]:
    """the order of rollouts does not matter"""
    rewards = [0.3, 1.0, 0.0, 0.7, 0.7]
    turned = [2, 0, 4, 1, 3]
    here, there = advantages(function, rewards), advantages(function, [rewards[i] for i in turned])
    yield verdict("the order of rollouts does not matter", float(np.abs(here[turned] - there).max()))


def check_equal(function: Callable[..., Any]) -> Iterator[Finding]:
    """equal rewards"""
    values = advantages(function, [0.4] * 5)
    zero = not values.any()
    seen = "" if zero else f"they give {values}: right without a baseline; else such a group should teach nothing"
    yield "equal rewards give exactly 0", "ok" if zero else "note", seen


LOSS_CHECKS = [check_shape, check_packing, check_weights, check_prompt, check_gradient, check_extremes]
ADVANTAGE_CHECKS = [check_numbers, check_order, check_equal]

if __name__ == "__main__":
    sys.exit(main())
