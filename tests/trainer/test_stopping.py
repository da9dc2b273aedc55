"""An early end: whoever asks and however far ranks are apart, all of them end behind one step."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.trainer.stopping import EarlyStop


class Memory(dict):
    """A store."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@given(asked_after=st.integers(0, 12), order=st.lists(st.integers(0, 3), min_size=120, max_size=120))
def test_all_ranks_end_behind_the_same_step(asked_after: int, order: list[int]) -> None:
    """Ranks begin a step when they like, and complete it when all have begun it."""
    store = Memory()
    ranks = [EarlyStop(store, rank, "nowhere", lambda: None) for rank in range(4)]
    begun, asked_at = [1] * 4, [0] * 4  # the step that a rank is in; the last one it asked about
    for moves, rank in enumerate([*order, *range(4)] * 3):
        if moves == asked_after:
            ranks[0]._asked = True
        step = begun[rank]
        if ranks[rank].stopped_at >= 0 or min(begun) < step:
            continue  # it waits for the others
        asked_at[rank] = step
        if not ranks[rank](step):
            begun[rank] += 1
    stopped = {rank.stopped_at for rank in ranks}
    assert len(stopped) == 1
    assert stopped == {-1} or stopped.pop() >= 2


def test_a_stop_file_asks_too(tmp_path: Path) -> None:
    stop = EarlyStop(Memory(), 0, tmp_path, lambda: None)
    assert not stop(1)
    (tmp_path / "stop").touch()
    assert not stop(2) and stop(3) and stop.stopped_at == 3
    assert not (tmp_path / "stop").exists()


def test_who_asks_while_the_run_starts_is_heard(tmp_path: Path) -> None:
    """As a job does whose time ends soon; the launcher has removed what an earlier run left."""
    (tmp_path / "stop").touch()
    stop = EarlyStop(Memory(), 0, tmp_path, lambda: None)
    assert not stop(1) and stop(2)
