"""From `source.reward` to an awaitable that always answers: a `Reward`, or a `RewardError` that says why not.

A reward is a built-in (`graders.py`) or a user's function, found by import path, sync or async. It gets what it names
among `completion` (text before the end token), `tokens` (ids, the end token included), `row` (the dataset's) and
`prompt` (text), and returns a number, or a dict of named numbers that are weighted and added, or raises. It runs beside
the event loop (`threads.py`, `pool/`), and never longer than its deadline.

Invariants: an exception, a deadline, a NaN or a strange type is never a zero; a reward that hangs holds up nobody.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from spmd_rl.config.imports import load_object
from spmd_rl.config.tree import SourceConfig
from spmd_rl.envs.deadline import TooSlow
from spmd_rl.envs.graders import GRADERS
from spmd_rl.envs.pool.errors import PoolError, Raised
from spmd_rl.envs.pool.pool import Pool
from spmd_rl.envs.threads import Threads
from spmd_rl.rollouts.types import Reward, RewardError

GIVEN = ("completion", "tokens", "row", "prompt")


class BadReward(ValueError):
    """What a function returned is no reward, whatever the completion was."""


class RewardFunction:
    """The reward of one source."""

    def __init__(self, source: SourceConfig) -> None:
        """Raises ValueError, TypeError or ImportError for a reward that can't work."""
        self.name, self._deadline_s, self._weights = source.reward, source.reward_s, dict(source.weights)
        self.function: Callable[..., Any] = _find(source)
        self._takes = _takes(self.name, self.function)
        self._beside = _beside(source, self.function)

    async def __call__(self, **given: Any) -> Reward | RewardError:
        """The reward of one completion; `given` holds all of GIVEN."""
        try:
            return self.as_reward(await self.call(given))
        except Exception as error:
            return RewardError(self.explain(error))

    def explain(self, error: Exception) -> str:
        """What went wrong in `call` or `as_reward`."""
        if isinstance(error, BadReward):
            return str(error)
        if isinstance(error, TooSlow):
            return f"the reward {self.name} took longer than reward_s = {self._deadline_s:g} s"
        if isinstance(error, PoolError) and not isinstance(error, Raised):
            return f"the reward {self.name} came to no result: {error}"
        raised = str(error) if isinstance(error, Raised) else f"{type(error).__name__}: {error}"
        return f"the reward {self.name} raised {raised}"

    def as_reward(self, result: Any) -> Reward:
        """What a function returned. Raises BadReward for what is no reward."""
        if not isinstance(result, Mapping):
            number = self._number(result, "it")
            if self._weights:
                raise BadReward(
                    f"weights name {', '.join(self._weights)}, and the reward {self.name} returned {result!r}: return "
                    "a dict of named numbers, or remove the weights"
                )
            return Reward(number)
        parts = {str(name): self._number(value, f"its part {name!r}") for name, value in result.items()}
        if not parts:
            raise BadReward(f"the reward {self.name} returned no part at all")
        if unknown := set(self._weights) - set(parts):
            raise BadReward(
                f"weights name {', '.join(sorted(unknown))}; the reward {self.name} has the parts {', '.join(parts)}"
            )
        return Reward(sum(self._weights.get(name, 1.0) * value for name, value in parts.items()), parts)

    def _number(self, value: Any, what: str) -> float:
        if not isinstance(value, numbers.Real | np.bool_):  # numpy's numbers are, arrays and strings are not
            raise BadReward(
                f"the reward {self.name} must return a number or a dict of numbers; {what} is {value!r} "
                f"({type(value).__name__})"
            )
        if not math.isfinite(value):
            raise BadReward(
                f"the reward {self.name} returned {value} ({what}); raise an error where none can be computed"
            )
        return float(value)

    async def call(self, given: dict[str, Any]) -> Any:
        """What the function returns, or raises."""
        return await self._beside({name: given[name] for name in self._takes}, self._deadline_s)


def _beside(source: SourceConfig, function: Callable[..., Any]) -> Callable[[dict[str, Any], float], Awaitable[Any]]:
    """Calls the function with a deadline, in a thread, or in processes where it asks for that (`in_process`)."""
    if not getattr(function, "in_process", False):
        return Threads(function).call
    pool = Pool(workers=0, call_workers=source.reward_workers, name=f"reward {source.reward}")
    return partial(pool.call, source.reward if ":" in source.reward else function)


def _find(source: SourceConfig) -> Callable[..., Any]:
    if ":" in source.reward:
        function = load_object(source.reward, "reward")
        if not callable(function):
            raise TypeError(f"reward = {source.reward!r} is a {type(function).__name__}, not a function")
        if source.reward_args:
            raise ValueError(f"reward_args belong to built-in rewards; {source.reward} gets its row instead")
        return function
    if source.reward not in GRADERS:
        near = difflib.get_close_matches(source.reward, GRADERS, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"built in: {', '.join(GRADERS)}."
        raise ValueError(f"unknown reward {source.reward!r}; {hint} Your own goes as file.py:function")
    grader: Any = GRADERS[source.reward]
    try:
        built: Callable[..., Any] = grader(source.answer, **source.reward_args)
    except TypeError as error:
        known = list(inspect.signature(grader).parameters)[1:]
        raise TypeError(
            f"reward {source.reward}: {error}; reward_args may hold {', '.join(known) or 'nothing'}"
        ) from None
    if not source.answer and source.reward in ("exact", "math"):
        raise ValueError(f"reward = {source.reward} compares with the right answer: name its column in `answer`")
    return built


def _takes(name: str, function: Callable[..., Any]) -> list[str]:
    """Which of GIVEN the function names. TypeError for a parameter that nobody fills."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(GIVEN)
    strange = [p.name for p in parameters if p.name not in GIVEN and p.default is p.empty]
    if strange:
        raise TypeError(f"reward {name} takes {', '.join(strange)}; it can be given {', '.join(GIVEN)}")
    return [p.name for p in parameters if p.name in GIVEN]
