"""No process outlives its pool, and no pool its process, however that ends."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.envs.pool.pool import Pool
from tests.envs.pool_envs import Adder, add, alive, do, leave_a_child, obedient, told, until

ROOT = Path(__file__).parents[2]

# A program with a pool, whose workers are idle, stuck in C, or in the middle of a rollout. It prints who they are.
PROGRAM = """
import asyncio, json, os, sys, time
from spmd_rl.envs.pool.pool import Pool
from tests.envs.pool_envs import Adder, do, obedient, told

pids = []
async def main(pool):
    env = obedient(pool)
    while len(set(pids)) < 2:
        episodes = await asyncio.gather(*(env.rollout(told("pid"), Adder()) for _ in range(4)))
        pids.extend(int(episode.reward.why) for episode in episodes)
    pids.append(await pool.call(do, {"what": "pid"}, 300.0))
    assert (await pool.call(do, {"what": "where"}, 60.0))[2] == ""  # standard input is the program's alone
    left = [asyncio.ensure_future(env.rollout(told(what), Adder())) for what in ("spins", "waits")]
    await asyncio.sleep(0.3)
    print(json.dumps(sorted(set(pids))), flush=True)
    if END == "waits":
        await asyncio.sleep(300)
    if END == "leaves":
        os._exit(0)
    if END == "raises":
        raise RuntimeError("the program's own")

pool = Pool(2, 1, hang_s=200.0, log=lambda text: print(text, file=sys.stderr))
asyncio.run(main(pool))
"""


def start(end: str) -> tuple[subprocess.Popen[str], list[int]]:
    """The program, and its workers."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"END = {end!r}\n{PROGRAM}"]
    pipe = subprocess.PIPE
    program = subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    pids = json.loads(program.stdout.readline())
    assert len(pids) == 3
    return program, pids


@pytest.mark.parametrize(("end", "code"), [("returns", 0), ("raises", 1), ("leaves", 0), ("waits", -signal.SIGKILL)])
def test_workers_end_with_their_program(end, code):
    program, pids = start(end)
    try:
        if end == "waits":
            assert all(map(alive, pids))
            program.kill()
        _, errors = program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == code, errors
    asyncio.run(until(lambda: not any(map(alive, pids))))


def children() -> set[int]:
    """Of this process, those that nobody has reaped among them."""
    try:
        of_threads = [(task / "children").read_text().split() for task in Path("/proc/self/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # a thread ended meanwhile: its children are another one's now
        return children()
    return {int(pid) for pids in of_threads for pid in pids}


@pytest.mark.parametrize("way", ["close", "with", "collected"])
def test_nothing_is_left_of_a_pool_that_ends(way):
    before = children()
    pool = Pool(1, 1, grace_s=0.2)

    async def main() -> int:
        env = obedient(pool)
        stuck = asyncio.ensure_future(env.rollout(told("deaf"), Adder()))
        called = asyncio.ensure_future(pool.call(do, {"what": "spin"}, 300.0))
        await until(lambda: pool.metrics()["pool/in_flight"] == 2.0)
        for task in (stuck, called):
            task.cancel()
        await asyncio.wait([stuck, called])
        return len(children() - before)

    assert asyncio.run(main()) >= 2
    match way:
        case "close":
            pool.close()
        case "with":
            with pool:
                pass
        case "collected":
            del pool, main
            gc.collect()
    assert children() == before


def test_what_a_worker_started_ends_with_it():
    """Also what is left by a worker that was killed."""

    async def main(pool: Pool) -> list[int]:
        pids = [await pool.call(leave_a_child, {}, 300.0)]
        with pytest.raises(Exception, match="with code 5"):
            await pool.call(do, {"what": "exit", "number": 5}, 300.0)
        return [*pids, await pool.call(leave_a_child, {}, 300.0)]

    with Pool(0, 1) as pool:
        pids = asyncio.run(main(pool))
        asyncio.run(until(lambda: not alive(pids[0])))
        assert alive(pids[1])
    asyncio.run(until(lambda: not alive(pids[1])))


def test_a_pool_that_was_never_used_starts_nothing():
    before = children()
    with Pool(4, 4) as pool:
        assert children() == before
    pool.close()


def test_open_files_do_not_grow_with_workers_that_die():
    def open_files() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    async def main() -> list[int]:
        counts = []
        with Pool(0, 1) as pool:
            for number in range(3):
                with pytest.raises(Exception, match=f"with code {number}"):
                    await pool.call(do, {"what": "exit", "number": number}, 300.0)
                assert await pool.call(add, {"a": 1, "b": 1}, 300.0) == 2
                counts.append(open_files())
        return counts

    counts = asyncio.run(main())
    assert len(set(counts)) == 1, counts


def test_a_pool_inside_a_worker_ends_with_the_worker():
    """As that of a reward of an environment in a pool."""
    pids: list[int] = []
    with Pool(0, 1, grace_s=0.2) as pool:
        pids += asyncio.run(pool.call("tests.envs.pool_envs:pool_in_pool", {}, 300.0))
        assert len(set(pids)) == 2 and all(map(alive, pids))
    asyncio.run(until(lambda: not any(map(alive, pids))))
