"""Environments in real worker processes: the same episodes as at home, and what becomes of those that hang or crash."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import SourceConfig
from spmd_rl.envs.deadline import TooSlow
from spmd_rl.envs.demonstrate import demonstration
from spmd_rl.envs.load import load
from spmd_rl.envs.pool.environment import PooledEnvironment
from spmd_rl.envs.pool.errors import DeadlinePassed, PoolClosed, Raised, RaisedValueError, WorkerDied
from spmd_rl.envs.pool.pool import Pool
from spmd_rl.envs.pool.spec import EnvironmentSpec
from spmd_rl.envs.protocol import PromptTooLong
from spmd_rl.rollouts.plain import plain_episode
from spmd_rl.rollouts.types import Episode, RewardError
from tests.envs.fakes import ScriptedPolicy, byte_tokenizer
from tests.envs.pool_envs import Adder, Letters, Obedient, alive, obedient, told, until


@pytest.fixture(scope="module")
def log() -> list[str]:
    return []


@pytest.fixture(scope="module")
def pool(log):
    with Pool(2, 0, grace_s=0.3, hang_s=2.0, memory_mb=1024, log=log.append) as pool:
        yield pool


@pytest.fixture(scope="module")
def env(pool) -> PooledEnvironment:
    return obedient(pool)


def attempt(env: PooledEnvironment, do: str, policy: Any = None, **data: Any) -> Episode:
    return asyncio.run(env.rollout(told(do, **data), policy or Adder()))


def same(one: Episode, other: Episode) -> None:
    """Equal in all columns, types of arrays included."""
    assert one.task == other.task and one.reward == other.reward and one.status == other.status
    for left, right in zip(one.samples, other.samples, strict=True):
        for name in ("tokens", "mask", "logprobs", "versions", "temperatures"):
            assert getattr(left, name).dtype == getattr(right, name).dtype
        assert (left.agent, left.reward) == (right.agent, right.reward)
    assert str(plain_episode(one)) == str(plain_episode(other))


@pytest.mark.parametrize("do", ["talk", "histories"])
def test_an_episode_is_the_same_as_at_home(env, do):
    home, away = Adder(), Adder()
    task = told(do, 5)
    same(asyncio.run(Obedient(Letters(), 3).rollout(task, home)), asyncio.run(env.rollout(task, away)))
    assert home.asked == away.asked


def test_a_built_in_environment_with_a_real_tokenizer(pool):
    source, tokenizer = SourceConfig(env="reverse"), byte_tokenizer()
    home = load(source, tokenizer, 1)
    away = PooledEnvironment(EnvironmentSpec(source, tokenizer, 1), pool, deadline_s=300.0)
    for split in ("train", "heldout"):
        for index in range(20):
            task = away.task(index, split)
            assert task == home.task(index, split)
            np.testing.assert_array_equal(away.prompt(task), home.prompt(task))
        np.testing.assert_array_equal(away.hint(task), home.hint(task))
    answers = [asyncio.run(env.rollout(task, ScriptedPolicy(tokenizer, ["abcd"]))) for env in (home, away)]
    same(*answers)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["train", "heldout"])), max_size=20), st.booleans())
def test_tasks_are_the_same_in_whatever_order_they_are_asked_for(env, asked, in_order):
    """Also those that were made ahead."""
    home = Obedient(Letters(), 3)
    for index, split in sorted(asked) if in_order else asked:
        assert env.task(index, split) == home.task(index, split)


def test_tasks_that_come_one_after_the_other_are_made_ahead_and_once():
    asked = 0

    def idle() -> bool:
        nonlocal asked
        metrics = pool.metrics()
        asked += int(metrics["pool/questions"])
        return metrics["pool/in_flight"] == 0.0

    with Pool(1, 0) as pool:
        env = obedient(pool)
        for index in range(10):
            assert env.task(index, "train").index == index
        ahead = [index for _, index in env._coming]
        assert ahead == list(range(10, 18))
        asyncio.run(until(idle))
        assert asked == 18
        env.task(5, "train")
        assert not env._coming


def test_a_task_that_can_not_be_made_is_an_error_when_it_is_asked_for(env):
    for index in range(660, 666):
        assert env.task(index, "train").index == index
    with pytest.raises(Raised, match="LookupError: no such task"):
        env.task(666, "train")
    assert env.task(667, "train").index == 667


def test_many_rollouts_at_once_each_hear_their_own_answers(env):
    """The policy answers in an order of its own."""
    most, waiting = 0, 0

    async def think(tokens: np.ndarray) -> None:
        nonlocal most, waiting
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.002 * (int(tokens.sum()) % 7))
        waiting -= 1

    async def main() -> list[Episode]:
        return await asyncio.gather(*(env.rollout(told("talk", index), Adder(think)) for index in range(64)))

    for index, episode in enumerate(asyncio.run(main())):
        same(episode, asyncio.run(Obedient(Letters(), 3).rollout(told("talk", index), Adder())))
    assert most > 8


@pytest.mark.parametrize(
    ("do", "found"),
    [
        ("parallel", "[0, 1, 2, 3]"),
        ("withdraws", "cancelled"),
        ("catches", "no room left"),
        ("catches_no_room", "no room left"),
        ("reads_standard_input", ""),
    ],
)
def test_what_a_rollout_may_do_with_its_policy(env, do, found):
    asked, cancelled = [], []

    async def think(tokens: np.ndarray) -> None:
        asked.append(tokens[0])
        if do == "catches":
            raise ValueError("no room left")
        if do == "catches_no_room":
            raise PromptTooLong("no room left")
        if do == "withdraws" and tokens[0] == 1:
            try:
                await asyncio.sleep(3600)
            finally:
                cancelled.append(tokens[0])
        elif do == "withdraws":
            await until(lambda: cancelled if tokens[0] == 3 else 1 in asked)

    reward = attempt(env, do, Adder(think)).reward
    assert isinstance(reward, RewardError) and found in reward.why
    assert cancelled == ([1] if do == "withdraws" else [])


class Overloaded(Exception):
    """The policy's own."""


@pytest.mark.parametrize("error", [Overloaded("\ud800"), ValueError("no room"), asyncio.CancelledError()])
def test_what_the_policy_raises_comes_out_as_it_was(env, error):
    async def think(tokens: np.ndarray) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        attempt(env, "talk", Adder(think))
    assert caught.value is error or isinstance(error, asyncio.CancelledError)


def test_a_policy_that_answers_nonsense_fails_its_rollout(env):
    class Nonsense(Adder):
        async def generate(self, tokens: np.ndarray, sampling: Any) -> Any:
            return await super().generate(tokens, sampling) and None

    with pytest.raises(AttributeError):
        attempt(env, "talk", Nonsense())


@pytest.mark.parametrize(
    ("do", "kind", "says"),
    [
        ("raises", "LookupError", r"not \\ud800 there!+ … \(\d+ more characters\)"),
        ("leaves", "RuntimeError", r"it raised SystemExit\(3\)"),
        ("returns_nothing", "TypeError", "the environment returned NoneType, not an Episode"),
        ("returns_a_number", "TypeError", "the episode's reward is float"),
        ("fills_memory", "MemoryError", "MemoryError"),
        ("no_such_thing", "AttributeError", "has no attribute 'no_such_thing'"),
    ],
)
def test_what_a_rollout_raises_is_told_and_costs_nobody_else_anything(env, do, kind, says):
    before = both_pids(env)
    with pytest.raises(Raised, match=says) as caught:
        attempt(env, do)
    assert caught.value.kind == kind
    assert do.startswith("returns") or "pool_envs.py" in caught.value.__notes__[0]
    assert both_pids(env) == before


def test_sampling_that_is_none_is_an_error_of_its_rollout(env):
    with pytest.raises(Exception, match="max_tokens"):
        attempt(env, "odd_sampling")


def test_what_a_rollout_leaves_running_asks_nothing_in_its_name():
    async def forever(tokens: np.ndarray) -> None:
        await asyncio.sleep(3600)

    async def main(env: PooledEnvironment) -> list[str]:
        said = []
        for do in ("leaves_a_question", "finds_what_was_left", "asks_late"):
            said.append((await env.rollout(told(do), Adder(forever))).reward.why)
        with pytest.raises(Raised, match="this rollout is over"):
            await env.rollout(told("asks_for_another"), Adder(forever))
        return said

    with Pool(1, 0) as pool:
        assert asyncio.run(main(obedient(pool))) == ["left", "cancelled", "kept"]


def both_pids(env: PooledEnvironment) -> set[int]:
    async def main() -> set[int]:
        found: set[int] = set()
        async with asyncio.timeout(60):
            while len(found) < 2:
                episodes = await asyncio.gather(*(env.rollout(told("pid"), Adder()) for _ in range(4)))
                found |= {int(episode.reward.why) for episode in episodes}
        return found

    return asyncio.run(main())


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


def test_optional_methods(env, pool):
    task = env.task(4, "train")
    home = Obedient(Letters(), 3)
    prompt, answer = env.teacher(task, np.random.default_rng(0))
    np.testing.assert_array_equal(prompt, home.prompt(task))
    assert prompt.dtype == answer.dtype == np.int32
    rng, twin = np.random.default_rng(1), np.random.default_rng(1)
    drawn = [env.solve(task, ["a", "b"], rng) for _ in range(4)]
    assert drawn == [env.solve(task, ["a", "b"], twin) for _ in range(4)] and len(set(drawn)) > 1
    asyncio.run(env.check_reward(4))
    with pytest.raises(ValueError, match="ValueError: 5 are too many"):
        asyncio.run(env.check_reward(5))
    assert env.hint is None
    bare = obedient(pool, env="Bare")
    assert bare.hint is bare.teacher is bare.solve is bare.check_reward is None


def test_a_demonstration_by_the_teacher_of_a_worker(pool):
    """The rollout waits in a worker while its teacher, in a worker too, is asked on the caller's loop."""
    source, tokenizer = SourceConfig(env="calculator"), byte_tokenizer()
    spec = EnvironmentSpec(source, tokenizer, 0)
    env = PooledEnvironment(spec, pool, deadline_s=300.0)
    task = env.task(0, "train")
    shown = [asyncio.run(demonstration(tokenizer, env, task, np.random.default_rng(0))) for _ in range(2)]
    assert shown[0] and all(mask.any() for _, mask in shown[0])
    for (tokens, mask), (again, mask_again) in zip(*shown, strict=True):
        np.testing.assert_array_equal(tokens, again)
        np.testing.assert_array_equal(mask, mask_again)


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        ({"env": "Missing"}, ValueError, "has no class 'Missing'"),
        ({"wrong": 1}, RaisedValueError, "TypeError: .*args may hold make"),
        ({"make": "fails"}, RaisedValueError, "AttributeError"),
        ({"note": lambda: 1}, TypeError, r"the arguments of the environment .* can't be sent to a worker process"),
    ],
)
def test_an_environment_that_can_not_be_made(pool, env, args, error, says):
    with pytest.raises(error, match=says):
        obedient(pool, **args)
    assert env.task(0, "train").index == 0


@pytest.mark.parametrize(
    ("make", "start_s", "says"), [("exits", 60.0, "with code 7"), ("hangs", 10.0, "was not built after start_s = 10 s")]
)
def test_an_environment_whose_making_takes_the_worker_along(make, start_s, says):
    with Pool(1, 0, start_s=start_s) as pool, pytest.raises(WorkerDied, match=says) as caught:
        obedient(pool, env="Unmakeable", make=make)
    assert caught.value.kind == "start"


def test_task_data_that_is_not_plain_is_refused_by_name(pool):
    bare = obedient(pool, env="Bare", data={1.5: 2})
    with pytest.raises(Raised, match=r"task.data\['rows'\]\[0\]\['what'\] has the key 1.5"):
        bare.task(0, "train")


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


def test_workers_tell_their_lag(env, pool):
    pool.metrics()

    async def main() -> dict[str, float]:
        rollout = asyncio.ensure_future(env.rollout(told("waits"), Adder()))
        await asyncio.sleep(1.5)
        rollout.cancel()
        await asyncio.wait([rollout])
        return pool.metrics()

    metrics = asyncio.run(main())
    assert 0 <= metrics["pool/lag_ms_p50"] <= metrics["pool/lag_ms_p99"] <= metrics["pool/lag_ms_max"]


def test_a_history_that_fills_the_sequence_is_truncated_in_a_worker_too(pool) -> None:
    source = SourceConfig(env="guess", args={"turns": 3})
    there = PooledEnvironment(EnvironmentSpec(source, byte_tokenizer(), 0), pool, deadline_s=30.0)
    here = load(source, byte_tokenizer(), 0)
    task = here.task(0, "train")
    room = len(here.prompt(task)) + 10
    episodes = [
        asyncio.run(env.rollout(task, ScriptedPolicy(byte_tokenizer(), lambda prompt: "?", seq_len=room)))
        for env in (here, there)
    ]
    assert [episode.status for episode in episodes] == ["truncated", "truncated"]
    same(*episodes)
