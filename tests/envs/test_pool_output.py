"""What workers print: every line with its name, and never more than a log can bear."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.envs.pool.output import BURST, LAST_WORDS, LINE_CHARS, PER_S, Output


class Printed:
    """An output with a clock that stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, []
        self.output = Output("w 0", self.log.append, lambda: self.now)

    def end(self) -> list[str]:
        asyncio.run(self.output.end())
        return self.log


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=9), max_size=9),
    st.integers(1, 30),
)
def test_lines_come_whole_however_they_are_cut(lines, size):
    printed = Printed()
    data = "".join(f"{line}\n" for line in lines).encode()
    for start in range(0, len(data), size):
        printed.output.data_received(data[start : start + size])
    assert printed.end() == [f"[w 0] {line}" for line in lines]


def test_a_last_line_without_an_end_comes_too():
    printed = Printed()
    printed.output.data_received(b"one\ntwo")
    assert printed.end() == ["[w 0] one", "[w 0] two"]


def test_bytes_that_are_no_text_and_bars_that_redraw_themselves():
    printed = Printed()
    printed.output.data_received(b"\xff\xfe!\n10%\r20%\r30%\nwindows\r\n")
    assert printed.end() == ["[w 0] \ufffd\ufffd!", "[w 0] 30%", "[w 0] windows"]


def test_long_lines_are_cut():
    printed = Printed()
    printed.output.data_received(b"x" * (LINE_CHARS + 5) + b"\n")
    for _ in range(300):
        printed.output.data_received(b"y" * 10_000)
    first, second = printed.end()
    assert first == f"[w 0] {'x' * LINE_CHARS} … (5 more characters)"
    assert second.startswith("[w 0] yyy") and len(second) < 2 * LINE_CHARS


def test_who_prints_for_ever_gets_a_share_and_the_log_says_what_is_missing():
    printed = Printed()
    for second in range(10):
        printed.now = float(second)
        printed.output.data_received(b"again\n" * 1000)
    log = printed.end()
    shown = [line for line in log if line.endswith("again")]
    assert len(shown) == BURST + 9 * PER_S
    missing = sum(
        int(word.strip("(")) for line in log for word in line.split() if word.strip("(").isdigit() and "(" in word
    )
    assert len(shown) + missing == 10_000
    assert len(printed.output.last) == LAST_WORDS


def test_after_a_while_there_is_room_again():
    printed = Printed()
    printed.output.data_received(b"a\n" * (BURST + 7))
    printed.now = 3600.0
    printed.output.data_received(b"b\n" * BURST)
    log = printed.end()
    assert log[BURST] == "[w 0] (7 lines left out)\n[w 0] b" and log[BURST + 1 :] == ["[w 0] b"] * (BURST - 1)
