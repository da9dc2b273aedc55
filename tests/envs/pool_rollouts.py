"""Rollouts in worker processes: one of them, whether two are the same, and where they run."""

from __future__ import annotations

import asyncio
from typing import Any

from spmd_rl.envs.pool.environment import PooledEnvironment
from spmd_rl.rollouts.plain import plain_episode
from spmd_rl.rollouts.types import Episode
from tests.envs.pool_envs import Adder, told


def attempt(env: PooledEnvironment, do: str, policy: Any = None, **data: Any) -> Episode:
    return asyncio.run(env.rollout(told(do, **data), policy or Adder()))


def same(one: Episode, other: Episode) -> None:
    """Equal in all columns, types of arrays included."""
    assert one.task == other.task and one.reward == other.reward and one.status == other.status
    for left, right in zip(one.samples, other.samples, strict=True):
        for name in ("tokens", "mask", "logprobs", "versions", "temperatures"):
            assert getattr(left, name).dtype == getattr(right, name).dtype
        assert (left.agent, left.reward) == (right.agent, right.reward)
    assert str(plain_episode(one)) == str(plain_episode(other))


def both_pids(env: PooledEnvironment) -> set[int]:
    async def main() -> set[int]:
        found: set[int] = set()
        async with asyncio.timeout(60):
            while len(found) < 2:
                episodes = await asyncio.gather(*(env.rollout(told("pid"), Adder()) for _ in range(4)))
                found |= {int(episode.reward.why) for episode in episodes}
        return found

    return asyncio.run(main())
