"""Environments in real worker processes: the same episodes as at home, and what rollouts there may do."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import SourceConfig
from spmd_rl.envs.demonstrate import demonstration
from spmd_rl.envs.load import load
from spmd_rl.envs.pool.environment import PooledEnvironment
from spmd_rl.envs.pool.errors import Raised, RaisedValueError
from spmd_rl.envs.pool.pool import Pool
from spmd_rl.envs.pool.spec import EnvironmentSpec
from spmd_rl.envs.protocol import PromptTooLong
from spmd_rl.rollouts.types import Episode, RewardError
from tests.envs.fakes import ScriptedPolicy, byte_tokenizer
from tests.envs.pool_envs import Adder, Letters, Obedient, obedient, told, until
from tests.envs.pool_rollouts import attempt, both_pids, same


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


def test_task_data_that_is_not_plain_is_refused_by_name(pool):
    bare = obedient(pool, env="Bare", data={1.5: 2})
    with pytest.raises(Raised, match=r"task.data\['rows'\]\[0\]\['what'\] has the key 1.5"):
        bare.task(0, "train")


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
