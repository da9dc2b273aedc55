"""Spans: what is recorded is what is read, on one common time, and the pictures hold it."""

from __future__ import annotations

import json
import tempfile
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from spmd_rl.observe import timeline
from spmd_rl.observe.timeline import Spans, colour, read, shares, timeline_png, write_chrome_trace

S = 1_000_000_000  # ns
WALL = 1_700_000_000 * S


class Clock:
    """Stands still until told; the wall clock is `wall` ns ahead."""

    def __init__(self, now: int = 0, wall: int = WALL) -> None:
        self.now, self.ahead = now, wall

    def __call__(self) -> int:
        return self.now

    def wall(self) -> int:
        return self.now + self.ahead


def recorder(folder, clock, rank=0, role="trainer", **kwargs):
    return Spans(folder / f"rank_{rank:05d}.jsonl", rank, role, clock, clock.wall, **kwargs)


def spend(spans, name, ns):
    with spans.span(name):
        spans.clock.now += ns


def lines(folder, rank=0):
    return [json.loads(line) for line in (folder / f"rank_{rank:05d}.jsonl").read_text().splitlines() if line]


@pytest.fixture
def clock():
    return Clock(now=77)


@pytest.fixture
def two_ranks(tmp_path):
    """Rank 0 trains 2 s and idles 1 s of 4 s, rank 3 starts 1 s later on a clock of another host."""
    for rank, role, clock in ((0, "trainer", Clock(5 * S)), (3, "inference", Clock(900 * S, WALL - 894 * S))):
        spans = recorder(tmp_path, clock, rank, role)
        with spans.span("step"):
            spend(spans, "forward", S)
            spend(spans, "backward", S)
        clock.now += S
        spend(spans, "publish", S)
        spans.add("copy", clock.now - 2 * S, clock.now - S, track="copier")
        spans.close()
    return tmp_path


def test_nested_spans_are_read_outer_first(tmp_path, clock):
    spans = recorder(tmp_path / "made", clock)
    with spans.span("outer"), spans.span("same times"), spans.span("inner"):
        clock.now += 10
    spend(spans, "next", 0)
    spans.close()
    (track,) = read(tmp_path / "made")
    assert (track.rank, track.role, track.name, track.full) == (0, "trainer", "main", False)
    start, end = WALL + 77, WALL + 87
    assert track.spans == [(n, start, end) for n in ("outer", "same times", "inner")] + [("next", end, end)]


def test_a_span_that_raises_is_recorded(tmp_path, clock):
    spans = recorder(tmp_path, clock)
    with pytest.raises(RuntimeError, match="boom"), spans.span("fails"):
        clock.now += 5
        raise RuntimeError("boom")
    spans.close()
    assert [span[0] for span in read(tmp_path)[0].spans] == ["fails"]


def test_threads_have_tracks_of_their_own_and_lose_nothing(tmp_path):
    spans = Spans(tmp_path / "rank.jsonl", 0, "trainer")

    def work():
        for i in range(1500):
            with spans.span("outer"), spans.span(f"inner {i % 3}"):
                pass

    threads = [threading.Thread(target=work, name=f"worker {i}") for i in range(4)]
    for thread in threads:
        thread.start()
    with spans.span("wait"):
        for thread in threads:
            thread.join()
    spans.close()
    tracks = read(tmp_path)
    assert [track.name for track in tracks] == ["main", *(f"worker {i}" for i in range(4))]
    assert [len(track.spans) for track in tracks] == [1, 3000, 3000, 3000, 3000]
    for track in tracks[1:]:
        assert [span[0] == "outer" for span in track.spans] == [True, False] * 1500


@pytest.mark.parametrize("cut", [1, 20, 40])
def test_a_torn_tail_costs_one_span_and_a_later_start_goes_on(tmp_path, clock, cut):
    spans = recorder(tmp_path, clock)
    for name in ("a", "b", "c"):
        spend(spans, name, S)
    spans.close()
    path = tmp_path / "rank_00000.jsonl"
    path.write_bytes(path.read_bytes()[: -1 - cut])
    assert [span[0] for span in read(tmp_path)[0].spans] == ["a", "b"]

    again = Clock(now=3, wall=WALL + 100 * S)  # the machine was restarted: the monotonic clock begins anew
    spans = recorder(tmp_path, again, role="inference")
    spend(spans, "d", S)
    spans.close()
    (track,) = read(tmp_path)
    assert [span[0] for span in track.spans] == ["a", "b", "d"]
    assert track.spans[-1][1] == WALL + 100 * S + 3


def test_a_header_cut_off_is_an_empty_file(tmp_path):
    (tmp_path / "rank_00000.jsonl").write_text('{"rank": 0, "ro')
    assert read(tmp_path) == [] and shares(tmp_path) == {}


def test_after_the_limit_nothing_is_recorded_and_the_last_line_says_so(tmp_path, clock):
    spans = recorder(tmp_path, clock, limit=3)
    for name in "abc":
        spend(spans, name, S)
    spans.flush()
    assert not read(tmp_path)[0].full  # nothing is missing yet
    for name in "de":
        spend(spans, name, S)
    spans.close()
    found = lines(tmp_path)
    assert found[-1] == {"full": 3} and [line["name"] for line in found[1:-1]] == ["a", "b", "c"]
    assert read(tmp_path)[0].full

    spans = recorder(tmp_path, clock, limit=3)
    spend(spans, "f", S)
    spans.close()
    assert not read(tmp_path)[0].full  # the limit is of each start


def test_spans_reach_the_file_at_flush_by_number_and_by_time(tmp_path, clock):
    spans = recorder(tmp_path, clock)
    assert lines(tmp_path)[0].keys() == {"rank", "role", "host", "wall_ns", "clock_ns"}
    spend(spans, "a", 1)
    assert len(lines(tmp_path)) == 1
    spans.flush()
    assert len(lines(tmp_path)) == 2
    for _ in range(timeline.FLUSH_SPANS):
        spend(spans, "b", 1)
    assert len(lines(tmp_path)) == 2 + timeline.FLUSH_SPANS
    spend(spans, "slow", timeline.FLUSH_NS)
    assert len(lines(tmp_path)) == 3 + timeline.FLUSH_SPANS
    spans.close()
    spans.close()
    spend(spans, "after the end", 1)
    assert len(lines(tmp_path)) == 3 + timeline.FLUSH_SPANS


def test_without_a_path_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spans = Spans(None, 0, "trainer", clock=lambda: pytest.fail("the clock was read"))
    with spans.span("a"), spans.span("b"):
        spans.add("c", 0, 1)
    spans.flush()
    spans.close()
    assert not list(tmp_path.iterdir())


def test_a_span_that_ends_before_its_start_is_an_error(tmp_path, clock):
    with pytest.raises(ValueError, match="'x' ends 2 ns before"):
        recorder(tmp_path, clock).add("x", 3, 1)


def test_ranks_with_other_clocks_are_aligned_on_wall_time(two_ranks):
    tracks = read(two_ranks)
    assert [(t.rank, t.role, t.name) for t in tracks] == [
        (rank, role, name) for rank, role in ((0, "trainer"), (3, "inference")) for name in ("main", "copier")
    ]
    assert tracks[2].spans[0][1] - tracks[0].spans[0][1] == S


def test_shares_count_outermost_spans_of_the_main_track(two_ranks):
    expected = {"step": 0.5, "publish": 0.25, "idle": 0.25}
    assert shares(two_ranks) == {0: expected, 3: expected}


def test_shares_of_overlapping_and_of_empty_spans(tmp_path, clock):
    spans = recorder(tmp_path, clock)
    spans.add("a", 0, 6)
    spans.add("b", 4, 10)
    spans.close()
    recorder(tmp_path, clock, rank=1).close()
    spans = recorder(tmp_path, clock, rank=2)
    spend(spans, "none", 0)
    spans.close()
    assert shares(tmp_path) == {0: {"a": 0.6, "b": 0.4, "idle": 0.0}, 2: {"idle": 1.0}}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", "idle"]), st.integers(0, 10**13), st.integers(0, 10**12)), min_size=1
    )
)
def test_shares_add_up_to_one(drawn):
    with tempfile.TemporaryDirectory() as folder:
        spans = recorder(Path(folder), Clock())
        for name, start, length in drawn:
            spans.add(name, start, start + length)
        spans.close()
        (found,) = shares(folder).values()
    assert abs(sum(found.values()) - 1) < 1e-9
    assert all(0 <= share <= 1 for share in found.values()) and "idle" in found


def test_the_trace_holds_every_span_and_names_every_rank(two_ranks):
    trace = json.loads(write_chrome_trace(two_ranks, two_ranks / "plots" / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    assert {(e["pid"], e["name"], e["ts"], e["dur"]) for e in spans} == {
        (pid, name, 1e6 * (start + late), 1e6 * dur)
        for pid, late in ((0, 0), (3, 1))
        for name, start, dur in (
            ("step", 0, 2),
            ("forward", 0, 1),
            ("backward", 1, 1),
            ("publish", 3, 1),
            ("copy", 2, 1),
        )
    }
    named = {
        what: {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == what}
        for what in ("process_name", "thread_name")
    }
    assert {(pid, name) for (pid, _), name in named["process_name"].items()} == {
        (0, "rank 0 trainer"),
        (3, "rank 3 inference"),
    }
    for event in spans:
        expected = "copier" if event["name"] == "copy" else "main"
        assert named["thread_name"][event["pid"], event["tid"]] == expected


def test_nothing_recorded_is_an_empty_trace_and_no_picture(tmp_path):
    trace = json.loads(write_chrome_trace(tmp_path / "absent", tmp_path / "trace.json").read_text())
    assert trace["traceEvents"] == []
    assert timeline_png(tmp_path / "absent", tmp_path / "timeline.png") is None
    assert not (tmp_path / "timeline.png").exists()


def pixels(path, name):
    """How many pixels of a picture have the colour of a phase."""
    return int((np.abs(imread(path)[..., :3] - np.array(colour(name))).max(-1) < 0.01).sum())


def test_the_picture_shows_the_phases_of_the_last_seconds(two_ranks):
    whole = timeline_png(two_ranks, two_ranks / "plots" / "whole.png")
    late = timeline_png(two_ranks, two_ranks / "late.png", last_s=1.0)
    assert whole.stat().st_size > 5000 and min(imread(whole).shape[:2]) > 200
    assert all(pixels(whole, name) > 3000 for name in ("step", "forward", "backward", "publish", "copy"))
    assert pixels(late, "publish") > 3000  # of rank 3; all else was before
    assert all(pixels(late, name) == 0 for name in ("step", "forward", "backward", "copy"))


def test_ticks_have_a_lane_of_their_own_beside_the_engine(tmp_path, clock):
    """As `main.py` hands them on from the clock's thread, while the main thread is in phases of its own."""
    spans = recorder(tmp_path, clock, role="inference")
    tick = partial(spans.add, "tick", track="clock")
    for phase in ("prefill", "engine step", "engine step"):
        started = clock.now
        spend(spans, phase, S)
        tick(started + S // 2, clock.now)
    spans.close()
    assert [(t.name, [span[0] for span in t.spans]) for t in read(tmp_path)] == [
        ("main", ["prefill", "engine step", "engine step"]),
        ("clock", ["tick"] * 3),
    ]
    assert shares(tmp_path) == {0: {"prefill": 1 / 3, "engine step": 2 / 3, "idle": 0.0}}
    picture = timeline_png(tmp_path, tmp_path / "timeline.png")
    assert all(pixels(picture, name) > 3000 for name in ("prefill", "engine step", "tick"))


def test_a_picture_of_instants_only_can_be_drawn(tmp_path, clock):
    spans = recorder(tmp_path, clock, limit=1)
    spend(spans, "x", 0)
    spend(spans, "x", 0)
    spans.close()
    assert timeline_png(tmp_path, tmp_path / "timeline.png").stat().st_size > 1000


def test_short_spans_look_as_busy_as_they_are(tmp_path, clock):
    spans = recorder(tmp_path, clock)
    for _ in range(40_000):
        spend(spans, "x", 400_000)
        clock.now += 100_000
    spans.close()
    picture = imread(timeline_png(tmp_path, tmp_path / "timeline.png"))[..., :3]
    expected = 0.8 * np.array(colour("x")) + 0.2
    assert int((np.abs(picture - expected).max(-1) < 0.05).sum()) > 10_000


def test_threads_that_are_gone_get_no_row(tmp_path, clock):
    spans = recorder(tmp_path, clock)
    for i in range(100):
        spans.add("request", i * S, (i + 1) * S, track=f"Thread-{i}")
    spans.close()
    assert imread(timeline_png(tmp_path, tmp_path / "few.png", last_s=2.5)).shape[0] < 500


def test_a_colour_depends_on_the_name_alone():
    assert np.allclose(colour("engine step"), [0.832, 0.213, 0.208], atol=1e-3)  # also in another process
    names = [f"phase {i}" for i in range(30)]
    assert len({colour(name) for name in names}) == len(names)
    assert all(0 <= channel <= 1 and min(colour(name)) < 0.9 for name in names for channel in colour(name))
