"""Requests that can be awaited, and events that come from other threads."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from spmd_rl.orchestrator.link import Link, RefusedError
from spmd_rl.world.messages import Cancel, EngineLoad, Exported, Generate, Generated, Refused, Send, Stop

REQUEST: dict[str, Any] = {
    "tokens": np.zeros(3, np.int32),
    "max_tokens": 2,
    "temperature": 1.0,
    "seed": 5,
    "stop_token_ids": [2],
}


class Said:
    """Both threads, as lists."""

    def __init__(self) -> None:
        self.decisions: list[tuple[int, Any]] = []
        self.orders: list[list[Any]] = []
        self.stops = 0

    def decide(self, member: int, decision: Any) -> None:
        self.decisions.append((member, decision))

    def give(self, orders: list[Any]) -> None:
        self.orders.append(orders)

    def stop(self) -> None:
        self.stops += 1


def connected(replicas: int = 2, trainers: int = 3) -> tuple[Link, Said]:
    link, said = Link(replicas, trainers), Said()
    link.connect(said, said)
    return link, said


def answer(id: int, n: int = 2) -> Generated:
    return Generated(id, np.full(n, id, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), "stop", "v0")


def test_answers_find_their_requests_in_any_order() -> None:
    async def main() -> None:
        link, said = connected()
        tasks = [asyncio.create_task(link.generate(replica, **REQUEST)) for replica in (0, 1, 1)]
        await asyncio.sleep(0)
        assert [(member, type(d), d.id) for member, d in said.decisions] == [
            (1, Generate, 0),
            (2, Generate, 1),
            (2, Generate, 2),
        ]
        assert link.waiting == 3
        for id in (2, 0, 1):
            link.deliver(1, answer(id))
        assert [(await task).id for task in tasks] == [0, 1, 2]
        assert (link.waiting, link.tokens, link.heard) == (0, 6, 3)

    asyncio.run(main())


def test_a_refusal_is_an_error_with_the_engines_reason() -> None:
    async def main() -> None:
        link, _ = connected()
        task = asyncio.create_task(link.generate(0, **REQUEST))
        await asyncio.sleep(0)
        link.deliver(1, Refused(0, "too hot"))
        with pytest.raises(RefusedError, match="too hot"):
            await task
        assert link.waiting == 0

    asyncio.run(main())


def test_cancelling_the_caller_cancels_the_request_once_and_late_answers_do_no_harm() -> None:
    async def main() -> None:
        link, said = connected()
        task = asyncio.create_task(link.generate(1, **REQUEST))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert said.decisions[1:] == [(2, Cancel(0))]
        link.deliver(2, answer(0, n=0))
        link.deliver(2, Refused(0, "late"))
        await asyncio.sleep(0)
        assert link.waiting == 0

    asyncio.run(main())


@pytest.mark.parametrize("answer_first", [True, False])
@pytest.mark.parametrize("event", [lambda: answer(0), lambda: Refused(0, "no")], ids=["answer", "refusal"])
def test_an_answer_and_a_cancellation_at_the_same_moment(event, answer_first: bool) -> None:
    async def main() -> None:
        link, _ = connected()
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        task = asyncio.create_task(link.generate(0, **REQUEST))
        await asyncio.sleep(0)
        actions = [lambda: link.deliver(1, event()), task.cancel]
        for act in actions if answer_first else reversed(actions):
            act()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert problems == []

    asyncio.run(main())


def test_events_come_from_other_threads_and_reach_their_listener_on_the_event_loop() -> None:
    async def main() -> None:
        link, _ = connected()
        heard: list[tuple[str, int]] = []
        done = asyncio.Event()

        def listener(event: Exported) -> None:
            heard.append((event.folder, threading.get_ident()))
            if len(heard) == 100:
                done.set()

        link.listen(Exported, listener)
        thread = threading.Thread(target=lambda: [link.deliver(0, Exported(str(i))) for i in range(100)])
        thread.start()
        await asyncio.wait_for(done.wait(), 10)
        thread.join()
        assert heard == [(str(i), threading.get_ident()) for i in range(100)]

    asyncio.run(main())


def test_the_newest_counters_of_every_rank_are_kept() -> None:
    async def main() -> None:
        link, _ = connected()
        for rank, steps in ((4, 1), (5, 1), (4, 2)):
            link.deliver(1, EngineLoad(rank, steps, 0.1, 1, 0.1))
        await asyncio.sleep(0)
        assert {rank: load.steps for rank, load in link.loads.items()} == {4: 2, 5: 1}
        assert link.heard == 0

    asyncio.run(main())


def test_orders_go_to_every_trainer_and_stop_to_everybody() -> None:
    async def main() -> None:
        link, said = connected()
        link.order_all(Send(0, []))
        link.decide_all(Cancel(7))
        link.stop()
        assert said.orders == [[Send(0, [])] * 3, [Stop()] * 3]
        assert said.decisions == [(1, Cancel(7)), (2, Cancel(7))]
        assert said.stops == 1

    asyncio.run(main())
