"""How a program ended, as a reward.

By default: it exited with 0, and its last line on stdout is a JSON object with the number `reward` and, if it likes,
other numbers: the reward's parts. Or by its exit code alone, where rewards of exit codes are given. Everything else is
a `RewardError` that shows the end of what it printed: a program that crashed says nothing about the policy.

It refuses to know what the program did.
"""

from __future__ import annotations

import json
import math
import signal
from typing import Any

from spmd_rl.envs.sandbox.program import FLOOD, Ended
from spmd_rl.rollouts.types import Reward, RewardError

TAIL = 2000  # characters that an error shows


def verdict(ended: Ended, exit_rewards: dict[int, float]) -> Reward | RewardError:
    """The reward; `exit_rewards` by exit code, empty where the last line says it."""
    if ended.killed:
        flood = f"it printed more than {FLOOD // 2**20} MiB"
        return _error(ended, flood if ended.killed == "output" else "it was ended from outside", "killed")
    if ended.code < 0:
        return _error(ended, f"it was ended by {_signal(-ended.code)}", "exit")
    if exit_rewards:
        if ended.code not in exit_rewards:
            return _error(ended, f"it exited with {ended.code}, for which exit_rewards has no reward", "exit")
        return Reward(exit_rewards[ended.code])
    if ended.code:
        return _error(ended, f"it exited with {ended.code}", "exit")
    return _said(ended)


def _said(ended: Ended) -> Reward | RewardError:
    """What the last line says."""
    lines = ended.stdout.text().strip().splitlines()
    last = lines[-1] if lines else ""
    try:
        value = json.loads(last)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or "reward" not in value:
        why = f'the last line that it printed is {last[:200]!r}, not {{"reward": NUMBER, …}}'
        return _error(ended, why, "no_reward")
    numbers = {name: _number(item) for name, item in value.items()}
    if wrong := [name for name, number in numbers.items() if number is None]:
        return _error(ended, f"{wrong[0]!r} in the last line that it printed is no finite number", "no_reward")
    parts: dict[str, Any] = dict(numbers)
    return Reward(parts.pop("reward"), parts)


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _error(ended: Ended, why: str, kind: str) -> RewardError:
    printed = ended.stderr.text().strip() or ended.stdout.text().strip()
    return RewardError(f"the program has no reward: {why}. The end of what it printed:\n{printed[-TAIL:]}", kind)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
