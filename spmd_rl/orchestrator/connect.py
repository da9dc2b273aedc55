"""What every program of rank 0 does with engines: wait until they are built, choose one, end on the first error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from spmd_rl.config.tree import Config
from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.router import Router
from spmd_rl.world.messages import Ready


def router_for(config: Config, replicas: int) -> Router:
    """A group stays on one replica unless that is a whole group ahead of the shallowest one."""
    return Router(replicas, slack=config.orchestrator.group_size, block=config.inference.vllm.get("block_size", 32))


async def after(ready: asyncio.Event, run: Any) -> None:
    """Run `run` when everybody is ready."""
    await ready.wait()
    await run


def expect_ready(link: Link, count: int) -> asyncio.Event:
    """Set when all leaders have built what they are."""
    everybody, seen = asyncio.Event(), set()

    def on_ready(event: Ready) -> None:
        seen.add(event.rank)
        if len(seen) == count:
            everybody.set()

    link.listen(Ready, on_ready)
    return everybody


async def first_error(main: Coroutine[Any, Any, None], watchers: list[asyncio.Task[None]]) -> None:
    """Run `main`; the first error of anybody, out of its exception group, ends the run.

    Watchers that the end needs (a clock in lockstep) go on behind it.
    """
    task = asyncio.ensure_future(main)
    while not task.done():
        done, _ = await asyncio.wait({task, *watchers}, return_when=asyncio.FIRST_COMPLETED)
        for finished in done:
            error = finished.exception()
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if error is not None:
                raise error
