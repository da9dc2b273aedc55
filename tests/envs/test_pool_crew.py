"""The crew of a pool in virtual time: whatever its workers do, every job ends exactly once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.envs.pool import messages, wire
from spmd_rl.envs.pool.crew import START_TRIES
from spmd_rl.envs.pool.errors import DeadlinePassed, PoolClosed, PoolError, RaisedValueError, WorkerDied
from spmd_rl.envs.pool.jobs import Env, Limits
from tests.envs.fake_crew import ENV, Habits, Stage, outcome
from tests.orchestrator.virtual_time import run


def seconds(most: float) -> st.SearchStrategy[float]:
    return st.floats(0.0, most, allow_nan=False).map(lambda value: round(value, 2))


HABITS = st.builds(
    Habits,
    start=st.sampled_from(["ready", "ready", "ready", "slow", "fails", "never", "dies"]),
    start_s=seconds(3.0),
    build=st.sampled_from(["built", "built", "built", "fails", "never", "dies"]),
    dies_s=st.none() | seconds(30.0),
    quietly=st.booleans(),
    hangs_s=st.none() | seconds(30.0),
)
JOBS = st.lists(
    st.tuples(
        seconds(20.0),  # when
        st.booleans(),  # a call
        seconds(8.0),  # how long
        st.sampled_from(["done", "done", "raises", "deaf", "dies"]),
        st.floats(0.05, 12.0),  # deadline
        st.none() | seconds(10.0),  # when it is cancelled
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(HABITS, max_size=12), JOBS, st.none() | seconds(30.0))
def test_whatever_happens_every_job_ends_once_and_nothing_is_left(habits, jobs, close_s):
    """A second settlement of a job would be an InvalidStateError, which virtual time raises here."""
    stage = Stage(habits)

    async def one(when: float, call: bool, how_long: float, ending: str, deadline_s: float, cancel_s: float | None):
        await asyncio.sleep(when)
        job = stage.submit(f"{how_long} {ending}", deadline_s, call)
        if cancel_s is not None:
            asyncio.get_running_loop().call_later(cancel_s, job.future.cancel)
        found = await asyncio.wait_for(outcome(job), 1000.0)
        if isinstance(found, messages.Done):
            assert found.value == job.id and ending in ("done", "deaf") and how_long <= deadline_s + 0.05
        elif isinstance(found, messages.Failed):
            assert found.text == str(job.id) and ending == "raises"
        elif found == "cancelled":
            assert cancel_s is not None
        else:
            assert isinstance(found, PoolError)
            assert close_s is not None or not isinstance(found, PoolClosed)

    async def close() -> None:
        await asyncio.sleep(1000.0 if close_s is None else close_s)
        await stage.crew.close()
        assert all(job.future.done() for job in stage.jobs)
        assert stage.env.offers.done()

    async def main() -> None:
        stage.crew.build(stage.env)
        await asyncio.gather(close(), *(one(*job) for job in jobs))
        for worker in stage.workers:
            assert worker.was_ended or not worker.was_started
            assert "calls" not in worker.name or worker.most_at_once <= 1
        answered = [job for worker in stage.workers for job in worker.answered]
        assert len(answered) == len(set(answered))  # no job was done twice

    run(main())


def test_a_worker_that_hangs_is_replaced_and_its_jobs_know_why():
    stage = Stage([Habits(hangs_s=2.0), Habits()])

    async def main() -> None:
        stage.crew.build(stage.env)
        await asyncio.sleep(1.0)
        jobs = [stage.submit("6 done", 50.0, call=False) for _ in range(4)]
        found = [await outcome(job) for job in jobs]
        assert [type(each) for each in found] == [WorkerDied, messages.Done, WorkerDied, messages.Done]
        assert found[0].kind == "hung" and "no sign of life for hang_s = 5 s" in str(found[0])
        assert "my last words" in str(found[0])
        assert (await outcome(stage.submit("1 done", call=False))).value == 5
        assert len(stage.workers) == 3 and stage.crew.metrics()["pool/hangs"] == 1.0
        await stage.crew.close()

    run(main())


def test_silence_is_no_crime_without_work_nor_for_a_call():
    quiet = Habits(beats=False)
    stage = Stage([quiet] * 4)

    async def main() -> None:
        stage.crew.build(stage.env)
        await asyncio.sleep(100.0)
        jobs = [stage.submit("60 done", 100.0), stage.submit("4 done", call=False)]
        assert [(await outcome(job)).value for job in jobs] == [1, 2]
        assert len(stage.workers) == 3 and not any(worker.was_ended for worker in stage.workers)
        await stage.crew.close()

    run(main())


def test_who_was_asleep_itself_blames_nobody():
    stage = Stage()

    async def main() -> None:
        stage.crew.build(stage.env)
        await asyncio.sleep(2.0)
        job = stage.submit("30 done", 300.0, call=False)
        await asyncio.sleep(2.0)
        asyncio.get_running_loop()._clock.now += 100.0  # this machine was suspended; nothing was heard meanwhile
        assert (await outcome(job)).value == 1
        assert len(stage.workers) == 2
        await stage.crew.close()

    run(main())


@pytest.mark.parametrize("call", [True, False])
def test_a_job_that_listens_at_its_deadline_costs_nobody_anything(call):
    stage = Stage()

    async def main() -> None:
        stage.crew.build(stage.env)
        late, other = stage.submit("9 done", 2.0, call), stage.submit("6 done", 20.0, call)
        assert str(await outcome(late)) == "job 1: no result after 2 s"
        assert isinstance(await outcome(other), messages.Done)
        assert not any(worker.was_ended for worker in stage.workers)
        await stage.crew.close()

    run(main())


def test_a_job_that_does_not_listen_takes_its_worker_and_the_jobs_beside_it():
    stage = Stage(limits=Limits(workers=1, grace_s=1.0))

    async def main() -> None:
        stage.crew.build(stage.env)
        await asyncio.sleep(2.0)
        jobs = [stage.submit(what, deadline_s, call=False) for what, deadline_s in
                [("50 deaf", 3.0), ("3.5 done", 20.0), ("9 done", 20.0)]]  # fmt: skip
        assert isinstance(await outcome(jobs[0]), DeadlinePassed)
        assert (await outcome(jobs[1])).value == 2
        died = await outcome(jobs[2])
        assert died.kind == "deadline" and "job 1 went on after its deadline" in str(died)
        metrics = stage.crew.metrics()
        assert metrics["pool/overdue"] == metrics["pool/restarts"] == 1.0 and metrics["pool/deaths"] == 0.0
        assert (await outcome(stage.submit("1 done", call=False))).value == 4
        await stage.crew.close()

    run(main())


def test_a_call_that_is_cancelled_in_the_queue_is_never_begun():
    stage = Stage(limits=Limits(call_workers=1))

    async def main() -> None:
        jobs = [stage.submit("5 done") for _ in range(3)]
        await asyncio.sleep(1.0)
        jobs[1].future.cancel()
        assert [await outcome(job) for job in jobs[::2]] == [messages.Done(1, 1), messages.Done(3, 3)]
        assert stage.workers[0].answered == [1, 3] and len(stage.workers) == 1
        await stage.crew.close()

    run(main())


def test_a_worker_that_dies_without_a_word_is_found():
    """Something that it started may hold its connection open."""
    stage = Stage([Habits(dies_s=3.0, quietly=True)])

    async def main() -> None:
        died = await outcome(stage.submit("50 done", 100.0))
        assert died.kind == "exit" and asyncio.get_running_loop().time() < 4.0
        await stage.crew.close()

    run(main())


def test_the_deadline_begins_when_a_worker_begins():
    stage = Stage(limits=Limits(call_workers=1))

    async def main() -> None:
        jobs = [stage.submit("3 done", 4.0) for _ in range(5)]
        assert [(await outcome(job)).value for job in jobs] == [1, 2, 3, 4, 5]
        await stage.crew.close()

    run(main())


@pytest.mark.parametrize("start", ["fails", "dies", "never"])
def test_workers_that_do_not_start_end_the_wait_and_are_tried_again_for_the_next_job(start):
    stage = Stage([Habits(start=start)] * (START_TRIES + 1), Limits(call_workers=1, start_s=20.0))

    async def main() -> None:
        job = stage.submit("1 done")
        died = await outcome(job)
        assert died.kind == "start" and len(stage.workers) == START_TRIES
        assert {"fails": "too many processes", "dies": "it was ended", "never": "start_s = 20 s"}[start] in str(died)
        assert (await outcome(stage.submit("1 done"))).value == 2
        await stage.crew.close()

    run(main())


def test_a_worker_that_is_ready_when_it_was_given_up_already_does_not_count():
    """Else starts that are always a little too slow would be tried for ever."""
    stage = Stage([Habits(start="slow", start_s=20.3)] * START_TRIES, Limits(call_workers=1, start_s=20.0))

    async def main() -> None:
        job = stage.submit("1 done")
        assert (await outcome(job)).kind == "start" and len(stage.workers) == START_TRIES
        await stage.crew.close()

    run(main())


def test_who_builds_a_second_environment_is_silent_with_a_reason():
    stage = Stage([Habits(start_s=8.0, beats=False)] * 2)
    other = Env(ENV + 1, "more words", wire.frame(messages.Build(ENV + 1, b"")))

    async def main() -> None:
        stage.crew.build(stage.env)
        await asyncio.sleep(10.0)
        job = stage.submit("9 done", 100.0, call=False)
        stage.crew.build(other)
        assert (await outcome(job)).value == 1
        assert other.offers.result() == ["hint"] and len(stage.workers) == 2
        await stage.crew.close()

    run(main())


def test_an_environment_that_can_not_be_built_is_refused_and_jobs_of_it_too():
    stage = Stage([Habits(build="fails")] * 2)

    async def main() -> None:
        stage.crew.build(stage.env)
        found = await outcome(stage.submit("1 done", call=False))
        assert isinstance(found, RaisedValueError) and str(found) == "KeyError: no such file"
        assert stage.env.offers.exception() is not None
        await stage.crew.close()

    run(main())


@pytest.mark.parametrize(("build", "says"), [("dies", "it was ended"), ("never", "words was not built after")])
def test_an_environment_that_takes_its_worker_along_ends_the_wait(build, says):
    stage = Stage([Habits(build=build)] * 6)

    async def main() -> None:
        stage.crew.build(stage.env)
        died = await outcome(stage.submit("1 done", call=False))
        assert isinstance(died, WorkerDied) and died.kind == "start" and says in str(died)
        await stage.crew.close()

    run(main())


def test_a_worker_that_can_not_build_it_again_leaves_it_to_the_others():
    stage = Stage([Habits(), Habits(dies_s=5.0), Habits(build="fails")])

    async def main() -> None:
        stage.crew.build(stage.env)
        await asyncio.sleep(10.0)
        jobs = [stage.submit("1 done", call=False) for _ in range(4)]
        assert [(await outcome(job)).value for job in jobs] == [1, 2, 3, 4]
        assert sorted(stage.workers[0].answered) == [1, 2, 3, 4]
        await stage.crew.close()

    run(main())


def test_rollouts_go_where_the_fewest_are():
    stage = Stage()

    async def main() -> None:
        stage.crew.build(stage.env)
        await asyncio.sleep(2.0)
        jobs = [stage.submit(what, call=False) for what in ["9 done", "1 done", "9 done", "1 done"]]
        await asyncio.sleep(2.0)
        jobs += [stage.submit("1 done", call=False) for _ in range(2)]
        for job in jobs:
            await outcome(job)
        assert [sorted(worker.answered) for worker in stage.workers] == [[1, 3], [2, 4, 5, 6]]
        await stage.crew.close()

    run(main())


def test_who_is_silent_gets_nothing_new():
    """A worker that hangs with one rollout is not the one with the fewest."""
    stage = Stage([Habits(hangs_s=2.0)])

    async def main() -> None:
        stage.crew.build(stage.env)
        await asyncio.sleep(1.5)
        jobs = [stage.submit(what, 50.0, call=False) for what in ["9 done", "20 done"]]
        await asyncio.sleep(3.0)
        jobs += [stage.submit("20 done", 50.0, call=False) for _ in range(4)]
        assert [type(await outcome(job)) for job in jobs] == [WorkerDied] + 5 * [messages.Done]
        assert sorted(stage.workers[1].answered) == [2, 3, 4, 5, 6]
        await stage.crew.close()

    run(main())


def test_a_log_that_breaks_keeps_no_job_from_ending():
    def broken(text: str) -> None:
        raise OSError("the disk is full")

    stage = Stage([Habits(dies_s=2.0)])
    stage.crew._write = broken

    async def main() -> None:
        assert (await outcome(stage.submit("9 done"))).kind == "exit"
        await stage.crew.close()

    run(main())
