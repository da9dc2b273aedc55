"""Progress: a line per step off a terminal, a table on one, and no record can break it."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.observe import names
from spmd_rl.observe.progress import COLUMNS, Progress

TOTAL = {"warmup": 150, "rl": 80}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rl(step: int, **changes) -> dict:
    numbers = {column.key: 0.5 for column in COLUMNS} | {names.STEP_S: 2.0, names.TOKENS_PER_S: 12345.0}
    return {"phase": "rl", "step": step} | numbers | changes


def shown(mode: str, records, screen=None) -> str:
    screen = screen or io.StringIO()
    with Progress(mode, TOTAL, screen) as progress:
        for record in records:
            progress.update(record)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


def test_plain_lines_are_aligned_and_say_what_is_left():
    out = shown("plain", [rl(1), rl(50, **{"loss": -0.25, names.TOKENS_PER_S: 3.0})]).splitlines()
    assert len(out) == 2
    for title in (column.title for column in COLUMNS):
        assert out[0].index(title) == out[1].index(title)
    assert "50/80" in out[1] and "-0.2500" in out[1] and "12,345" in out[0]
    assert out[0].endswith("ETA 2:38") and out[1].endswith("ETA 1:00")  # 2 s a step


def test_one_slow_step_does_not_spoil_the_estimate():
    steps = [rl(1, **{names.STEP_S: 60.0}), rl(2, **{names.STEP_S: 1.0}), rl(3, **{names.STEP_S: 1.0})]
    assert shown("plain", steps).splitlines()[-1].endswith("ETA 1:17")


def test_warmup_shows_about_ten_lines_with_the_first_and_the_last():
    steps = [{"phase": "warmup", "step": step, names.LOSS: 1.0} for step in range(1, 151)]
    out = shown("plain", steps).splitlines()
    assert 10 <= len(out) <= 12
    assert "1/150" in out[0] and "150/150" in out[-1]


def test_evaluations_are_always_shown():
    out = shown("plain", [{"phase": "eval", "step": 0, names.EVAL_GREEDY: 0.125, names.EVAL_SAMPLED: 0.25}])
    assert out.split() == ["eval", "0", "greedy", "0.125", "sampled", "0.250"]


def test_live_table_keeps_the_last_steps_and_ends_with_the_newest():
    out = shown("auto", [rl(step) for step in range(1, 21)], Terminal())
    last = out[out.rindex("step 20 of 80") :]
    rows = [line.split()[0] for line in last.splitlines() if line.split()[1:2] == ["0.500"]]
    assert rows == [str(step) for step in range(13, 21)]
    assert "ETA 2:00" in last


def test_auto_is_plain_off_a_terminal_and_on_a_dumb_one(monkeypatch):
    assert Progress("auto", TOTAL, io.StringIO()).mode == "plain"
    monkeypatch.setenv("TERM", "dumb")
    assert Progress("auto", TOTAL, Terminal()).mode == "plain"


def test_off_shows_nothing():
    assert shown("off", [rl(1)]) == ""


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_other_output_is_shown_as_it_is(mode):
    screen = Terminal()
    with Progress(mode, TOTAL, screen) as progress:
        progress.update(rl(1))
        progress.write("a [bold]warning[/] with [/odd] brackets\n")
    assert "a [bold]warning[/] with [/odd] brackets" in screen.getvalue()


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(
        st.fixed_dictionaries(
            {"phase": st.sampled_from(["warmup", "rl", "eval"]), "step": st.integers(0, 200)},
            optional={c.key: st.none() | st.floats() for c in COLUMNS} | {names.EVAL_GREEDY: st.floats()},
        ),
        max_size=6,
    )
)
@pytest.mark.parametrize("mode", ["plain", "live"])
def test_no_record_breaks_it(mode, records):
    shown(mode, records, Terminal())
