"""Whether rank 0 gets anywhere: the watchdog is told that its event loop turns; silence from everybody is an error."""

from __future__ import annotations

import asyncio

from spmd_rl.orchestrator.link import Link


class Stalled(RuntimeError):
    """Nothing happened for too long."""


async def watch_progress(link: Link, stall_s: float, beat, period_s: float = 0.1) -> None:
    """Tell the watchdog that the event loop turns; raise `Stalled` when nothing at all came in for `stall_s`."""
    clock = asyncio.get_running_loop()
    heard, at = link.heard, clock.time()
    while True:
        await asyncio.sleep(period_s)
        beat()
        if link.heard != heard:
            heard, at = link.heard, clock.time()
        elif clock.time() - at > stall_s:
            raise Stalled(
                f"no rollout, no step and no pull for {stall_s:g} s (deadlines.stall_s); "
                f"{link.waiting} generations are outstanding"
            )
