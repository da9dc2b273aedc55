"""Routed experts of every token come from the request that routed it first, wherever that was served and packed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.envs.protocol import Policy
from spmd_rl.orchestrator.policy import Call
from spmd_rl.orchestrator.records import Answered, NoLog, Record, checksum
from spmd_rl.orchestrator.routes import Routes, routes_of
from spmd_rl.rollouts.packing import pack
from spmd_rl.rollouts.plain import episode_from, plain_episode
from spmd_rl.rollouts.types import Episode, Reward, Row, Sample, Task, TrainSample
from spmd_rl.world.messages import ForgetRoutes, Generate, Generated, SendRoutes
from spmd_rl.world.routes import RouteReceiver, RouteSender, RoutesError
from tests.orchestrator.fake_run import FakeEnvironment, make_config, train

LAYERS, TOP_K, EXPERTS = 2, 3, 200
TASK = Task("somewhere", 0, {})


class Heard:
    """What a link would carry."""

    def __init__(self, replicas: int, trainers: int) -> None:
        self.replicas, self.trainers, self.cp, self.colocated = replicas, trainers, 1, False
        self.decided: list[tuple[int, object]] = []

    def decide(self, replica: int, decision: object) -> None:
        self.decided.append((replica, decision))


class Direct(RouteReceiver):
    """Gets from the leaders at hand what they cut out for a trainer rank."""

    def __init__(self, leaders: list[RouteSender], heard: Heard, rank: int) -> None:
        super().__init__(None, range(len(leaders)), LAYERS, TOP_K, EXPERTS)  # type: ignore[arg-type]
        self.leaders, self.heard, self.rank = leaders, heard, rank

    def _receive(self, step: int, replica: int, rows: object) -> np.ndarray:
        (order,) = (d for to, d in self.heard.decided if to == replica and isinstance(d, SendRoutes))
        return self.leaders[replica].cut(order.pieces[self.rank])


def leaders(count: int) -> list[RouteSender]:
    return [RouteSender(None, [], print, lambda name: nullcontext()) for _ in range(count)]  # type: ignore[arg-type]


def routed(rng: np.random.Generator, positions: int) -> np.ndarray:
    return rng.integers(0, EXPERTS, (positions, LAYERS, TOP_K), dtype=np.uint8)


def talk(rng: np.random.Generator, senders: list[RouteSender], ids: list[int]) -> tuple[Sample, list[Call], np.ndarray]:
    """A rollout of some turns, each served by any replica; the routes that its tokens should be trained with."""
    tokens, mask = rng.integers(0, 50, rng.integers(1, 6), dtype=np.int32), []
    mask = [0] * len(tokens)
    expected = np.full((0, LAYERS, TOP_K), -1)
    calls: list[Call] = []
    for _ in range(rng.integers(1, 5)):
        answer = rng.integers(0, 50, rng.integers(1, 5), dtype=np.int32)
        first = len(expected)
        call = Call(checksum(tokens), ids.pop(), int(rng.integers(len(senders))), routes_from=first)
        block = routed(rng, len(tokens) + len(answer) - 1 - first)
        senders[call.replica].put(call.request, first, block)
        call.answer = Generated(call.request, answer, np.zeros(0), np.zeros(0), "stop", "")
        call.length, call.whole = len(tokens) + len(answer), checksum(tokens, answer)
        calls.append(call)
        expected = np.concatenate([expected, block.astype(int)])
        heard = rng.integers(0, 50, rng.integers(0, 4), dtype=np.int32)
        tokens = np.concatenate([tokens, answer, heard])
        mask += [1] * len(answer) + [0] * len(heard)
    nothing = np.full((len(tokens) - len(expected), LAYERS, TOP_K), -1)
    zeros = np.zeros(len(tokens), np.float32)
    sample = Sample(tokens, np.asarray(mask, np.uint8), zeros, np.zeros(len(tokens), np.int32) - 1, zeros + 1)
    return sample, calls, np.concatenate([expected, nothing])


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.integers(1, 12))
def test_every_token_gets_what_the_engine_took_for_it(seed: int, replicas: int, ranks: int, count: int) -> None:
    rng, senders, heard = np.random.default_rng(seed), leaders(replicas), Heard(replicas, ranks)
    routes, ids = Routes(heard), list(range(200))  # type: ignore[arg-type]
    expected: dict[bytes, list[np.ndarray]] = {}
    samples = []
    for number in range(count):
        sample, calls, right = talk(rng, senders, ids)
        for call in calls:
            routes.hold(number % 3, call.replica, call.request)
        episode = routes.attach(Episode(TASK, (sample,), Reward(1.0)), calls)
        (sample,) = episode.samples
        expected.setdefault(sample.tokens.tobytes(), []).append(right)
        shown = (sample.tokens, sample.mask, sample.logprobs, sample.temperatures)
        samples.append(TrainSample(*shown, ce_weight=1.0, routes=sample.routes))
    packed = pack(samples, ranks, seq_len=64)
    share = routes.send(7, [packed])["moe/replayed"]
    replayed = total = 0
    for rank, rows in enumerate(packed.rows):
        for row in Direct(senders, heard, rank).fill(7, rows):
            assert row.routes is None
            for begin, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
                rights = expected.get(row.tokens[begin:end].tobytes())
                if rights is None:
                    continue  # a row of padding
                found = row.routed_experts[begin:end]
                assert any((found == right).all() for right in rights)
                replayed += int((found[:, 0, 0] >= 0).sum())
            total += len(row.tokens)
    assert share == pytest.approx(replayed / total)
    routes.forget([0, 1, 2])
    for to, decision in heard.decided:
        if isinstance(decision, ForgetRoutes):
            senders[to].forget(decision.requests)
    assert not any(sender.kept for sender in senders)


def test_calls_of_another_history_are_not_part_of_a_sample() -> None:
    """A draft that was thrown away, and an answer that nobody's replica kept."""
    rng, ids = np.random.default_rng(0), list(range(20))
    sample, calls, _ = talk(rng, leaders(1), ids)
    other, others, _ = talk(rng, leaders(1), ids)
    assert routes_of(sample, [*others, *calls]).tolist() == routes_of(sample, calls).tolist()
    assert routes_of(other, calls) is None
    (episode,) = (Routes(Heard(1, 1)).attach(Episode(TASK, (sample,), Reward(1.0)), [Call(0)]),)  # type: ignore[arg-type]
    assert episode.samples[0].routes is None


def test_what_is_read_from_a_journal_has_no_routes() -> None:
    sample, calls, _ = talk(np.random.default_rng(1), leaders(1), list(range(20)))
    episode = Routes(Heard(1, 1)).attach(Episode(TASK, (sample,), Reward(1.0)), calls)  # type: ignore[arg-type]
    assert episode.samples[0].routes is not None
    assert episode_from(plain_episode(episode), TASK).samples[0].routes is None


def test_what_a_leader_does_not_have_is_an_error_that_names_the_request() -> None:
    (leader,) = leaders(1)
    leader.put(4, 10, routed(np.random.default_rng(0), 5))
    pieces = np.asarray([[4, 11, 15]])
    assert len(leader.cut(pieces)) == 4
    for wrong, why in (([4, 9, 12], "9 to 12"), ([4, 12, 16], "positions 10 to 15"), ([5, 0, 1], "request 5")):
        with pytest.raises(RoutesError, match=why):
            leader.send(SendRoutes(1, [np.asarray([wrong])]))
    leader.forget([4, 99])
    with pytest.raises(RoutesError, match="request 4 are not kept"):
        leader.cut(pieces)


class Answers(NoLog):
    """The ids of requests that were answered."""

    def __init__(self) -> None:
        self.ids: set[int] = set()

    def append(self, record: Record) -> None:
        if isinstance(record, Answered) and record.stop_reason != "aborted":
            self.ids.add(record.id)


def test_in_a_run_leaders_are_asked_for_what_they_keep_and_keep_nothing_for_ever() -> None:
    """Also of attempts that fail after an answer, and are made again."""

    async def after_an_answer(number: int, task: Task) -> None:
        if number % 4 == 1:
            raise RuntimeError("it broke")

    async def heard_first(self: FakeEnvironment, task: Task, policy: Policy) -> Episode:
        await policy.generate(self.prompt(task), policy.sampling)
        return await original(self, task, policy)

    original = FakeEnvironment.rollout
    env = FakeEnvironment(turns=2, act=after_an_answer)
    env.rollout = heard_first.__get__(env)  # type: ignore[method-assign]
    config = make_config(max_steps=6, groups=3, max_retries=2, max_error_rate=1.0)
    config = replace(config, trainer=replace(config.trainer, router_replay=True))
    answers = Answers()
    made = train(config, [env], replicas=3, trainers=2, journal=answers)
    kept: dict[int, tuple[int, Generate]] = {}
    sent, forgotten = set(), set()
    for replica, decision in made.cluster.decisions:
        match decision:
            case Generate():
                kept[decision.id] = (replica, decision)
            case SendRoutes():
                for request, first, stop in np.concatenate(decision.pieces).tolist():
                    where, asked = kept[request]
                    assert where == replica and request not in forgotten and request in answers.ids
                    assert asked.routes_from == first < stop <= len(asked.tokens) + asked.max_tokens
                    sent.add(request)
            case ForgetRoutes():
                assert all(kept[request][0] == replica for request in decision.requests)
                forgotten |= set(decision.requests)
    held = {request for requests in made.services.routes._held.values() for _, request in requests}
    assert forgotten | held == answers.ids and not forgotten & held
    assert sent and sent < forgotten | held and len(forgotten) > len(held)
    assert all(batch.stats["moe/replayed"] > 0.5 for batch in made.report.batches.values())


def test_rows_without_routes_need_no_leader() -> None:
    zeros = np.zeros(3, np.float32)
    row = Row(np.zeros(3, np.int32), np.zeros(3, np.int32), zeros, zeros, zeros + 1, np.asarray([0, 3], np.int32))
    (filled,) = Direct([], Heard(0, 1), 0).fill(1, [row])
    assert filled.routed_experts is None
