"""A run in which nothing happens any more ends, and says what is outstanding."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from spmd_rl.orchestrator.stall import Stalled, watch_progress
from spmd_rl.world.messages import EngineLoad, Pulled
from tests.orchestrator.fake_run import make_config, prepare
from tests.orchestrator.virtual_time import run


class Heard:
    """The part of a link that the progress watch looks at."""

    heard, waiting = 0, 3


def test_nothing_heard_for_too_long_is_an_error_that_says_what_is_outstanding() -> None:
    beats = []

    async def main() -> None:
        link = Heard()
        watch = asyncio.create_task(watch_progress(link, 60.0, lambda: beats.append(asyncio.get_running_loop().time())))
        for _ in range(10):
            await asyncio.sleep(50)
            link.heard += 1
        await watch

    with pytest.raises(Stalled, match=r"60 s \(deadlines.stall_s\); 3 generations are outstanding"):
        run(main())
    assert beats[-1] == pytest.approx(560, abs=0.3)
    assert max(np.diff(beats)) < 0.2


def test_counters_of_an_idle_engine_are_no_progress() -> None:
    async def main() -> tuple[int, int]:
        made = await prepare(make_config())
        link = made.loop.link
        link.deliver(1, EngineLoad(2, 1, 1.0, 1, 1.0))
        await asyncio.sleep(1)
        before = link.heard
        made.loop.versions.publish(0)
        link.deliver(1, Pulled(2, 0, 1, 0.1, 0.1, 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        after = link.heard
        await made.cluster.close()
        return before, after

    assert run(main()) == (0, 1)
