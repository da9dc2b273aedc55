"""Ranks that are killed, stopped, hang, raise or run something else: the run ends, and everybody says who it was.

Every case is a launch of its own. They mostly wait, so a few of them run at a time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from spmd_rl.config import load
from tests.distributed.failure_worker import HEARTBEAT_S
from tests.distributed.launch import Started, start_ranks, torchrun

RANKS = 3
ROLES = ["orchestrator", "trainer", "inference"]
PATIENCE_S = 150.0  # for a start on a busy machine
MARGIN_S = 20.0  # from the event to the end: deadlines of 3 s, and less than torchrun's own 30 s for a stopped rank

# how, victim, who starts the ranks
CASES = [
    ("kill", 0, "bare"),
    ("kill", 2, "bare"),
    ("kill", 2, "torchrun"),
    ("stop", 0, "torchrun"),
    ("stop", 2, "torchrun"),
    ("hang", 0, "torchrun"),
    ("hang", 2, "torchrun"),
    ("raise", 1, "torchrun"),
    ("differ", 2, "torchrun"),
    ("wait", 1, "torchrun"),
]


@dataclass
class Outcome:
    """What one launch left."""

    folder: Path
    codes: list[int]
    output: str
    alive: list[int]
    pids: list[int]
    errors: dict[int, str]  # what torchrun would print of each rank's error file
    seconds: float  # from the event to the end

    @property
    def root_cause(self) -> str:
        return self.output.partition("Root Cause")[2]


def launch(how: str, victim: int, starter: str, folder: Path) -> Outcome:
    start = torchrun if starter == "torchrun" else start_ranks
    with start("failure_worker.py", RANKS, folder, how, str(victim)) as started:
        if how == "wait":
            freeze(started)
        codes = started.wait(PATIENCE_S)
        end, event = time.time(), folder / "event"
        seconds = end - event.stat().st_mtime if event.exists() else 0.0
        return Outcome(
            folder, codes, started.output(), started.alive(), started.pids(), read_errors(folder, starter), seconds
        )


def freeze(started: Started) -> None:
    """All ranks sleep for longer than a heartbeat, as on a suspended machine; none may be blamed for it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (started.folder / "event").exists():
        assert time.monotonic() < deadline and started.processes[0].poll() is None, started.output()
        time.sleep(0.05)
    judge, *others = started.pids()
    for pids, signal_number, pause_s in (
        (others, signal.SIGSTOP, 0.6),  # the judge sees that they have become silent
        ([judge], signal.SIGSTOP, HEARTBEAT_S + 1.0),
        ([judge], signal.SIGCONT, 0.6),  # it wakes up first, and must not count the time that it slept
        (others, signal.SIGCONT, 0.0),
    ):
        for pid in pids:
            os.kill(pid, signal_number)
        time.sleep(pause_s)


def read_errors(folder: Path, starter: str) -> dict[int, str]:
    pattern = "logs/*/attempt_0/*/error.json" if starter == "torchrun" else "error_*/error.json"
    files = {int(path.parent.name.removeprefix("error_")): path for path in folder.glob(pattern)}
    return {rank: json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"] for rank, path in files.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    with ThreadPoolExecutor(3) as pool:
        futures: dict[tuple, Future[Outcome]] = {
            case: pool.submit(launch, *case, tmp_path_factory.mktemp("_".join(map(str, case)))) for case in CASES
        }
        yield futures
        for future in futures.values():
            future.cancel()


def words(outcome: Outcome) -> list[int]:
    """The ranks that had last words."""
    return sorted(int(path.name.removeprefix("words_")) for path in outcome.folder.glob("words_*"))


def verdict(outcome: Outcome, victim: int, reason: str, stage: str = "the fatal stage") -> re.Pattern[str]:
    """The last line of every report: rank, role, host, process and stage of the victim, then the reason."""
    where = f"rank {victim} ({ROLES[victim]}) on {socket.gethostname()}, pid {outcome.pids[victim]}, stage '{stage}'"
    return re.compile(re.escape(where) + ": " + reason, re.MULTILINE)


def assert_over(outcome: Outcome) -> None:
    """Every process is gone, in time, with an exit code that is not zero."""
    assert 0 not in outcome.codes, outcome.output
    assert outcome.alive == []
    assert outcome.seconds < MARGIN_S
    codes = re.findall(r"exitcode +: (\S+)", outcome.output)
    assert len(codes) in (0, RANKS) and "0" not in codes


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_though_its_peers_fail_first(outcomes, victim):
    """Its peers' connections are reset at once; still none of them blames itself."""
    outcome = outcomes["kill", victim, "bare"].result()
    assert_over(outcome)
    assert outcome.codes == [-signal.SIGKILL if rank == victim else 1 for rank in range(RANKS)]
    expected = verdict(outcome, victim, r"no sign of life for \d+\.\d s$")
    assert sorted(outcome.errors) == [rank for rank in range(RANKS) if rank != victim]
    assert all(expected.fullmatch(error) for error in outcome.errors.values()), outcome.errors
    screen = outcome.output.partition("== screen_1")[0]
    assert victim == 0 or expected.search(screen)  # rank 0 shows it


def test_torchrun_names_a_killed_rank(outcomes):
    """Within its own agent torchrun ends the others before a heartbeat can be missed."""
    outcome = outcomes["kill", 2, "torchrun"].result()
    assert_over(outcome)
    assert re.search(rf"rank +: 2 .*\n +exitcode +: -9 \(pid: {outcome.pids[2]}\)", outcome.root_cause)
    assert outcome.errors == {}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("how", "reason"),
    [("stop", r"no sign of life for \d+\.\d s"), ("hang", r"no progress for \d+\.\d s \(deadline 2 s\)")],
    ids=["stop", "hang"],
)
def test_a_stopped_or_hanging_rank_is_named_and_killed(outcomes, how, reason, victim):
    """All others wait for it in a stage without deadline, for as long, and are not blamed."""
    outcome = outcomes[how, victim, "torchrun"].result()
    assert_over(outcome)
    expected = verdict(outcome, victim, reason)
    assert {0, 1, 2} - {victim} <= set(outcome.errors)
    assert all(expected.fullmatch(error) for error in outcome.errors.values()), outcome.errors
    assert expected.search(outcome.root_cause)
    # Also the main thread that hangs; a process that is stopped says nothing.
    assert words(outcome) == [rank for rank in range(RANKS) if how == "hang" or rank != victim]


def test_an_exception_of_one_rank_is_what_all_ranks_report(outcomes):
    outcome = outcomes["raise", 1, "torchrun"].result()
    assert_over(outcome)
    assert sorted(outcome.errors) == [0, 1, 2]
    assert words(outcome) == [0, 1, 2]
    (report,) = set(outcome.errors.values())
    assert report.startswith("Traceback (most recent call last)") and "in fail_now" in report
    assert verdict(outcome, 1, "ValueError: the loss is not a number$").search(report)
    assert report in outcome.output  # rank 0 shows it
    assert re.search(r"rank +: 1 ", outcome.root_cause) and "ValueError: the loss" in outcome.root_cause


def test_ranks_with_another_config_do_not_start(outcomes):
    outcome = outcomes["differ", 2, "torchrun"].result()
    assert_over(outcome)
    (report,) = set(outcome.errors.values())
    assert re.search(r"  config: [0-9a-f]{64} on ranks \[0, 1\]; [0-9a-f]{64} on ranks \[2\]\n", report)
    assert verdict(outcome, 0, "StartError: the ranks do not run the same", stage="compare ranks").search(report)
    assert not re.search(r"^  (torch|code|python): ", report, re.MULTILINE)
    assert not (outcome.folder / "run").exists()


def test_waiting_and_sleeping_are_no_failures(outcomes):
    """One rank waits for two heartbeats where nothing is due, and all are frozen for more than one."""
    outcome = outcomes["wait", 1, "torchrun"].result()
    assert outcome.codes == [0], outcome.output
    assert (outcome.errors, outcome.alive) == ({}, [])
    assert load(["--config", str(outcome.folder / "run" / "config.toml")]).deadlines.heartbeat_s == HEARTBEAT_S
