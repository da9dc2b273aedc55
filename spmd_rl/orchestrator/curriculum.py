"""Which task of a source comes next.

`Cyclic` goes through the tasks in the order of their numbers, for ever. `DifficultyPool` keeps a set of tasks and asks
more often for those that the policy solves sometimes: a group of only failures or only successes teaches nothing.

It refuses to know about groups and rollouts. Invariants: what comes next is a function of the calls alone, so a run
that is taken up again, or replayed, draws the same; what `state` gives and `restore` takes is everything.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, Protocol

from spmd_rl.config.tasks import PoolConfig, SourceConfig

Level = Literal["medium", "easy", "hard"]


class Curriculum(Protocol):
    """Numbers of training tasks, one after the other."""

    drawn: int  # tasks so far

    def next(self) -> int:
        """The task that comes next; asking changes nothing."""
        ...

    def drew(self, index: int) -> None:
        """This task was drawn."""
        ...

    def ended(self, index: int, reward: float) -> None:
        """A group of this task came to this mean reward."""
        ...

    def state(self) -> Any:
        """Everything, as plain data."""
        ...

    def restore(self, state: Any) -> None:
        """Be as the curriculum was that gave this state."""
        ...


class Cyclic:
    """0, 1, 2, …: environments and datasets repeat or shuffle as they like."""

    def __init__(self) -> None:
        self.drawn = 0

    def next(self) -> int:
        return self.drawn

    def drew(self, index: int) -> None:
        self.drawn = index + 1

    def ended(self, index: int, reward: float) -> None:
        pass

    def state(self) -> int:
        return self.drawn

    def restore(self, state: int) -> None:
        self.drawn = state


class DifficultyPool:
    """Tasks 0 … n − 1 by the mean reward of their last group: easy, hard, or medium (at first, all of them).

    The level furthest behind its share gives the next task, the one in it that was drawn longest ago. A level without
    tasks gives its share to the others.
    """

    def __init__(self, config: PoolConfig) -> None:
        medium = 1.0 - config.easy_share - config.hard_share
        self._config = config
        self._shares: dict[Level, float] = {"medium": medium, "easy": config.easy_share, "hard": config.hard_share}
        self.drawn = 0
        self._asked: Counter[Level] = Counter()
        self._levels: dict[int, Level] = {}  # of tasks that are not medium
        # Tasks of each level, longest ago first: dicts keep the order in which keys came in.
        self._queues: dict[Level, dict[int, None]] = {
            "medium": dict.fromkeys(range(config.tasks)),
            "easy": {},
            "hard": {},
        }

    def next(self) -> int:
        return next(iter(self._queues[self._next_level()]))

    def drew(self, index: int) -> None:
        level = self._level(index)
        self._asked[level] += 1
        self.drawn += 1
        del self._queues[level][index]
        self._queues[level][index] = None

    def ended(self, index: int, reward: float) -> None:
        level: Level = "medium"
        if reward >= self._config.easy:
            level = "easy"
        elif reward <= self._config.hard:
            level = "hard"
        before = self._level(index)
        if level == before:
            return
        del self._queues[before][index]
        self._queues[level][index] = None
        self._levels[index] = level
        if level == "medium":
            del self._levels[index]

    def state(self) -> dict[str, Any]:
        return {
            "drawn": self.drawn,
            "asked": dict(self._asked),
            "queues": {level: list(queue) for level, queue in self._queues.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn, self._asked = state["drawn"], Counter(state["asked"])
        self._queues = {level: dict.fromkeys(queue) for level, queue in state["queues"].items()}
        self._levels = {index: level for level in ("easy", "hard") for index in self._queues[level]}

    def _level(self, index: int) -> Level:
        return self._levels.get(index, "medium")

    def _next_level(self) -> Level:
        there = [level for level, queue in self._queues.items() if queue]
        wanted = [level for level in there if self._shares[level] > 0] or there
        return min(wanted, key=lambda level: (self._asked[level] + 1) / (self._shares[level] or 1.0))


def make_curriculum(source: SourceConfig) -> Curriculum:
    """The one that a source asks for."""
    return DifficultyPool(source.pool) if source.curriculum == "difficulty_pool" else Cyclic()
