"""The fake itself: its time jumps, and it notices an orchestrator that breaks the protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spmd_rl.orchestrator.link import Link
from spmd_rl.rollouts.packing import pack
from spmd_rl.world.messages import Export, FreshOptimizer, Probed, Pull, Pulled, Send, Sent, Stop, Train, Trained
from tests.orchestrator.fake_cluster import FakeCluster, ProtocolError
from tests.orchestrator.virtual_time import Deadlock, run


def test_a_year_passes_at_once() -> None:
    async def main() -> tuple[float, list[str]]:
        loop, order = asyncio.get_running_loop(), []

        async def note(name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            order.append(name)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 365 * 86400)
        year = loop.time()
        await asyncio.gather(note("late", 2), note("early", 1))
        return year, order

    started = time.monotonic()
    assert run(main()) == (pytest.approx(365 * 86400), ["early", "late"])
    assert time.monotonic() - started < 60


def test_waiting_for_nothing_is_a_deadlock() -> None:
    with pytest.raises(Deadlock):
        run(asyncio.Event().wait())


def test_what_a_callback_raises_is_raised() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(ZeroDivisionError):
        run(main())


def train(step: int, phase: str = "rl") -> Train:
    return Train(step, phase, [[vars(row) for row in pack([], 1, 8).rows[0]]])


def said(*calls: Callable[[Link], Any]) -> None:
    """Say all this to a fake cluster of one replica and two trainer ranks."""

    async def main() -> None:
        link = Link(replicas=1, trainers=2)
        for kind in (Trained, Sent, Pulled, Probed):
            link.listen(kind, lambda event: None)
        cluster = FakeCluster(link)
        for call in calls:
            call(link)
        await asyncio.sleep(100)
        await cluster.close()

    run(main())


def order(message: Any) -> Callable[[Link], Any]:
    return lambda link: link.order_all(message)


GOOD = [order(train(1, "warmup")), order(FreshOptimizer("rl")), order(Send(0, [])), order(train(1)), order(Send(1, []))]


def test_a_run_by_the_rules_passes() -> None:
    said(*GOOD, Link.stop)


BROKEN = {
    "order after stop": [*GOOD, Link.stop, order(Export("x"))],
    "decision after stop": [*GOOD, Link.stop, lambda link: link.decide(0, Pull(0, []))],
    "stop twice": [*GOOD, lambda link: link.order([Stop(), Stop()]), Link.stop],
    "a step is left out": [*GOOD, order(train(3))],
    "a step comes twice": [*GOOD, order(train(1))],
    "a version is left out": [*GOOD, order(train(2)), order(Send(3, []))],
    "a version comes before its step": [*GOOD, order(Send(2, []))],
    "a step before the last was sent": [*GOOD, order(train(2)), order(train(3))],
    "warm-up after RL": [*GOOD, order(train(2, "warmup"))],
    "too few orders": [lambda link: link.order([Send(0, [])])],
    "different orders": [lambda link: link.order([Send(0, []), Export("x")])],
    "different rows": [order(Send(0, [])), lambda link: link.order([train(1), Train(1, "rl", [])])],
    "no such replica": [lambda link: link.decide(1, Pull(0, []))],
    "pulls out of order": [lambda link: link.decide(0, Pull(1, []))],
    "an empty request": [lambda link: asyncio.ensure_future(generate(link, 0))],
}


@pytest.mark.parametrize("calls", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_protocol_is_noticed(calls) -> None:
    with pytest.raises(ProtocolError):
        said(*calls)


async def generate(link: Link, n: int) -> None:
    asyncio.current_task().add_done_callback(lambda task: task.result())
    await link.generate(0, tokens=np.zeros(n), max_tokens=1, temperature=1.0, seed=0, stop_token_ids=[])
