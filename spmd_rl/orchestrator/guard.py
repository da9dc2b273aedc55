"""The collapse guard: says when a run has stopped learning and begun to fall apart.

It looks at four numbers of every step, at medians over `guard.window` steps, so that one bad batch means nothing:

    reward          has lost `reward_drop` of its best median, and more than it moved about at its best (or for twice
                    as long)
    entropy         is `entropy_factor` times what it was at first, or that many times less, and the reward is no better
    gradient norm   has been `norm_factor` times its usual size in every step of the window
    off-policy KL   likewise, and above 0.1 nats: training no longer speaks of what was sampled

Entropy that falls while the reward rises is learning, and no reason. A pure function of the history: it refuses to know
about checkpoints, time and what happens next. Invariant: nothing is said before two windows of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from spmd_rl.config.tree import GuardConfig

WATCHED = ("reward/mean", "entropy", "grad_norm", "offpolicy/k3_mean")
LARGE_KL = 0.1  # nats per token
REMEMBERED = 1000  # steps, beside those of the first window; a run may take any number
TINY = 1e-12  # a usual size of zero would make everything a multiple of it


@dataclass(frozen=True)
class Collapse:
    """What was seen."""

    step: int
    why: str


class Guard:
    """Watches one run."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._history: list[tuple[int, dict[str, float]]] = []
        self._best = -float("inf")  # of the rewards' medians
        self._spread = 0.0  # between the largest and the smallest reward of that window

    def watch(self, step: int, metrics: Mapping[str, float]) -> Collapse | None:
        """Take in a step; a verdict when the run has collapsed."""
        self._history.append((step, {name: metrics[name] for name in WATCHED if name in metrics}))
        if len(self._history) > self._config.window + REMEMBERED:
            del self._history[self._config.window]  # how it began is what entropy is compared with
        reasons = list(self._reasons()) if len(self._history) >= 2 * self._config.window else []
        recent = self._values("reward/mean")[-self._config.window :]
        if len(recent) == self._config.window and median(recent) > self._best:
            self._best = median(recent)
            self._spread = max(recent) - min(recent)
        return Collapse(step, "; ".join(reasons)) if reasons else None

    def forget_after(self, step: int) -> None:
        """The run went back to `step`: what came later did not happen."""
        kept, self._history, self._best = self._history, [], -float("inf")
        for at, metrics in kept:
            if at <= step:
                self.watch(at, metrics)

    def state(self) -> list[Any]:
        """The history, for a snapshot."""
        return [[step, metrics] for step, metrics in self._history]

    def restore(self, state: list[Any]) -> None:
        """Watch the history of a snapshot again."""
        for step, metrics in state:
            self.watch(step, metrics)

    def _reasons(self) -> Iterator[str]:
        config, window = self._config, self._config.window
        first_step = self._history[-window][0]
        span = f"steps {first_step} to {self._history[-1][0]}"
        rewards = self._values("reward/mean")
        now = median(rewards[-window:]) if rewards else 0.0
        enough = config.reward_drop * abs(self._best)
        for_long = bool(rewards) and max(rewards[-2 * window :]) < self._best - enough
        if rewards and self._best - now > enough and (self._best - now > self._spread or for_long):
            yield f"the reward fell from {self._best:.3g} to {now:.3g} ({span})"
        entropies = self._values("entropy")
        before, after = median(entropies[:window]), median(entropies[-window:])
        no_better = not rewards or now <= median(rewards[:window])
        if no_better and (after > config.entropy_factor * before or after * config.entropy_factor < before):
            yield f"the entropy went from {before:.3g} to {after:.3g} nats, and the reward is no better ({span})"
        for name, what, least in (
            ("grad_norm", "gradient norm", 0.0),
            ("offpolicy/k3_mean", "off-policy KL", LARGE_KL),
        ):
            values = self._values(name)
            usual = max(median(values[:-window]), TINY)
            if min(values[-window:]) > max(config.norm_factor * usual, least):
                yield f"the {what} is {median(values[-window:]):.3g}, usually {usual:.3g} ({span})"

    def _values(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in self._history if name in metrics]


ADVICE = "try a lower learning rate, fewer minibatches, a lower max_lag or a stricter correction (docs/algorithms.md)"
