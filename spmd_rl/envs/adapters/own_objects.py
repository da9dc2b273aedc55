"""Users' own objects in an episode: calls with a deadline, and numbers that are rewards.

It refuses to know what the objects are for. Invariants: a call that blocks or hangs holds up no other episode; what is
no finite number is never a reward.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spmd_rl.envs.deadline import within
from spmd_rl.envs.threads import Threads
from spmd_rl.rollouts.types import Reward


async def called(function: Callable[..., Any], arguments: dict[str, Any], deadline_s: float) -> Any:
    """function(**arguments), awaited where it is async, else in a thread. TooSlow after the deadline."""
    if inspect.iscoroutinefunction(function):
        return await within(deadline_s, function(**arguments))
    return await Threads(function).call(arguments, deadline_s)


def accepted(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """What of `given` the function names; everything where it takes any keyword. TypeError when it needs more."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        given = {name: value for name, value in given.items() if name in by_name}
    signature.bind(**given)
    return given


def number(value: Any, what: str) -> float:
    """A finite number. ValueError, which names `what` it is of, for anything else."""
    if not isinstance(value, numbers.Real | np.bool_) or not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, not {value!r} ({type(value).__name__})")
    return float(value)


def as_reward(value: Any, what: str) -> Reward:
    """A number, or named numbers that are added up. ValueError for anything else."""
    if not isinstance(value, Mapping):
        return Reward(number(value, what))
    if not value:
        raise ValueError(f"{what} is an empty dict: it needs a named number")
    parts = {str(name): number(part, f"{what}, part {name!r},") for name, part in value.items()}
    return Reward(sum(parts.values()), parts)
