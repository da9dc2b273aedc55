"""The delay of an event loop, measured and bounded; calls from other threads in order."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from spmd_rl.envs.pool.lag import KEPT, LoopLag, lag_metrics
from spmd_rl.envs.pool.mailbox import Mailbox, Mailboxes
from tests.orchestrator.virtual_time import run


def test_a_loop_that_is_never_late_has_no_lag():
    async def main() -> np.ndarray:
        lag = LoopLag(0.05)
        lag.start()
        lag.start()
        await asyncio.sleep(10.01)
        return lag.take()

    lags = run(main())
    assert len(lags) == 200 and lags.max() < 0.01


def test_what_blocks_the_loop_is_seen_and_taken_once():
    async def main() -> list[np.ndarray]:
        lag = LoopLag(0.01)
        lag.start()
        await asyncio.sleep(0)
        time.sleep(0.2)
        await asyncio.sleep(0.05)
        lag.stop()
        return [lag.take(), lag.take()]

    first, second = asyncio.run(main())
    assert first.max() >= 150.0 and not len(second)


def test_it_does_not_grow_when_nobody_reads():
    async def main() -> int:
        lag = LoopLag(0.001)
        lag.start()
        await asyncio.sleep(100)
        return len(lag.take())

    assert run(main()) == KEPT


def test_metrics():
    assert lag_metrics("pool/", []) == {}
    metrics = lag_metrics("pool/", np.arange(101, dtype=np.float32))
    assert metrics == {"pool/lag_ms_p50": 50.0, "pool/lag_ms_p99": 99.0, "pool/lag_ms_max": 100.0}


def test_calls_from_other_threads_come_once_and_in_order():
    async def main() -> list[tuple[int, int]]:
        mailbox, heard = Mailbox(asyncio.get_running_loop()), []
        post = [
            threading.Thread(target=lambda n=n: [mailbox.post(heard.append, (n, i)) for i in range(500)])
            for n in range(3)
        ]
        for thread in post:
            thread.start()
        async with asyncio.timeout(60):
            while len(heard) < 1500:
                await asyncio.sleep(0)
        return heard

    heard = asyncio.run(main())
    for number in range(3):
        assert [i for n, i in heard if n == number] == list(range(500))


def test_a_burst_wakes_the_loop_once():
    loop = asyncio.new_event_loop()
    woken, heard = [], []
    wake = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *given: woken.append(given) or wake(*given)
    mailbox = Mailbox(loop)
    for number in range(10):
        mailbox.post(heard.append, number)
    loop.call_later(0.01, loop.stop)
    loop.run_forever()
    mailbox.post(heard.append, 10)
    loop.call_later(0.01, loop.stop)
    loop.run_forever()
    loop.close()
    assert heard == list(range(11)) and len(woken) == 2


def test_waiting_for_another_threads_future():
    async def main() -> None:
        mailboxes = Mailboxes()
        done, failed, left = Future(), Future(), Future()
        threading.Thread(target=lambda: (done.set_result(3), failed.set_exception(KeyError("no")))).start()
        assert await asyncio.wait_for(mailboxes.wait(done), 60) == 3
        with pytest.raises(KeyError):
            await asyncio.wait_for(mailboxes.wait(failed), 60)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(mailboxes.wait(left), 0.01)
        assert left.cancelled()

    asyncio.run(main())


def test_mailboxes_of_closed_loops_are_forgotten():
    mailboxes = Mailboxes()

    async def mine() -> Mailbox:
        assert mailboxes.mine() is mailboxes.mine()
        return mailboxes.mine()

    boxes = {id(box): box for box in [asyncio.run(mine()) for _ in range(5)]}
    assert len(boxes) == 5 and len(mailboxes._of) == 1


def test_a_future_that_ends_after_its_loop_hurts_nobody():
    future: Future[int] = Future()

    mailboxes = Mailboxes()

    async def leave() -> None:
        mailboxes.wait(future)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    future.set_result(1)  # its callback finds a closed loop
    assert future.result() == 1
