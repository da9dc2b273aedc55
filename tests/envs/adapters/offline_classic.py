"""A classic environment of verifiers (up to 0.3.1) that needs no network: reversed words, a tool, a game, a chat."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

WORDS = ["abcd", "bcde", "cdef", "defg", "efgh", "fghi", "ghij", "hijk"]


def exact(completion: list[Any], answer: str, **kwargs: Any) -> float:
    """Whether the last message is the answer."""
    return float(completion[-1].content == answer)


def breaks(completion: list[Any], answer: str, **kwargs: Any) -> float:
    """A reward with a mistake of its own."""
    raise KeyError("the reward's own mistake")


async def whole_group(states: list[Any], **kwargs: Any) -> list[float]:
    """A reward of all rollouts of a task together."""
    return [0.0 for _ in states]


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


class Game(vf.MultiTurnEnv):
    """The environment says something after every reply."""

    async def env_response(self, messages: list[Any], state: Any, **kwargs: Any) -> list[Any]:
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]


class Forgetful(Game):
    """Every prompt is a new conversation."""

    async def get_prompt_messages(self, state: Any) -> list[Any]:
        return [{"role": "user", "content": f"forget everything, {len(state['trajectory'])}"}]


def load_environment(kind: str = "reverse", turns: int = 3) -> Any:
    """The environment."""
    rows = [{"question": word, "answer": word[::-1]} for word in WORDS]
    rewards = {"breaks": breaks, "group": whole_group}
    about: dict[str, Any] = {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[rewards.get(kind, exact)])}
    if kind == "tool":
        return vf.ToolEnv(tools=[add], max_turns=turns, **about)
    if kind in ("game", "forgetful"):
        return {"game": Game, "forgetful": Forgetful}[kind](max_turns=turns, **about)
    return vf.SingleTurnEnv(system_prompt="Reverse.", **about)
