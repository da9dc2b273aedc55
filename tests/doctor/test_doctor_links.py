"""Links and clocks, over a wire of threads in this process: who is measured when, what counts as slow."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.doctor import links, skew
from spmd_rl.doctor.link_lines import judge_sum, link_lines, pairs
from spmd_rl.doctor.links import ALONE, FEW, MAX_ROUNDS, Pair
from spmd_rl.doctor.party import Member

CPU = torch.device("cpu")
WAIT_S = 60.0


@dataclass
class Threads:
    """What all threads of one test share."""

    size: int
    delay: dict[Pair, float] = field(default_factory=dict)  # seconds per message, by (sender, receiver)
    mail: dict[Pair, queue.Queue] = field(default_factory=lambda: defaultdict(queue.Queue))
    talking: set[Pair] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)


@dataclass
class ThreadWire:
    """One thread's end; a message that is longer than another one takes longer in proportion."""

    shared: Threads
    rank: int

    def send(self, data: torch.Tensor, peer: int) -> None:
        self.shared.talking.add((self.rank, peer))
        time.sleep(self.shared.delay.get((self.rank, peer), 0.0) * data.numel() / links.PARCEL["cpu"])
        self.shared.mail[self.rank, peer].put(data.clone())

    def receive(self, data: torch.Tensor, peer: int) -> None:
        data.copy_(self.shared.mail[peer, self.rank].get(timeout=WAIT_S))

    def meet(self) -> None:
        self.shared.barrier.wait(WAIT_S)


def measured(shared: Threads, rounds: list[list[Pair]]) -> dict[Pair, float]:
    """What all ranks measure, each in a thread."""
    with ThreadPoolExecutor(shared.size) as pool:
        work = [pool.submit(links.measure, ThreadWire(shared, rank), rank, rounds, CPU) for rank in range(shared.size)]
        return pairs([{"speeds": one.result(WAIT_S)} for one in work])


@given(st.integers(1, 80))
def test_rounds_meet_every_pair_once_and_nobody_twice_at_a_time(count: int) -> None:
    members = [3 * rank + 1 for rank in range(count)]
    rounds = links.rounds_of(members)
    met = [pair for pairs_ in rounds for pair in pairs_]
    for disjoint in rounds:
        busy = [rank for pair in disjoint for rank in pair]
        assert len(set(busy)) == len(busy)
    assert len(set(met)) == len(met) and all(a < b for a, b in met)
    if count <= ALONE:
        assert all(len(pairs_) == 1 for pairs_ in rounds)
    if count <= ALONE or count <= MAX_ROUNDS:
        assert set(met) == set(combinations(members, 2))
    else:
        assert len(rounds) == MAX_ROUNDS


def test_hosts_stand_for_their_ranks_in_large_worlds() -> None:
    assert links.who_measures(["a"] * 4 + ["b"] * 4) == list(range(8))
    hosts = [f"h{rank // 8}" for rank in range(800)]
    assert links.who_measures(hosts) == list(range(0, 800, 8))


def test_every_link_is_measured_in_both_directions() -> None:
    shared = Threads(5)
    speeds = measured(shared, links.rounds_of(range(5)))
    assert set(speeds) == {(a, b) for a in range(5) for b in range(5) if a != b} == shared.talking
    assert all(speed > 0 for speed in speeds.values())


def test_a_slow_link_is_found_in_its_direction() -> None:
    delay = {pair: 0.1 for a, b in combinations(range(4), 2) for pair in ((a, b), (b, a))} | {(1, 2): 1.5}
    speeds = measured(Threads(4, delay), links.rounds_of(range(4)))
    slow = links.find_slow(speeds, ["a", "b", "c", "d"])[0]  # on a busy machine another one may follow
    assert slow.pair == (1, 2)
    assert links.suspects([slow]) == [[(1, 2)]]
    again = measured(Threads(4, delay), [[(1, 2)]])
    assert set(again) == {(1, 2), (2, 1)}


def test_links_are_compared_with_their_own_kind() -> None:
    hosts = ["a", "a", "b", "b"]
    speeds = {(x, y): 10.0 if hosts[x] == hosts[y] else 1.0 for x in range(4) for y in range(4) if x != y}
    assert links.find_slow(speeds, hosts) == []
    speeds[0, 1] = 4.0  # four times as fast as links between hosts, and slow all the same
    speeds[2, 0] = 0.45
    named = [(slow.pair, slow.typical) for slow in links.find_slow(speeds, hosts)]
    assert named == [((2, 0), 1.0), ((0, 1), 10.0)]


def test_links_that_crawl_are_named_even_when_all_of_them_do() -> None:
    slow = links.find_slow({(0, 1): 0.011, (1, 0): 0.012}, ["a", "b"])
    assert [(one.pair, one.typical, one.broken) for one in slow] == [((0, 1), 0.0, False), ((1, 0), 0.0, False)]
    assert links.find_slow({(0, 1): 0.9, (1, 0): 5.0}, ["a", "b"]) == [] and FEW > 2


def test_lines_about_links() -> None:
    members = [Member(rank, f"h{rank // 2}", rank // 2, 1, rank % 2) for rank in range(4)]
    speeds = {(x, y): 2.0 for x in range(4) for y in range(4) if x != y} | {(1, 2): 0.1, (0, 1): 0.9}
    total, *slow = link_lines("gloo", speeds, members, 8.0, 12)
    assert total.finding.value == (
        "12 of 12, 0.90 to 2.00 GB/s within a host (a copy in memory: 8.0), 0.10 to 2.00 GB/s between hosts"
    )
    assert [line.finding.status for line in slow] == ["FAIL", "warn"]
    assert slow[0].finding.value == "rank 1 (h0) → rank 2 (h1): 0.100 GB/s, where 2.00 is usual"
    assert "cable" in slow[0].finding.to_do and "load" in slow[1].finding.to_do
    assert link_lines("gloo", {}, members[:1], 8.0, 0) == []
    assert "0.10" in links.matrix(speeds, range(4)) and "–" in links.matrix(speeds, range(4))


@pytest.mark.parametrize(("size", "seconds", "status"), [(2**24, 0.02, "ok"), (2**20, 3.0, "warn"), (2**24, 3.0, "ok")])
def test_a_sum_that_crawls(size: int, seconds: float, status: str) -> None:
    assert judge_sum(size, seconds, 2).status == status


@pytest.mark.parametrize("ahead", [-7.5, 0.0, 123.25])
def test_clocks_that_differ(ahead: float) -> None:
    """Rank 0's clock is ahead; the way there and back takes as long, so the offset is exact."""
    shared, now = Threads(3), time.time
    with ThreadPoolExecutor(3) as pool:
        clocks = [lambda: now() + ahead, now, now]
        work = [pool.submit(skew.exchange, ThreadWire(shared, rank), rank, [2], clocks[rank]) for rank in range(3)]
        nothing, also_nothing, (offset, bound) = (one.result(WAIT_S) for one in work)
    assert nothing is None and also_nothing is None
    assert abs(offset - ahead) <= bound + 1e-6 and bound < 10
    assert skew.judge(offset, bound).status == ("ok" if ahead == 0 else "warn")


def test_an_offset_below_what_can_be_told_apart_is_no_fault() -> None:
    assert skew.judge(0.9, 0.6).status == "ok" and skew.judge(0.9, 0.1).status == "warn"
    assert "behind by 900.0 ms" in skew.judge(0.9, 0.1).value and "ahead" in skew.judge(-0.9, 0.1).value
