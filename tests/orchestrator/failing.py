"""Rollouts that fail: environments that raise, and the episode of a single attempt."""

from __future__ import annotations

import asyncio

from spmd_rl.rollouts.types import Episode, Task
from spmd_rl.world.messages import Cancel
from tests.orchestrator.fake_run import FakeEnvironment, make_config, prepare
from tests.orchestrator.virtual_time import run


class Broken(RuntimeError):
    """The environment's own error."""


async def boom(number: int, task: Task) -> None:
    raise Broken(f"attempt {number} exploded")


def root(error: BaseException) -> BaseException:
    """The first error inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def one_episode(env: FakeEnvironment, **options) -> Episode:
    """The episode of one attempt at task 0, with one replica and one rollout in flight."""

    async def main() -> Episode:
        config = options.pop("config", make_config())
        made = await prepare(config, [env], **options)
        made.loop.versions.publish(0)
        await made.loop.versions.wait_everywhere(0)
        policy = made.services.policy(config.orchestrator.sampling, group=0, rollout=0, seed=0)
        episode = await made.services.rollouts.run(env, env.task(0, "train"), policy, config.deadlines.env_s)
        assert made.services.router.depth == [0]
        await asyncio.sleep(1)  # a Cancel arrives with a tick
        assert not any(made.cluster.misbehaviour.silent(r) for r in made.cluster.requests.values()) or any(
            isinstance(decision, Cancel) for _, decision in made.cluster.decisions
        )
        await made.cluster.close()
        return episode

    return run(main())


def failing_every(n: int):
    async def act(number: int, task: Task) -> None:
        if number % n == n - 1:
            raise Broken(f"attempt {number} exploded")

    return act
