"""The watchdog without processes: what it posts, whom it blames, and what it leaves behind.

tests/distributed/test_failures.py kills, stops and hangs real ranks.
"""

from __future__ import annotations

import itertools
import json
import os
import time

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from spmd_rl.world.error_file import write_error_file
from spmd_rl.world.pipe import PeerError
from spmd_rl.world.watchdog import Verdict, Watchdog, _is_of_a_collective, _Seen

BLAMED = Verdict(3, 0, "trainer", "node-7", 4711, "engine step", "no sign of life for 31.2 s")


class Blamed(Exception):
    """Instead of the end of this process."""


class Judge(Watchdog):
    """Raises its verdict; its store is a dict."""

    def __init__(self, rank: int = 0, world_size: int = 3, heartbeat_s: float = 10.0, start_s: float = 60.0) -> None:
        super().__init__(rank, world_size, "orchestrator", heartbeat_s, start_s)
        self._store = FakeStore()

    def _condemn(self, verdict: Verdict):
        raise Blamed(verdict)


class FakeStore(dict):
    set = dict.__setitem__
    get = dict.__getitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


class Subject(Watchdog):
    """A rank whose heartbeats land in the judge's store."""

    def __init__(self, judge: Judge, rank: int) -> None:
        super().__init__(rank, judge.world_size, "inference", judge.heartbeat_s)
        self._store = judge._store

    def last(self) -> dict:
        self._post()
        return json.loads(self._store[f"{self._prefix}/beat/{self.rank}"])


# --- what is posted ---------------------------------------------------------------------------------------------------


def test_a_heartbeat_says_where_the_main_thread_is():
    dog = Subject(Judge(), 2)
    first = dog.last()
    assert (first["stage"], first["deadline_s"], first["role"], first["closed"]) == ("start", None, "inference", False)
    with dog.stage("train", 5.0):
        assert (dog.last()["stage"], dog.last()["deadline_s"]) == ("train", 5.0)
        dog.beat("train, micro-batch 2")
        assert (dog.last()["stage"], dog.last()["deadline_s"]) == ("train, micro-batch 2", 5.0)
        with dog.stage("wait for rank 0"):
            assert (dog.last()["stage"], dog.last()["deadline_s"]) == ("wait for rank 0", None)
        assert (dog.last()["stage"], dog.last()["deadline_s"]) == ("train, micro-batch 2", 5.0)
    assert (dog.last()["stage"], dog.last()["deadline_s"]) == ("start", None)


def test_everything_the_main_thread_says_is_progress():
    dog = Subject(Judge(), 2)
    seen = [dog.last()["progress"]]
    with dog.stage("a", 1.0):
        seen.append(dog.last()["progress"])
        dog.beat()
        seen.append(dog.last()["progress"])
    seen.append(dog.last()["progress"])
    assert dog.last()["progress"] == seen[-1]
    assert all(before < after for before, after in itertools.pairwise(seen))


def test_a_failed_stage_keeps_its_name():
    dog = Subject(Judge(), 1)
    with pytest.raises(ValueError), dog.stage("outer", 9.0), dog.stage("load the model", 5.0):
        raise ValueError
    assert dog.last()["stage"] == "load the model"


# --- whom it blames ---------------------------------------------------------------------------------------------------


def verdict_of(judge: Judge, known: _Seen, now: float, rank: int = 2) -> Verdict | None:
    try:
        judge._judge(rank, known, now)
    except Blamed as blamed:
        return blamed.args[0]
    return None


def test_rank_0_judges_all_and_all_judge_rank_0():
    assert [Judge(rank, 4)._judged() for rank in range(4)] == [[1, 2, 3], [0], [0], [0]]


def test_a_silent_rank_is_blamed_with_its_place():
    judge = Judge(heartbeat_s=10.0)
    dog, known = Subject(judge, 2), _Seen(None, 100.0, 100.0)
    for now in (101.0, 120.0, 130.0):  # it posts, without progress, in a stage without deadline
        dog._post()
        assert verdict_of(judge, known, now) is None
    with dog.stage("engine step"):
        dog._post()
    assert verdict_of(judge, known, 131.0) is None
    assert verdict_of(judge, known, 141.0) is None
    verdict = verdict_of(judge, known, 141.2)
    assert (verdict.rank, verdict.by, verdict.role, verdict.stage) == (2, 0, "inference", "engine step")
    assert (verdict.host, verdict.pid) == (dog._host, dog._pid)
    assert verdict.message == "no sign of life for 10.2 s"


def test_a_rank_stuck_in_a_stage_with_a_deadline_is_blamed():
    judge = Judge(heartbeat_s=10.0)
    dog, known = Subject(judge, 2), _Seen(None, 0.0, 0.0)
    with dog.stage("train", 5.0):
        for now in (1.0, 4.0, 6.0):
            dog._post()
            assert verdict_of(judge, known, now) is None
        dog.beat()
        dog._post()
        assert verdict_of(judge, known, 6.1) is None  # it got somewhere: the deadline starts again
        dog._post()
        assert verdict_of(judge, known, 11.0) is None
        dog._post()
        verdict = verdict_of(judge, known, 11.2)
    assert (verdict.rank, verdict.stage) == (2, "train")
    assert verdict.message == "no progress for 5.1 s (deadline 5 s)"


def test_a_long_wait_before_a_stage_with_a_deadline_counts_for_nothing():
    judge = Judge()
    dog, known = Subject(judge, 2), _Seen(None, 0.0, 0.0)
    for now in range(100):
        dog._post()
        assert verdict_of(judge, known, float(now)) is None
    with dog.stage("train", 5.0):
        dog._post()
        assert verdict_of(judge, known, 101.0) is None


def test_a_rank_that_left_in_order_is_never_blamed():
    judge = Judge()
    dog, known = Subject(judge, 2), _Seen(None, 0.0, 0.0)
    dog._post(closed=True)
    assert all(verdict_of(judge, known, now) is None for now in (1.0, 1e3, 1e6))


def test_a_rank_that_never_showed_up_is_blamed_after_the_start():
    judge = Judge(heartbeat_s=10.0, start_s=60.0)
    known = _Seen(None, 0.0, 0.0)
    assert verdict_of(judge, known, 59.0) is None
    verdict = verdict_of(judge, known, 61.0)
    assert (verdict.rank, verdict.message) == (2, "never showed up")


# --- what it leaves behind --------------------------------------------------------------------------------------------


def test_a_verdict_for_people_ends_with_the_reason():
    reason = "rank 3 (trainer) on node-7, pid 4711, stage 'engine step': no sign of life for 31.2 s"
    assert BLAMED.render() == reason
    failed = Verdict(3, 3, "trainer", "node-7", 4711, "step", "ValueError: x", "Traceback ...\nValueError: x\n")
    assert failed.render().splitlines() == [
        "Traceback ...",
        "ValueError: x",
        "",
        "rank 3 (trainer) on node-7, pid 4711, stage 'step': ValueError: x",
    ]


def test_torchrun_reads_the_error_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.9)
    for rank in (0, BLAMED.rank):
        write_error_file(BLAMED.render(), first=rank == BLAMED.rank)
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
        assert failure.message["message"] == failure.message["extraInfo"]["py_callstack"] == BLAMED.render()
        # torchrun calls the earliest one the root cause: that is the rank that failed.
        assert failure.timestamp == 1_800_000_000 - (rank == BLAMED.rank)


@pytest.mark.parametrize("path", ["", "no/such/folder/error.json"])
def test_an_error_file_that_cannot_be_written_hides_nothing(path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    write_error_file(BLAMED.render())


def test_last_words_come_behind_the_verdict_and_cannot_hold_up_the_end(tmp_path, monkeypatch):
    class Ended(Exception):
        pass

    def end(code: int):
        raise Ended(code)

    def last_words():
        said.append((tmp_path / "error.json").exists())
        raise OSError("the disk is full")

    said = []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(os, "_exit", end)
    dog = Watchdog(3, 4, "trainer", 1.0)
    dog.on_verdict, dog.last_words = said.append, last_words
    with pytest.raises(Ended, match="1"):
        dog.fail(ValueError("x"))
    assert len(said) == 2 and said[0].endswith("stage 'start': ValueError: x") and said[1]


def test_errors_of_collectives_are_told_from_others():
    """They say that a peer is gone, so their rank is not the first one to blame."""
    try:
        try:
            raise RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
        except RuntimeError as error:
            raise PeerError("exchange with rank 3 failed") from error
    except PeerError as error:
        assert _is_of_a_collective(error) and _is_of_a_collective(error.__cause__)
    assert _is_of_a_collective(DistNetworkError("reset"))
    assert _is_of_a_collective(RuntimeError("[Rank 0]: Ranks 2 failed to pass monitoredBarrier in 7200000 ms"))
    assert not _is_of_a_collective(RuntimeError("the loss is not a number"))


def test_closing_a_watchdog_that_never_started_is_fine():
    Watchdog(0, 1, "orchestrator", 1.0).close()


# --- a second thread of the same rank ---------------------------------------------------------------------------------


def test_a_second_thread_is_overdue_by_its_own_progress_alone():
    dog = Judge()
    thread = dog.beside("orchestrator")
    with thread.stage("orchestrate", 1000.0):
        assert thread.overdue() == ""
        thread._beat_at -= 1001
        dog.beat()  # the main thread's progress is not its own
        assert thread.overdue().startswith("no progress for 1001.")
        thread.beat()
        assert thread.overdue() == ""
        with thread.stage("wait for the clock"):
            thread._beat_at -= 10_000
            assert thread.overdue() == ""  # it waits for others
    assert thread.overdue() == "" and thread.name == "start"


def test_the_failure_of_a_second_thread_carries_its_role_and_stage():
    thread = Judge().beside("orchestrator")
    with pytest.raises(Blamed) as blamed, thread.stage("preflight", 5.0):
        thread.fail(ValueError("no such environment"))
    verdict = blamed.value.args[0]
    assert (verdict.role, verdict.stage, verdict.message) == (
        "orchestrator", "preflight", "ValueError: no such environment",
    )  # fmt: skip


def test_signals_are_heard_by_whoever_asked_last():
    dog = Judge()
    thread, heard = dog.beside("orchestrator"), []
    thread.on_signal = heard.append
    dog.on_signal("SIGTERM")
    assert heard == ["SIGTERM"]
