"""Rollouts in worker processes that are cancelled, late, stuck or dead: what they cost, and whom."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from spmd_rl.envs.deadline import TooSlow
from spmd_rl.envs.pool.environment import PooledEnvironment
from spmd_rl.envs.pool.errors import DeadlinePassed, PoolClosed, WorkerDied
from spmd_rl.envs.pool.pool import Pool
from tests.envs.pool_envs import Adder, Letters, Obedient, alive, obedient, told, until
from tests.envs.pool_rollouts import attempt, both_pids, same


def test_a_cancelled_rollout_is_cancelled_in_its_worker(env, log):
    before = both_pids(env)

    async def main() -> None:
        rollout = asyncio.ensure_future(env.rollout(told("waits", 71), Adder()))
        await until(lambda: any("task 71 waits" in line for line in log))
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        await until(lambda: any("task 71 was cancelled" in line for line in log))

    asyncio.run(main())
    assert both_pids(env) == before


def test_a_rollout_that_waits_for_its_policy_is_cancelled_with_it(env):
    asked = []

    async def think(tokens: np.ndarray) -> None:
        asked.append("asked")
        try:
            await asyncio.sleep(3600)
        finally:
            asked.append("cancelled")

    async def main() -> None:
        rollout = asyncio.ensure_future(env.rollout(told("talk"), Adder(think)))
        await until(lambda: asked)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert asked == ["asked", "cancelled"]

    asyncio.run(main())


def test_the_deadline_of_one_rollout_costs_the_others_nothing_when_it_listens(pool, env):
    before = both_pids(env)
    hasty = obedient(pool, deadline_s=0.2)
    with pytest.raises(DeadlinePassed, match=r"a rollout of .*, task 0: no result after 0\.2 s") as caught:
        attempt(hasty, "waits")
    assert isinstance(caught.value, TooSlow) and both_pids(env) == before


def test_a_rollout_that_will_not_end_takes_its_worker_and_those_beside_it(pool, env, log):
    hasty = obedient(pool, deadline_s=0.2)
    before = both_pids(env)

    async def main() -> list[Any]:
        beside = [asyncio.ensure_future(env.rollout(told("waits", 80 + i), Adder())) for i in range(2)]
        await until(lambda: sum("task 8" in line and "waits" in line for line in log) == 2)
        with pytest.raises(DeadlinePassed):
            await hasty.rollout(told("deaf", 5), Adder())
        done, left = await asyncio.wait(beside, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == len(left) == 1
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        return [task.exception() for task in done]

    (died,) = asyncio.run(main())
    assert isinstance(died, WorkerDied) and died.kind == "deadline" and "task 5 went on after its deadline" in died.why
    assert len(both_pids(env) & before) == 1


def test_a_worker_stuck_in_c_for_ever_slows_nobody(env, pool, log):
    """Others finish their rollouts while it is stuck; then it is found, said where it was, and replaced."""
    before = both_pids(env)
    spins: list[int] = []

    async def think(tokens: np.ndarray) -> None:
        spins.append(0)

    async def main() -> tuple[list[Any], list[Any]]:
        waiting = [asyncio.ensure_future(env.rollout(told("waits", 90), Adder())) for _ in range(2)]  # on each worker
        stuck = asyncio.ensure_future(env.rollout(told("spins", 1), Adder(think)))
        await until(lambda: spins)
        await asyncio.sleep(0.1)  # what is sent from here on comes behind the answer that makes it spin
        work = []
        while not stuck.done():
            work.append(asyncio.ensure_future(env.rollout(told("pid", 2), Adder())))
            await asyncio.wait([work[-1], stuck], return_when=asyncio.FIRST_COMPLETED, timeout=0.05)
        finished = [task for task in work if task.done()]
        done, left = await asyncio.wait(waiting, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, *work, return_exceptions=True)
        outcomes = [task.exception() or int(task.result().reward.why) for task in finished]
        return [stuck.exception(), *(task.exception() for task in done)], outcomes

    ends, finished = asyncio.run(main())
    assert len([pid for pid in finished if pid in before]) >= 5 and len(before & {*finished}) == 1
    assert len(ends) >= 2  # whoever had the bad luck to be on the same worker knows why
    lost = [*ends, *(end for end in finished if isinstance(end, Exception))]
    assert all(isinstance(end, WorkerDied) and end.kind == "hung" for end in lost)
    assert "in spin" in ends[0].why and sum(line.endswith("in spin") for line in log) == 1
    assert len(both_pids(env) & before) == 1


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("exits", "it ended by itself with code 7\nIts last lines:\nmy last words"),
        ("crashes", "it was ended by SIGSEGV"),
        ("killed", r"it was ended by SIGKILL \(was the machine out of memory\?\)"),
    ],
)
def test_a_worker_that_dies_is_named_and_replaced(env, do, says):
    before = both_pids(env)
    with pytest.raises(WorkerDied, match=says) as caught:
        attempt(env, do)
    assert caught.value.kind == "exit"
    same(attempt(env, "talk"), asyncio.run(Obedient(Letters(), 3).rollout(told("talk"), Adder())))
    assert len(both_pids(env) & before) == 1


def test_a_question_whose_worker_dies_beside_it_is_asked_again():
    """A rollout takes the only worker down while tasks wait there; the next worker makes them."""
    home = Obedient(Letters(), 3)

    async def main(env: PooledEnvironment) -> None:
        assert env.task(0, "train") == home.task(0, "train")
        for first in (1, 10):  # what was made ahead is asked again too
            crash = asyncio.ensure_future(env.rollout(told("blocks_and_exits"), Adder()))
            await asyncio.sleep(0)
            for index in range(first, first + 3):
                assert env.task(index, "train") == home.task(index, "train")
            with pytest.raises(WorkerDied):
                await crash

    with Pool(1, 0) as pool:
        asyncio.run(main(obedient(pool)))


@pytest.mark.parametrize(
    ("make", "start_s", "says"), [("exits", 60.0, "with code 7"), ("hangs", 10.0, "was not built after start_s = 10 s")]
)
def test_an_environment_whose_making_takes_the_worker_along(make, start_s, says):
    with Pool(1, 0, start_s=start_s) as pool, pytest.raises(WorkerDied, match=says) as caught:
        obedient(pool, env="Unmakeable", make=make)
    assert caught.value.kind == "start"


def test_an_environment_of_a_closed_pool_says_so():
    async def main() -> None:
        pool = Pool(1, 0)
        env = obedient(pool)
        pid = int((await env.rollout(told("pid"), Adder())).reward.why)
        rollout = asyncio.ensure_future(env.rollout(told("waits"), Adder()))
        await until(lambda: pool.metrics()["pool/in_flight"] == 1.0)
        await asyncio.to_thread(pool.close)
        for work in (rollout, env.rollout(told("pid"), Adder())):
            with pytest.raises(PoolClosed):
                await work
        assert not alive(pid)

    asyncio.run(main())
