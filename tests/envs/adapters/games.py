"""Small games of every shape that the adapter of Gym plays."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class Discrete:
    """As Gymnasium's, in what is looked at."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start = np.int64(n), np.int64(start)


class Box:
    """A space that no whole number fills."""


class Find:
    """Gymnasium's shape: name the hidden place; each step costs."""

    open_now = 0

    def __init__(self, places: int = 5, cost: float = 0.25) -> None:
        self.action_space, self._places, self._cost = Discrete(places, start=1), places, cost
        Find.open_now += 1

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        self._hidden = random.Random(seed).randint(1, self._places)
        return np.array([0, 0]), {}

    def step(self, action: int) -> tuple[Any, np.float64, bool, bool, dict]:
        assert isinstance(action, int)
        hit = action == self._hidden
        return np.array([action, self._hidden]), np.float64(hit - self._cost), hit, False, {}

    def close(self) -> None:
        Find.open_now -= 1


class Old:
    """The older Gym's shape: a method seed, four results; says the seed."""

    def seed(self, seed: int) -> None:
        self._seed = seed

    def reset(self) -> str:
        return f"seed {self._seed}"

    def step(self, action: str) -> tuple[str, float, bool, dict]:
        return f"you said {action}", float(len(action)), action == "end", {}


@dataclass
class Seen:
    """OpenEnv's shape."""

    text: str
    reward: float | None = None
    done: bool = False
    metadata: dict = field(default_factory=dict)


class Open:
    """Async, and its rewards may be missing."""

    async def reset(self, seed: int | None = None, **options: Any) -> Seen:
        return Seen(f"seed {seed}")

    async def step(self, action: str) -> Seen:
        return Seen("more") if action != "end" else Seen("over", 2.0, True)


class Unseeded:
    """Another game each time."""

    def reset(self) -> str:
        return "?"

    def step(self, action: str) -> tuple:
        return "?", 0.0, True, {}


class Wide(Find):
    """Its actions are arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = Box()

    def step(self, action: Any) -> tuple:
        return super().step(int(action[0]))


class Broken(Old):
    """Its reward is none."""

    def step(self, action: str) -> tuple:
        return "?", float("nan"), False, {}


class Crashes(Old):
    """It raises, and closes."""

    closed = 0

    def step(self, action: str) -> tuple:
        raise RuntimeError("the game crashed")

    def close(self) -> None:
        Crashes.closed += 1


def pair(text: str) -> list[float]:
    """An action of Wide."""
    return [float(text), 0.0]


def solve(task: Any, heard: list[str], rng: np.random.Generator) -> str:
    """The teacher of Find."""
    return str(random.Random(task.data["seed"]).randint(1, 5))
