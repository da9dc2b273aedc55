"""Classes whose methods are tools."""

from __future__ import annotations

from typing import Any


class Counter:
    """Count up to the row's goal."""

    alive = 0

    def __init__(self, start: int = 0) -> None:
        self._value = start
        Counter.alive += 1

    def reset(self, goal: int) -> str:
        """Not a tool."""
        self._goal = goal
        return f"Count to {goal}."

    def add(self, amount: int) -> int:
        """Add to the counter.

        Args:
            amount: how much.
        """
        if amount < 0:
            raise ValueError("only up")
        self._value += amount
        return self._value

    async def value(self) -> int:
        """The counter."""
        return self._value

    def hidden(self) -> None: ...

    def reward(self) -> dict[str, float]:
        """Not a tool."""
        return {"near": 0.5 * (self._value > 0), "there": float(self._value == self._goal)}

    def tasks(self) -> list[dict[str, Any]]:
        """Not a tool."""
        return [{"goal": n, "note": "x"} for n in range(1, 21)]

    def close(self) -> None:
        """Not a tool."""
        Counter.alive -= 1


class Silent:
    """Says nothing itself; its reward is an attribute."""

    reward: Any = None

    async def reset(self, **row: Any) -> None:
        self.reward = row.get("worth", 1.0)

    def look(self) -> str:
        """Look."""
        return "nothing"


class Failing(Silent):
    """Its reward raises."""

    def reset(self, **row: Any) -> str:
        return "go"

    def reward(self) -> float:
        raise KeyError("lost")


class NoTools:
    reward = 1.0

    def reset(self) -> str:
        return "go"


class NoReward:
    def reset(self) -> str:
        return "go"

    def look(self) -> str:
        """Look."""
        return ""


def grade(environment: Counter, row: dict[str, Any], completion: str) -> float:
    """A reward by import path."""
    return float(environment._value == row["goal"]) + float(completion == "done")
