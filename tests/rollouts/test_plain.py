"""Episodes and groups go into plain data and come back, whatever they hold."""

from __future__ import annotations

from datetime import date

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.rollouts.plain import episode_from, group_from, plain_episode, plain_group
from spmd_rl.rollouts.types import Episode, Group, Reward, RewardError, Sample, Task
from spmd_rl.world.wire import decode, encode

TASK = Task("t", 3, {"when": date(2026, 1, 1), "what": {1, 2}})  # nothing that could be written


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    count = draw(st.integers(1, 12))

    def column(values, dtype):
        return np.asarray(draw(st.lists(values, min_size=count, max_size=count)), dtype)

    return Sample(
        tokens=column(st.integers(0, 2**31 - 1), np.int32),
        mask=column(st.sampled_from([0, 1]), np.uint8),
        logprobs=column(st.floats(-50, 0, width=32), np.float32),
        versions=column(st.integers(-1, 4), np.int32),
        temperatures=column(st.sampled_from([1.0, 0.5]), np.float32),
        agent=draw(st.sampled_from(["", "judge"])),
        reward=draw(st.none() | st.floats(-5, 5)),
        hint=draw(st.none() | st.just(np.arange(3, dtype=np.int32))),
    )


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    reward = draw(st.sampled_from([Reward(0.5), Reward(1.0, {"format": 0.2}), RewardError("no judge")]))
    status = draw(st.sampled_from(["ok", "truncated", "timeout", "failed"]))
    return Episode(TASK, tuple(draw(st.lists(samples(), max_size=3))), reward, status, seconds=draw(st.floats(0, 9)))


def same(one: Episode, other: Episode) -> bool:
    if (one.reward, one.status, len(one.samples)) != (other.reward, other.status, len(other.samples)):
        return False
    columns = ("tokens", "mask", "logprobs", "versions", "temperatures")
    return all(
        (a.agent, a.reward) == (b.agent, b.reward)
        and np.array_equal(a.hint, b.hint)
        and all(getattr(a, c).dtype == getattr(b, c).dtype for c in columns)
        and all(getattr(a, c).tobytes() == getattr(b, c).tobytes() for c in columns)
        for a, b in zip(one.samples, other.samples, strict=True)
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(episodes(), min_size=1, max_size=3))
def test_what_was_written_comes_back_over_the_wire(members):
    for episode in members:
        back = episode_from(decode(encode(plain_episode(episode))), TASK)
        assert same(episode, back) and back.task is TASK and back.seconds == 0
    group = Group(7, TASK, tuple(members), 4)
    back = group_from(decode(encode(plain_group(group))), TASK)
    assert (back.id, back.admitted_version, back.task) == (7, 4, TASK)
    assert all(map(same, group.episodes, back.episodes))


def test_equal_episodes_are_written_alike_however_long_they_took():
    sample = Sample(*(np.zeros(4, dtype) for dtype in (np.int32, np.uint8, np.float32, np.int32, np.float32)))
    slow, fast = (Episode(TASK, (sample,), Reward(1.0), seconds=s) for s in (9.0, 0.1))
    assert encode(plain_episode(slow)) == encode(plain_episode(fast))


def test_a_token_costs_its_id_and_its_logprob():
    count = 10_000
    mask = (np.arange(count) % 1000 > 300).astype(np.uint8)
    sample = Sample(
        np.zeros(count, np.int32),
        mask,
        np.zeros(count, np.float32),
        np.where(mask, 5, -1).astype(np.int32),
        np.ones(count, np.float32),
    )
    assert len(encode(plain_episode(Episode(TASK, (sample,), Reward(1.0))))) < 8.2 * count
