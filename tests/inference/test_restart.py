"""Requests that are begun anew behind their tokens: nothing of the engine's past is left but what they carry."""

from __future__ import annotations

import numpy as np
import pytest

from spmd_rl.world.messages import Generated
from tests.inference.engines import add, drain, load, prompts, request, serve, take_step

PROMPT, NEW = 50, 20


@pytest.fixture
def crowd():
    return [request(i, tokens, NEW + 3 * i) for i, tokens in enumerate(prompts(9, PROMPT))]


def steps(engine, count: int) -> dict[int, Generated]:
    return {event.id: event for _ in range(count) for event in engine.step() if isinstance(event, Generated)}


def same(one: Generated, other: Generated) -> bool:
    return all(getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in ("tokens", "logprobs"))


def test_what_goes_on_after_a_restart_is_what_an_engine_that_is_given_the_same_would_do(engine, learner, crowd):
    """With a swap in flight before it: the old KV is gone, and an engine without it goes on alike, bit for bit."""
    add(engine, crowd)
    done = steps(engine, 8)
    take_step(learner, 1e-2)
    version = engine.version + 1
    load(engine, version, learner)
    done |= steps(engine, 7)
    partials = engine.restart()
    assert [partial.id for partial in partials] == [item.id for item in crowd if item.id not in done]
    assert all(set(partial.versions.tolist()) == {version - 1, version} for partial in partials)
    expected = done | drain(engine)
    for partial in partials:
        item = crowd[partial.id]
        again = request(partial.id, item.tokens, item.max_tokens, seed=item.seed, begun=partial)
        add(engine, [again])
    resumed = drain(engine)
    assert sorted(resumed) == [partial.id for partial in partials]
    for id, answer in resumed.items():
        assert same(answer, expected[id])
        assert len(answer.tokens) == crowd[id].max_tokens
        np.testing.assert_array_equal(answer.versions, expected[id].versions)


def test_without_a_restart_the_past_shows(engine, learner, crowd):
    """The control: KV of two versions is in the cache, and an engine without it computes other logprobs for most."""
    add(engine, crowd)
    steps(engine, 8)
    take_step(learner, 1e-2)
    load(engine, engine.version + 1, learner)
    steps(engine, 7)
    before = [engine._partial(live) for live in engine._live.values()]
    expected = drain(engine)
    engine.restart()  # nothing is in flight; the prefix cache goes
    again = [request(p.id, crowd[p.id].tokens, crowd[p.id].max_tokens, seed=crowd[p.id].seed, begun=p) for p in before]
    resumed = serve(engine, again)
    assert sum(same(answer, expected[id]) for id, answer in resumed.items()) < len(resumed) / 2


def test_a_restart_without_requests_or_before_the_first_token_is_fine(engine, crowd):
    assert engine.restart() == []
    expected = serve(engine, crowd[:3])
    add(engine, crowd[:3])
    partials = engine.restart()
    assert [len(partial.tokens) for partial in partials] == [0, 0, 0]
    got = drain(engine)
    assert all(np.array_equal(got[id].tokens, expected[id].tokens) for id in expected)


def test_restarts_may_follow_each_other_and_requests_can_be_cancelled_between(engine, crowd):
    expected = serve(engine, crowd)
    add(engine, crowd)
    for _ in range(4):
        steps(engine, 3)
        engine.restart()
    assert engine.cancel(2).stop_reason == "aborted"
    got = drain(engine)
    assert sorted(got) == [i for i in range(9) if i != 2]
    for id, answer in got.items():
        np.testing.assert_array_equal(answer.tokens, expected[id].tokens)
        np.testing.assert_allclose(answer.logprobs, expected[id].logprobs, atol=1e-5)
