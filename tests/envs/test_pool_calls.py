"""Functions in real worker processes: what they return, what they raise, and how they can't hurt each other."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_rl.envs.deadline import TooSlow
from spmd_rl.envs.pool.errors import DeadlinePassed, PoolClosed, Raised, WorkerDied
from spmd_rl.envs.pool.pool import Pool
from tests.envs.pool_envs import add, do, fill, flood, later, until

LONG_S = 300.0
DO = "tests.envs.pool_envs:do"


@pytest.fixture(scope="module")
def log() -> list[str]:
    return []


@pytest.fixture(scope="module")
def pool(log):
    with Pool(0, 2, grace_s=0.2, memory_mb=1024, log=log.append) as pool:
        yield pool


def call(pool: Pool, function: Any, deadline_s: float = LONG_S, **arguments: Any) -> Any:
    return asyncio.run(pool.call(function, arguments, deadline_s))


def test_functions_by_reference_and_by_path(pool):
    assert call(pool, add, a=1, b=2) == 3
    assert call(pool, later, number=7) == 7
    assert call(pool, DO, what="answer", number=5) == 5


def test_a_call_has_a_main_thread_the_working_directory_and_no_standard_input(pool):
    assert call(pool, do, what="where") == [True, os.getcwd(), ""]


def test_arguments_may_be_anything_and_results_are_plain(pool):
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    np.testing.assert_array_equal(call(pool, add, a=array, b=array), 2 * array)
    assert call(pool, add, a=(1, {}), b=("x",)) == [1, {}, "x"]


def test_what_a_function_raises_is_told_with_its_traceback(pool):
    with pytest.raises(Raised) as caught:
        call(pool, do, what="raise", number=4)
    assert (caught.value.kind, caught.value.text) == ("LookupError", "number 4") and not isinstance(
        caught.value, ValueError
    )
    assert 'raise LookupError(f"number {number}")' in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="ValueError: invalid literal"):
        call(pool, "tests.envs.pool_envs:number", text="x")


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        (DO, {"what": "leave", "number": 3}, r"RuntimeError: it raised SystemExit\(3\)"),
        ("tests.envs.pool_envs:Bare", {"tokenizer": None}, "TypeError: the result is a Bare, which can't leave"),
        (add, {"a": 2**63, "b": 2**63}, "OverflowError"),
        (add, {"a": "\ud800", "b": ""}, "UnicodeEncodeError"),
        ("tests.envs.pool_envs:nothing", {}, "ValueError: .* has no 'nothing'"),
        ("nowhere:nothing", {}, "ImportError: .*No module named 'nowhere'"),
        (add, {"a": 1}, "TypeError: .*missing 1 required"),
        (fill, {"mb": 4096}, "MemoryError"),
    ],
)
def test_what_goes_wrong_in_a_call_is_an_error_of_the_call(pool, function, arguments, says):
    before = pids(pool)
    with pytest.raises(Raised, match=says):
        call(pool, function, **arguments)
    assert pids(pool) == before


def pids(pool: Pool) -> set[int]:
    """Of both workers."""

    async def both() -> set[int]:
        found: set[int] = set()
        async with asyncio.timeout(60):
            while len(found) < 2:
                found |= set(await asyncio.gather(*(pool.call(do, {"what": "pid"}, LONG_S) for _ in range(4))))
        return found

    return asyncio.run(both())


def test_what_can_not_be_sent_is_an_error_of_the_caller(pool):
    with pytest.raises(TypeError, match=r"the function .*<lambda> can't be sent"):
        call(pool, lambda: 1)
    with pytest.raises(TypeError, match="the arguments of add can't be sent"):
        call(pool, add, a=threading.Lock(), b=1)


def test_a_file_as_it_is_named_in_a_config(pool, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("import beside\ndef judge(text): return beside.WORTH * len(text)\n")
    (tmp_path / "beside.py").write_text("WORTH = 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(".")
    with Pool(0, 1) as own:
        monkeypatch.chdir("/")  # what counts is where the pool was made
        assert call(own, "own.py:judge", text="four") == 8


@pytest.mark.parametrize(
    ("what", "number", "says"),
    [("exit", 3, "it ended by itself with code 3"), ("crash", 0, "it was ended by SIGSEGV")],
)
def test_a_worker_that_dies_is_an_error_of_its_call_and_replaced(pool, what, number, says):
    with pytest.raises(WorkerDied, match=says) as caught:
        call(pool, do, what=what, number=number)
    assert caught.value.kind == "exit" and caught.value.why == str(caught.value)
    assert len(pids(pool)) == 2
    if what == "crash":
        assert "in string_at" in str(caught.value) and "worker.py" not in str(caught.value)


def test_a_worker_stuck_in_c_for_ever_slows_nobody():
    """While one worker holds its interpreter's lock for ever the other one does all the work."""

    async def main() -> None:
        with Pool(0, 2, grace_s=0.2) as pool:
            stuck = asyncio.ensure_future(pool.call(do, {"what": "spin"}, LONG_S))
            done = [await pool.call(add, {"a": number, "b": 1}, LONG_S) for number in range(50)]
            assert done == list(range(1, 51)) and not stuck.done()
            assert pool.metrics()["pool/restarts"] == 0.0
            stuck.cancel()
            await asyncio.wait([stuck])
            await until(lambda: pool.metrics()["pool/workers"] == 2.0)
            assert await pool.call(add, {"a": 1, "b": 1}, LONG_S) == 2

    asyncio.run(main())


def test_the_deadline_ends_a_call_and_what_it_does(pool):
    first = pids(pool)
    with pytest.raises(DeadlinePassed, match=r"the call of do: no result after 0\.3 s") as caught:
        call(pool, do, 0.3, what="spin")
    assert isinstance(caught.value, TooSlow)
    assert len(pids(pool) - first) == 1


DOINGS = st.sampled_from(["answer", "answer", "answer", "raise", "exit", "crash", "leave", "spin", "hang", "give up"])


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(DOINGS, min_size=8, max_size=14))
def test_random_deaths_cost_no_call_but_their_own(pool, doings):
    """Every call ends exactly once, as its own doing says: none is lost, and none gets another one's answer."""

    async def one(number: int, doing: str) -> None:
        spins = doing in ("spin", "hang")
        what = "hang" if doing == "give up" else doing
        work = pool.call(do, {"what": what, "number": number}, 0.3 if spins else LONG_S)
        if doing == "give up":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(work, 0.2)
            return
        try:
            found: Any = await work
        except Exception as error:
            found = error
        match doing:
            case "answer":
                assert found == number
            case "raise":
                assert isinstance(found, Raised) and found.text == f"number {number}"
            case "leave":
                assert isinstance(found, Raised) and f"SystemExit({number})" in found.text
            case "exit":
                assert isinstance(found, WorkerDied) and f"with code {number}" in found.why
            case "crash":
                assert isinstance(found, WorkerDied) and "SIGSEGV" in found.why
            case _:
                assert isinstance(found, DeadlinePassed)

    async def main() -> None:
        await asyncio.gather(*(one(number, doing) for number, doing in enumerate(doings)))
        await until(lambda: pool.metrics()["pool/in_flight"] == 0.0)

    asyncio.run(main())


def test_a_pool_serves_many_threads_and_loops(pool):
    found: list[int] = []

    def work(number: int) -> None:
        found.extend(call(pool, add, a=number, b=0) for _ in range(3))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_what_workers_print_is_in_the_log_with_a_name_and_bounded(pool, log):
    del log[:]
    call(pool, flood, lines=5000, width=10)
    call(pool, add, a=1, b=1)
    asyncio.run(until(lambda: any("000000" in line for line in log)))
    assert all(line.startswith("[pool calls ") for line in log) and len(log) < 1000


def test_metrics(pool):
    pool.metrics()
    call(pool, add, a=1, b=1)
    with pytest.raises(WorkerDied):
        call(pool, do, what="exit")
    metrics = pool.metrics()
    assert {name: metrics[f"pool/{name}"] for name in ("calls", "deaths", "restarts", "queued")} == {
        "calls": 2.0, "deaths": 1.0, "restarts": 1.0, "queued": 0.0,
    }  # fmt: skip
    assert pool.metrics()["pool/calls"] == 0.0


def test_pools_that_can_not_work():
    with pytest.raises(ValueError, match=r"can't have workers = -1, hang_s = 0"):
        Pool(-1, hang_s=0)
    with pytest.raises(ValueError, match="no processes for calls"):
        call(Pool(1, 0), add, a=1, b=1)


def test_a_closed_pool_says_so():
    async def main() -> None:
        pool = Pool(0, 1)
        open_call = asyncio.ensure_future(pool.call(do, {"what": "hang"}, LONG_S))
        queued = asyncio.ensure_future(pool.call(add, {"a": 1, "b": 1}, LONG_S))
        await until(lambda: pool.metrics()["pool/in_flight"] == 1.0)
        await asyncio.to_thread(pool.close)
        for task in (open_call, queued, pool.call(add, {"a": 1, "b": 1}, LONG_S)):
            with pytest.raises(PoolClosed, match="closed"):
                await task
        pool.close()

    asyncio.run(main())


def test_workers_import_no_torch():
    with Pool(0, 1) as pool:
        assert call(pool, "tests.envs.pool_envs:imported", names=["torch", "transformers"]) == []
