"""What every rank did when: phases recorded as spans, and the pictures made of them.

Each rank appends to a file of its own, so recording needs no communication; the ranks meet only in the readers. This
module refuses to know what the phases are called or mean; only "idle", the time no span covers, is a name of its own.

Invariants: times in the file are of the rank's own clock, and the header says what wall time that clock had, so that
the ranks can be laid side by side (as exactly as the wall clocks of their hosts agree); a line cut off by a kill costs
that line and nothing else; a name has the same colour in every picture.
"""

from __future__ import annotations

import colorsys
import contextlib
import json
import socket
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.observe.disk import explain_full_disk
from spmd_rl.observe.plots import GRID, INK

MAIN, IDLE = "main", "idle"
FLUSH_SPANS, FLUSH_NS = 1000, 10_000_000_000  # the time is for slow phases, whose 1000 spans may take hours
LEGEND = 24  # names, those with the most time
COLUMNS = 1500  # of the picture, about its pixels
_NOTHING = contextlib.nullcontext()

Span = tuple[str, int, int]  # name, start and end in wall time (ns)


class Spans:
    """Records the phases of one rank into `path`; with None nothing, at nearly no cost."""

    def __init__(
        self,
        path: str | Path | None,
        rank: int,
        role: str,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
        limit: int = 200_000,
    ) -> None:
        """Open the file, making its folder if absent; the file of an earlier start is gone on with.

        The calling thread's track is "main". limit: spans of this start; later ones are not recorded, and the last
        line says so. Raises OSError when the disk is full, as do all that write.
        """
        self.clock = clock  # for those who measure themselves and call `add`
        self._limit, self._recorded, self._open = limit, 0, path is not None
        self._lock, self._main = threading.RLock(), threading.get_ident()
        self._waiting: list[dict[str, Any]] = []
        if path is None:
            return
        self._folder = Path(path).parent
        with explain_full_disk(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            # Unbuffered, beside a buffer of our own: a forked child that exits must not write our spans again.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        if self._file.tell():
            self._write(b"\n")  # ends what a killed start may have left of a line
        self._flushed_ns = clock()
        host = socket.gethostname()
        self._waiting = [{"rank": rank, "role": role, "host": host, "wall_ns": wall(), "clock_ns": clock()}]
        self.flush()

    def span(self, name: str) -> contextlib.AbstractContextManager[None]:
        """`with spans.span("engine step"):` records the block, also when it raises; spans may be nested.

        Other threads than the main one get a track by their thread's name.
        """
        return self._timed(name) if self._open else _NOTHING

    def add(self, name: str, start_ns: int, end_ns: int, track: str = MAIN) -> None:
        """Record a span measured elsewhere, in times of `clock`. Raises ValueError when it ends before its start."""
        if end_ns < start_ns:
            raise ValueError(f"span {name!r} ends {start_ns - end_ns} ns before its start")
        with self._lock:
            if not self._open:
                return
            if self._recorded == self._limit:
                self._waiting.append({"full": self._limit})
                self.close()
                return
            self._recorded += 1
            self._waiting.append({"name": name, "start_ns": int(start_ns), "end_ns": int(end_ns), "track": track})
            if len(self._waiting) >= FLUSH_SPANS or end_ns - self._flushed_ns >= FLUSH_NS:
                self._flushed_ns = int(end_ns)
                self.flush()

    def flush(self) -> None:
        """Hand all finished spans to the kernel."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            if waiting:
                self._write("".join(json.dumps(line) + "\n" for line in waiting).encode())

    def close(self) -> None:
        """Flush and close the file. Spans that end later, such as those of threads, are left out."""
        with self._lock:
            self.flush()
            if self._open:
                self._open = False
                self._file.close()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start_ns = self.clock()
        try:
            yield
        finally:
            track = MAIN if threading.get_ident() == self._main else threading.current_thread().name
            self.add(name, start_ns, self.clock(), track)

    def _write(self, left: bytes) -> None:
        with explain_full_disk(self._folder):
            while left:  # a nearly full disk may take a part
                left = left[self._file.write(left) :]


@dataclass
class Track:
    """The spans of one thread of a rank: by start, an outer span before those in it."""

    rank: int
    role: str
    host: str
    name: str
    spans: list[Span] = field(default_factory=list)
    full: bool = False  # recording stopped at the limit: what is missing at the end isn't idleness


def read(folder: str | Path) -> list[Track]:
    """The tracks of all ranks, by rank, the main one first; also of a run that is still writing or was killed."""
    tracks: dict[tuple[int, str], Track] = {}
    for path in sorted(Path(folder).glob("*.jsonl")):
        header: dict[str, Any] = {}
        for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                line = json.loads(text)
            except json.JSONDecodeError:  # empty, or cut off by a kill
                continue
            if "wall_ns" in line:  # each start has a header, and a clock, of its own
                header, offset = line, line["wall_ns"] - line["clock_ns"]
            elif "full" in line and header:
                for track in tracks.values():
                    track.full |= track.rank == header["rank"]
            elif header:
                who = [header["rank"], header["role"], header["host"], line["track"]]
                track = tracks.setdefault((header["rank"], line["track"]), Track(*who))
                track.full = False  # of an earlier start
                track.spans.append((line["name"], line["start_ns"] + offset, line["end_ns"] + offset))
    for track in tracks.values():
        # Reversed: of two spans with the same times, the outer one ended, and was written, last.
        track.spans = sorted(reversed(track.spans), key=lambda span: (span[1], -span[2]))
    return sorted(tracks.values(), key=lambda track: (track.rank, track.name != MAIN, track.name))


def shares(folder: str | Path) -> dict[int, dict[str, float]]:
    """Per rank, which part of its main track's time, from the first span to the last, each outermost phase took.

    They add up to 1 with "idle", the time in no span (also that between two starts of a run).
    """
    result = {}
    for track in read(folder):
        if track.name != MAIN:
            continue
        taken: dict[str, int] = defaultdict(int)
        reached = first = track.spans[0][1]
        for name, start_ns, end_ns in track.spans:
            taken[IDLE] += max(0, start_ns - reached)
            taken[name] += max(0, end_ns - max(start_ns, reached))  # 0 in an outer span
            reached = max(reached, end_ns)
        total = reached - first
        result[track.rank] = {n: ns / total for n, ns in taken.items() if ns or n == IDLE} if total else {IDLE: 1.0}
    return result


def write_chrome_trace(folder: str | Path, target: str | Path) -> Path:
    """All ranks as one trace for ui.perfetto.dev or chrome://tracing: a process per rank, a thread per track."""
    tracks = read(folder)
    first_ns = min((track.spans[0][1] for track in tracks), default=0)
    events: list[dict[str, Any]] = []
    for tid, track in enumerate(tracks):  # by rank, main first: the viewers keep the order of the numbers
        ids = {"pid": track.rank, "tid": tid}
        process = {"name": f"rank {track.rank} {track.role}"}
        events.append({"ph": "M", "name": "process_name", **ids, "args": process})
        events.append({"ph": "M", "name": "thread_name", **ids, "args": {"name": track.name}})
        for name, start_ns, end_ns in track.spans:
            times = {"ts": (start_ns - first_ns) / 1000, "dur": (end_ns - start_ns) / 1000}
            events.append({"ph": "X", "name": name, **ids, **times})
    target = Path(target)
    with explain_full_disk(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return target


def draw(folder: str | Path) -> None:
    """Both views of what was recorded in `folder`: trace.json in it, and the picture beside it, FOLDER.png."""
    write_chrome_trace(folder, Path(folder) / "trace.json")
    timeline_png(folder, Path(folder).with_suffix(".png"))


def timeline_png(folder: str | Path, target: str | Path, last_s: float = 30.0) -> Path | None:
    """Draw the last seconds, a row per track, and return the PNG's path; None when nothing was recorded.

    White is idle; a nested span is a thinner bar on its outer one. What is shorter than a pixel takes its part of the
    pixel's colour, so that many short spans with short gaps look as busy as they are.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tracks = read(folder)
    if not tracks:
        return None
    first_ns = min(track.spans[0][1] for track in tracks)
    end = max(end_ns - first_ns for track in tracks for _, _, end_ns in track.spans) / 1e9
    begin = max(0.0, end - last_s)
    # Threads come and go; only those of the last seconds get a row.
    tracks = [t for t in tracks if t.name == MAIN or max(span[2] for span in t.spans) - first_ns > begin * 1e9]
    figure = Figure(figsize=(12, min(1.8 + 0.3 * len(tracks), 60)), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    seconds: dict[str, float] = defaultdict(float)
    edges = np.linspace(begin, max(end, begin + 1e-6), COLUMNS + 1)
    for row, track in enumerate(tracks):
        bars: dict[int, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
        for depth, (name, *times) in _with_depth(track.spans):
            left, right = (max(begin, (ns - first_ns) / 1e9) for ns in times)
            if right > left:
                bars[depth][name].append([left, right])
                seconds[name] += right - left
        for depth, of_name in bars.items():
            height = 0.8 * 0.6**depth
            extent = (edges[0], edges[-1], row + height / 2, row - height / 2)
            axes.imshow(_strip(of_name, edges)[None], extent=extent, aspect="auto", zorder=2 + depth)
    labels = [f"rank {t.rank} {t.role}" + f" · {t.name}" * (t.name != MAIN) + " (full)" * t.full for t in tracks]
    axes.set_yticks(range(len(tracks)), labels)
    axes.set_ylim(len(tracks) - 0.5, -0.5)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel("seconds since the first span", color=INK)
    axes.grid(True, axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.spines[:].set_visible(False)
    if seconds:
        most = sorted(seconds, key=lambda name: (-seconds[name], name))[:LEGEND]
        patches = [Patch(color=colour(name), label=name) for name in most]
        figure.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False, labelcolor=INK, fontsize=9)
    target = Path(target)
    with explain_full_disk(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target)
    return target


def colour(name: str) -> tuple[float, float, float]:
    """RGB of a phase, of its name alone. crc32, because Python's own hash differs between processes."""
    bits = zlib.crc32(name.encode())
    lightness = (0.38, 0.52, 0.68)[bits % 3]  # three shades, as neighbouring hues alone are hard to tell apart
    return colorsys.hls_to_rgb((bits >> 8 & 0xFFFF) / 0x10000, lightness, 0.65)


def _strip(bars: dict[str, list[list[float]]], edges: np.ndarray) -> np.ndarray:
    """RGBA of each column between two edges: the mean colour of the bars (start, end) there, opaque where no gap is."""

    def since(times: list[float]) -> np.ndarray:  # at each edge, the seconds since each of the times, summed
        ordered = np.sort(times)
        passed = np.searchsorted(ordered, edges)
        return passed * edges - np.concatenate([[0.0], np.cumsum(ordered)])[passed]

    parts = {n: np.diff(since([b[0] for b in of]) - since([b[1] for b in of])).clip(0) for n, of in bars.items()}
    busy = sum(parts.values(), np.zeros(len(edges) - 1))
    mixed = sum((part[:, None] * np.array(colour(name)) for name, part in parts.items()), np.zeros((len(busy), 3)))
    rgb = mixed / np.maximum(busy, 1e-12)[:, None]
    return np.concatenate([rgb, busy[:, None] / np.diff(edges)[:, None]], axis=1).clip(0, 1)


def _with_depth(spans: list[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with the number of spans it lies in."""
    open_until: list[int] = []
    for span in spans:
        while open_until and open_until[-1] < span[2]:
            open_until.pop()
        yield len(open_until), span
        open_until.append(span[2])
