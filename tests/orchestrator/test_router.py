"""Requests go where their prefix is cached, unless others would wait for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.orchestrator.router import Router


def test_without_any_prefix_the_shallowest_queue_wins_and_ties_go_to_the_lowest_number() -> None:
    router = Router(3, slack=0)
    assert [router.place(group, 0, 10) for group in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_group_shares_its_prompt_until_the_queue_is_too_deep() -> None:
    router = Router(2, slack=3)
    assert [router.place(0, rollout, 100) for rollout in range(6)] == [0, 0, 0, 0, 1, 1]
    assert router.depth == [4, 2]


def test_a_rollout_returns_to_its_own_longer_prefix() -> None:
    router = Router(2, slack=2)
    assert [router.place(0, rollout, 100) for rollout in range(4)] == [0, 0, 0, 1]
    router.done(1, 0, 3, 150)
    router.done(0, 0, 0, 160)
    assert router.place(0, 3, 170) == 1  # both hold the prompt, only replica 1 the first turn
    assert router.place(0, 0, 180) == 0


def test_the_longest_prefix_beats_a_shallower_queue_within_the_slack() -> None:
    router = Router(2, slack=5)
    first = router.place(0, 0, 100)
    router.done(first, 0, 0, 130)
    for group in range(1, 4):
        router.place(group, 0, 10)
    assert router.depth == [2, 1]
    assert router.place(0, 0, 150) == first == 0


def test_no_more_is_cached_than_the_request_holds() -> None:
    router = Router(2, slack=1)
    router.done(router.place(0, 0, 100), 0, 0, 300)  # replica 0
    router.place(1, 0, 10)  # keeps replica 0 busy
    router.done(router.place(0, 1, 100), 0, 1, 200)  # replica 0 again, for the prompt
    router.place(1, 1, 10)
    router.place(0, 0, 100)
    assert router.depth == [2, 1]
    assert router.place(0, 0, 100) == 1  # its 300 tokens on replica 0 are worth no more than the 100 asked for


def test_the_group_used_longest_ago_is_forgotten_first() -> None:
    router = Router(2, slack=100, max_groups=2)
    router.place(0, 0, 50)
    router.place(1, 0, 50)
    router.place(0, 1, 50)
    router.place(2, 0, 50)  # 1 is forgotten, not 0
    assert router.depth == [2, 2]
    assert list(router._groups) == [0, 2]


def test_prefixes_shorter_than_a_block_attract_nothing() -> None:
    router = Router(2, slack=100, block=128)
    assert [router.place(0, rollout, 100) for rollout in range(4)] == [0, 1, 0, 1]
    assert [router.place(1, rollout, 200) for rollout in range(4)] == [0, 0, 0, 0]


def test_forgetting() -> None:
    router = Router(2, slack=100)
    for replica in (router.place(0, 0, 100), router.place(1, 0, 50)):
        router.done(replica, 0 if replica == 0 else 1, 0, 120)
    router.forget_rollout(1, 0)
    assert router.place(1, 0, 120) == 1  # the group's prompt is still known there
    router.forget_group(1)
    assert router.place(1, 0, 120) == 0
    router.forget_group(77)
    router.forget_rollout(77, 0)


def test_memory_is_bounded_even_if_nothing_is_ever_forgotten() -> None:
    router = Router(2, slack=4, max_groups=10)
    for group in range(1000):
        router.done(router.place(group, 0, 10), group, 0, 20)
    assert len(router._groups) == 10


def test_a_request_that_ends_after_its_group_was_forgotten_leaves_no_trace() -> None:
    router = Router(1, slack=0)
    router.place(0, 0, 10)
    router.forget_group(0)
    router.done(0, 0, 0, 20)
    assert router.depth == [0]
    assert not router._groups


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(0, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans())))
def test_queues_never_differ_by_more_than_the_slack_at_placement(replicas: int, slack: int, calls: list) -> None:
    router, twin, flying = Router(replicas, slack), Router(replicas, slack), []
    for group, rollout, end_one in calls:
        replica = router.place(group, rollout, 10)
        assert replica == twin.place(group, rollout, 10)
        assert router.depth[replica] - 1 <= min(router.depth) + slack
        flying.append((replica, group, rollout, 20))
        if end_one:
            ended = flying.pop(0)
            router.done(*ended)
            twin.done(*ended)
    for ended in flying:
        router.done(*ended)
    assert router.depth == [0] * replicas


def test_mistakes() -> None:
    router = Router(2, slack=1)
    with pytest.raises(ValueError, match="replica 1 has no request in flight"):
        router.done(1, 0, 0, 5)
    with pytest.raises(ValueError, match="replicas 0"):
        Router(0, slack=1)
