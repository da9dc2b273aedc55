"""Rank 0 of a program that only asks a model: engines, no trainer, the one version that a model folder holds.

It refuses to know what is asked: that is the work it is handed (`eval_role.py`, `generate_role.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from spmd_rl.orchestrator.connect import after, expect_ready, first_error, router_for
from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.rollouts import Rollouts
from spmd_rl.orchestrator.sampler import Services
from spmd_rl.orchestrator.signals import stop_signals
from spmd_rl.orchestrator.stall import watch_progress
from spmd_rl.orchestrator.steering import Steering

if TYPE_CHECKING:
    from spmd_rl.world.world import World

T = TypeVar("T")


def ask(
    world: World,
    stop_token_ids: list[int],
    work: Callable[[Services, Steering], Awaitable[T]],
    show: Callable[[str], object],
) -> T:
    """What `work` comes to, with engines behind its services; then every rank is told to stop.

    Its second argument says whether somebody asked for the end (SIGTERM, SIGUSR1, a stop file); `show` prints.
    """
    return asyncio.run(_ask(world, stop_token_ids, work, show))


async def _ask(
    world: World,
    stop_token_ids: list[int],
    work: Callable[[Services, Steering], Awaitable[T]],
    show: Callable[[str], object],
) -> T:
    from spmd_rl.world.clock import Conductor

    config, mesh, watchdog = world.config, world.mesh, world.watchdog
    link = Link(len(mesh.replicas), trainers=0)
    members = [f"rank {rank} (inference)" for rank in mesh.leaders]
    clock = Conductor(world.groups["ctl"], members, config.clock.period_ms / 1e3, link.deliver, watchdog.fail)
    link.connect(clock, None)
    ready, steering = expect_ready(link, len(members)), Steering(config.output_dir, show)
    services = Services(config, link, router_for(config, link.replicas), Rollouts(config), stop_token_ids)
    results: list[T] = []

    async def do() -> None:
        results.append(await work(services, steering))

    clock.start()
    with watchdog.stage("ask the model", config.deadlines.heartbeat_s, whole=True), stop_signals(steering, watchdog):
        watchers = [watch_progress(link, config.deadlines.stall_s, watchdog.beat), steering.watch()]
        await first_error(after(ready, do()), [asyncio.create_task(watcher) for watcher in watchers])
        link.stop()
        await asyncio.to_thread(clock.join, config.deadlines.step_s)
    return results[0]
