"""The window bounds staleness and never deadlocks, whatever finishes when."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.orchestrator.window import Order, Window


class Run:
    """A run in which a random driver decides what happens next; stragglers finish only when nothing else can happen."""

    def __init__(self, window: Window, rng: random.Random, straggling: float, dropping: float, prefetch: bool) -> None:
        self.window, self.rng, self.straggling, self.dropping = window, rng, straggling, dropping
        self.prefetch = prefetch  # take a batch while the one before is in training
        self.version = 0
        self.admitted: dict[int, int] = {}
        self.running: list[int] = []
        self.stragglers: list[int] = []
        self.finished: list[int] = []
        self.dropped: list[int] = []
        self.training: list[list[int]] = []
        self.batches: list[list[int]] = []
        self.lags: list[int] = []

    def admit(self) -> bool:
        if not self.window.can_admit():
            return False
        group = self.window.admit(self.version)
        self.admitted[group] = self.version
        (self.stragglers if self.rng.random() < self.straggling else self.running).append(group)
        return True

    def finish(self, pool: list[int]) -> bool:
        if not pool:
            return False
        group = pool.pop(self.rng.randrange(len(pool)))
        if self.rng.random() < self.dropping:
            self.window.drop(group)
            self.dropped.append(group)
        else:
            self.window.finish(group)
            self.finished.append(group)
        return True

    def take(self) -> bool:
        if self.training and not self.prefetch:
            return False
        batch = self.window.take()
        if batch is None:
            return False
        assert len(batch) == self.window.groups_per_batch
        self.lags += [len(self.batches) - self.admitted[g] for g in batch]
        self.batches.append(batch)
        self.training.append(batch)
        return True

    def step(self) -> bool:
        if not self.training:
            return False
        self.version += 1
        self.window.release(self.training.pop(0))
        return True

    def go(self, batches: int) -> None:
        """Until so many batches are done; an assertion error means deadlock."""
        while self.version < batches:
            actions = [self.admit, self.admit, lambda: self.finish(self.running), self.take, self.step]
            self.rng.shuffle(actions)
            assert any(action() for action in actions) or self.finish(self.stragglers), "deadlock"


@st.composite
def runs(draw: st.DrawFn, orders: tuple[Order, ...] = ("fifo", "window", "completion"), max_lag: int = 4) -> Run:
    window = Window(
        groups_per_batch=draw(st.integers(1, 6)),
        max_lag=draw(st.integers(0, max_lag)),
        fraction=draw(st.sampled_from([0.01, 0.1, 0.3, 0.6, 1.0])),
        order=draw(st.sampled_from(orders)),
    )
    return Run(
        window,
        random.Random(draw(st.integers(0, 10**6))),
        straggling=draw(st.sampled_from([0.0, 0.05, 0.3, 0.8])),
        dropping=draw(st.sampled_from([0.0, 0.2])),
        prefetch=draw(st.booleans()),
    )


@settings(max_examples=100, deadline=None)
@given(runs())
def test_no_group_is_lost_or_consumed_twice_and_nothing_deadlocks(run: Run) -> None:
    run.go(batches=25)
    consumed = Counter(g for batch in run.batches for g in batch)
    assert set(consumed.values()) == {1}
    assert not set(consumed) & set(run.dropped)
    stats = run.window.stats()
    open_groups = set(run.admitted) - set(run.dropped) - {g for b in run.batches for g in b} | {
        g for b in run.training for g in b
    }
    assert len(open_groups) == run.window.slots - stats["window/free"]
    assert stats["window/running"] == len(run.running) + len(run.stragglers)
    assert stats["window/finished"] + stats["window/in_batch"] == len(set(run.finished) - set(consumed))
    assert stats["window/dropped_total"] == len(run.dropped)
    assert stats["window/in_training"] == sum(map(len, run.training))


@settings(max_examples=100, deadline=None)
@given(runs(orders=("fifo", "window")))
def test_lag_stays_within_the_bound(run: Run) -> None:
    run.go(batches=25)
    assert max(run.lags) <= run.window.bound
    assert run.window.stats()["window/lag_max"] == max(run.lags[-run.window.groups_per_batch :])


@settings(max_examples=60, deadline=None)
@given(runs(max_lag=0))
def test_no_lag_allowed_means_synchronous_in_every_order(run: Run) -> None:
    run.go(batches=15)
    assert run.window.bound == 0
    assert set(run.lags) == {0}


@settings(max_examples=50, deadline=None)
@given(runs(orders=("fifo",)))
def test_fifo_consumes_in_order_of_admission(run: Run) -> None:
    run.go(batches=15)
    consumed = [g for batch in run.batches for g in batch]
    assert consumed == sorted(consumed)
    assert run.window.bound == run.window.max_lag


@settings(max_examples=50, deadline=None)
@given(runs(orders=("completion",)))
def test_completion_consumes_in_order_of_completion(run: Run) -> None:
    run.go(batches=15)
    consumed = [g for batch in run.batches for g in batch]
    assert consumed == run.finished[: len(consumed)]


def drive_past_a_straggler(window: Window, batches: int) -> tuple[int, int]:
    """Admit eagerly, finish everything except one group, consume; (batches done without it, its lag when it comes)."""
    version = 0
    for _ in range(window.slots - 1):
        window.finish(window.admit(version))
    straggler = window.admit(version)
    while version < batches and (batch := window.take()):
        window.release(batch)
        version += 1
        while window.can_admit():
            window.finish(window.admit(version))
    without, batch = version, []
    window.finish(straggler)
    while straggler not in batch:
        batch = window.take()
        window.release(batch)
        version += 1
        while window.can_admit():
            window.finish(window.admit(version))
    return without, version - 1


@pytest.mark.parametrize(
    ("groups", "max_lag", "fraction", "order", "bound"),
    [(4, 1, 0.5, "window", 2), (4, 2, 1.0, "window", 5), (1, 3, 1.0, "window", 6), (4, 2, 1.0, "fifo", 2)],
)
def test_the_bound_is_tight(groups: int, max_lag: int, fraction: float, order: Order, bound: int) -> None:
    window = Window(groups, max_lag, fraction, order)
    assert window.bound == bound
    assert drive_past_a_straggler(window, batches=50)[1] == bound


def test_completion_never_waits_for_a_straggler() -> None:
    window = Window(4, 1, order="completion")
    assert window.bound is None
    without, lag = drive_past_a_straggler(window, batches=50)
    assert without == 50 and lag >= 50


def test_a_batch_keeps_what_it_took_while_the_window_slides() -> None:
    window = Window(4, 0, fraction=0.25)  # one place
    first, second, third, fourth = (window.admit(0) for _ in range(4))
    window.finish(second)
    assert window.take() is None
    window.finish(first)
    assert window.take() is None
    assert window.stats()["window/in_batch"] == 2
    window.finish(third)
    window.finish(fourth)
    assert window.take() == [first, second, third, fourth]
    assert window.can_admit() == 0
    window.release([first, second, third, fourth])
    assert window.can_admit() == 4


def test_a_dropped_straggler_frees_its_slot_and_its_place() -> None:
    window = Window(2, 0, fraction=0.5)
    straggler, other = window.admit(0), window.admit(0)
    window.finish(other)
    assert window.take() is None
    window.drop(straggler)
    assert window.can_admit() == 1
    late = window.admit(0)
    window.finish(late)
    assert window.take() == [other, late]


def test_dropped_groups_take_up_no_place() -> None:
    window = Window(4, 0, fraction=0.5)  # two places
    first, second, _third, fourth = (window.admit(0) for _ in range(4))
    window.finish(second)
    window.finish(fourth)
    assert window.take() is None
    assert window.stats()["window/in_batch"] == 1  # second; it keeps its place behind first
    window.drop(first)
    assert window.take() is None
    assert window.stats()["window/in_batch"] == 2  # the window is now third and fourth


def test_a_group_dropped_from_the_middle_of_the_window_makes_room() -> None:
    window = Window(4, 0, fraction=0.5)
    _first, second, third, _fourth = (window.admit(0) for _ in range(4))
    window.finish(third)
    window.take()
    assert window.stats()["window/in_batch"] == 0
    window.drop(second)
    window.take()
    assert window.stats()["window/in_batch"] == 1


def test_sizes() -> None:
    assert Window(8, 1).slots == 16
    assert Window(8, 1, 0.3).size == 4
    assert Window(50, 1, 0.29).size == 29  # not floor(28.999…)
    assert Window(1, 0, 0.01).size == 1
    assert Window(8, 1, 0.3, "fifo").size == 1


def test_a_run_may_start_at_any_version() -> None:
    window = Window(1, 1, version=7)
    group = window.admit(7)
    window.finish(group)
    window.release(window.take())
    assert window.stats()["window/lag_max"] == 0
    with pytest.raises(ValueError, match="1 groups were released since version 7"):
        window.admit(7)
    window.admit(8)


def test_calls_out_of_turn_are_refused() -> None:
    window = Window(1, 0)
    group = window.admit(0)
    with pytest.raises(ValueError, match="all 1 slots are taken"):
        window.admit(0)
    with pytest.raises(ValueError, match="in no batch in training"):
        window.release([group])
    window.finish(group)
    with pytest.raises(ValueError, match="is not running"):
        window.finish(group)
    assert window.take() == [group]
    with pytest.raises(ValueError, match="neither running nor finished"):
        window.drop(group)
    window.release([group])
    with pytest.raises(ValueError, match="released twice"):
        window.release([group])
    for arguments in [(0, 1, 0.3), (1, -1, 0.3), (1, 1, 0.0), (1, 1, 1.5)]:
        with pytest.raises(ValueError, match="fraction"):
            Window(*arguments)
