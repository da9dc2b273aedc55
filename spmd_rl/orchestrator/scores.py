"""What the attempts at a set of tasks say about a policy: means and pass rates, with intervals.

- avg@k: the mean reward of k sampled attempts per task; every task counts alike.
- pass@k: the chance that at least one of k attempts passes, without bias from n ≥ k attempts of which c passed:
  1 − C(n − c, k) / C(n, k) (Chen et al., Evaluating Large Language Models Trained on Code, 2021, eq. 1).
- Intervals: half the width of the 95 % interval of the mean over tasks, 1.96 · s / √tasks, s the sample standard
  deviation between tasks: attempts at one task are not independent, tasks are. It says nothing for a single task, and
  too little where all tasks came out alike.

It refuses to know about rollouts and engines. Invariant: attempts without a reward count nowhere, never as a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

Z95 = 1.96


@dataclass(frozen=True)
class TaskScore:
    """The attempts at one task."""

    source: str
    index: int
    rewards: list[float | None]  # of the sampled attempts; None = no reward
    greedy: float | None = None
    versions: tuple[int, int] = (-1, -1)  # policy versions that sampled them, oldest and newest


def pass_at(k: int, attempts: int, passed: int) -> float:
    """The unbiased estimate of pass@k. ValueError with fewer than k attempts."""
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} can't be told from {attempts} attempts")
    return 1.0 - comb(attempts - passed, k) / comb(attempts, k)


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half the width of its 95 % interval); a single value has none (0)."""
    array = np.asarray(values, dtype=np.float64)
    half = Z95 * float(array.std(ddof=1)) / len(array) ** 0.5 if len(array) > 1 else 0.0
    return float(array.mean()), half


def scores(tasks: Sequence[TaskScore], pass_reward: float) -> dict[str, float]:
    """`reward` (avg@k), `greedy`, `pass@k` for k = 1, 2, 4, …, each with `_ci`; absent where nothing is known."""
    rewarded = [[reward for reward in task.rewards if reward is not None] for task in tasks]
    table = {
        "reward": [float(np.mean(rewards)) for rewards in rewarded if rewards],
        "greedy": [task.greedy for task in tasks if task.greedy is not None],
    }
    most = max((len(task.rewards) for task in tasks), default=0)
    for k in [k for power in range(most.bit_length()) if (k := 2**power) <= most]:
        counts = [(len(r), sum(x >= pass_reward for x in r)) for r in rewarded if len(r) >= k]
        table[f"pass@{k}"] = [pass_at(k, attempts, passed) for attempts, passed in counts]
    found: dict[str, float] = {}
    for name, values in table.items():
        if values:
            found[name], found[f"{name}_ci"] = mean_and_half(values)
    return found
