"""What a person sees while a run goes on: a live table on a terminal, one aligned line per step elsewhere, or nothing.

It shows records as they are logged (see names.py) and refuses to know where they come from. Invariant: a record
with missing, null or unknown entries never fails the run; the table shows a gap.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TextIO

from spmd_rl.observe import names

if TYPE_CHECKING:
    from rich.console import RenderableType

Mode = Literal["auto", "live", "plain", "off"]

LIVE_STEPS = 8  # rows of the live table
WARMUP_LINES = 10  # plain lines for the whole warm-up
SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Column:
    """One number of a step: its title, its metric, how it is written."""

    title: str
    key: str
    write: Callable[[float], str]
    width: int


COLUMNS = (
    Column("reward", names.REWARD, lambda x: f"{x:.3f}", 6),
    Column("loss", names.LOSS, lambda x: f"{x:+z.4f}", 8),
    Column("entropy", names.ENTROPY, lambda x: f"{x:.3f}", 6),
    Column("lag", names.LAG, lambda x: f"{x:.2f}", 5),
    Column("mismatch", names.MISMATCH, lambda x: f"{x:.1e}", 8),
    Column("tok/s", names.TOKENS_PER_S, lambda x: f"{x:,.0f}", 7),
    Column("step s", names.STEP_S, lambda x: f"{x:.2f}", 6),
)


class Progress:
    """Shows the records of a run as they come."""

    def __init__(self, mode: Mode, total_steps: Mapping[str, int], screen: TextIO | None = None) -> None:
        """mode "auto": live on a terminal, plain elsewhere. total_steps: optimizer steps per phase ("warmup", "rl").

        screen: where to write; by default stdout. Where stdout is redirected into a log, pass the real screen.
        """
        self._screen = sys.stdout if screen is None else screen
        self._total = dict(total_steps)
        self._recent: deque[dict[str, Any]] = deque(maxlen=LIVE_STEPS)
        self._rewards: list[float] = []
        self._evals: list[dict[str, Any]] = []
        self.mode = _resolve(mode, self._screen)
        self._live = _start_live(self._screen) if self.mode == "live" else None

    def update(self, record: Mapping[str, Any]) -> None:
        """Show one record: a step of "warmup" or "rl", or an "eval"."""
        if self.mode == "off":
            return
        record = dict(record)
        if record.get("phase") == "eval":
            self._evals.append(record)
        else:
            if self._recent and self._recent[-1].get("phase") != record.get("phase"):
                self._recent.clear()
            self._recent.append(record)
            self._rewards += _summable([record], names.REWARD)
        if self._live:
            self._live.update(self._table())
        elif self._has_a_line(record):
            self.write(self._line(record) + "\n")

    def write(self, text: str) -> None:
        """Other output for the same screen: above the live table, or as it is. May hold terminal colours."""
        if self._live:
            from rich.text import Text

            self._live.console.print(Text.from_ansi(text.removesuffix("\n")), highlight=False)
        else:
            self._screen.write(text)
            self._screen.flush()

    def close(self) -> None:
        """Leave the last table on the screen and give the terminal back."""
        if self._live:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has_a_line(self, record: dict[str, Any]) -> bool:
        if record.get("phase") != "warmup":
            return True
        step, total = record.get("step", 0), self._total.get("warmup", 0)
        return step % max(1, total // WARMUP_LINES) == 0 or step in (1, total)

    def _line(self, record: dict[str, Any]) -> str:
        phase, step = record.get("phase", "?"), record.get("step", "?")
        if phase == "eval":
            return f"{phase:<7}{step:>4}      " + _eval_text(record)
        total = self._total.get(phase, 0)
        cells = [f"{c.title} {_cell(record, c):>{c.width}}" for c in COLUMNS if phase == "rl" or c.key in record]
        return f"{phase:<7}{step:>4}/{total:<4} " + "  ".join(cells) + f"  ETA {self._eta()}"

    def _eta(self) -> str:
        """Time to the end of this phase, from the median of the steps on show: the first one compiles and loads."""
        seconds = _summable(self._recent, names.STEP_S)
        if not seconds:
            return "–"
        last = self._recent[-1]
        left = max(0, self._total.get(last.get("phase", ""), 0) - int(last.get("step", 0)))
        return _duration(left * median(seconds))

    def _table(self) -> RenderableType:
        from rich import box
        from rich.table import Table

        last = self._recent[-1] if self._recent else self._evals[-1]
        phase = last.get("phase", "")
        table = Table(box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left", header_style="bold cyan")
        table.title = f"[bold]{phase}[/]  step {last.get('step', 0)}"
        if phase in self._total:
            table.title += f" of {self._total[phase]}  ETA {self._eta()}"
        table.add_column("step", justify="right", style="bold", min_width=5)
        for column in COLUMNS:
            table.add_column(column.title, justify="right", min_width=column.width)
        for record in self._recent:
            table.add_row(str(record.get("step", "")), *(_cell(record, column) for column in COLUMNS))
        caption = []
        if self._rewards:
            caption.append(f"reward [green]{_sparkline(self._rewards)}[/]")
        if self._evals:
            caption.append(f"eval at step {self._evals[-1].get('step', 0)}: {_eval_text(self._evals[-1])}")
        table.caption = "\n".join(caption)
        return table


def _resolve(mode: Mode, screen: TextIO) -> Mode:
    if mode != "auto":
        return mode
    return "live" if screen.isatty() and os.environ.get("TERM", "dumb") != "dumb" else "plain"


def _start_live(screen: TextIO) -> Any:
    from rich.console import Console
    from rich.live import Live

    # rich must not replace sys.stdout and sys.stderr: what goes there is in the log files (logs.py).
    live = Live(
        console=Console(file=screen, force_terminal=True),
        refresh_per_second=4,
        redirect_stdout=False,
        redirect_stderr=False,
        vertical_overflow="visible",
    )
    live.start()
    return live


def _number(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else None


def _summable(records: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """The values of a metric that sums and differences can be made of: no NaN, no infinity, nothing near overflow."""
    return [value for record in records if (value := _number(record, key)) is not None and abs(value) < 1e100]


def _cell(record: Mapping[str, Any], column: Column) -> str:
    value = _number(record, column.key)
    return "–" if value is None else column.write(value)


def _eval_text(record: Mapping[str, Any]) -> str:
    parts = (("greedy", names.EVAL_GREEDY), ("sampled", names.EVAL_SAMPLED), ("loss", names.EVAL_LOSS))
    return "  ".join(f"{title} {value:.3f}" for title, key in parts if (value := _number(record, key)) is not None)


def _duration(seconds: float) -> str:
    """Seconds as 0:07, 3:25 or 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _sparkline(values: list[float], width: int = 48) -> str:
    """All values in at most `width` characters, each the mean of an equal share, scaled from minimum to maximum."""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(SPARKS[round((mean - low) / span * (len(SPARKS) - 1))] for mean in means)
