"""A page to read rollouts in: one HTML file with everything in it, made of a run's readable rollouts.

The page needs no server and no network, and its policy forbids both: the only script that may run is the one that
stands here, by its hash, whatever the texts of a model look like. The page's own parts are in `viewer/`.

It refuses to know how runs are made. Invariants: the file has at most the bytes that were asked for; what did not fit
is counted and said; every step keeps its share.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmd_rl.observe import names
from spmd_rl.observe.disk import explain_full_disk
from spmd_rl.observe.metrics import FILE_NAME, read_metrics
from spmd_rl.observe.view_lines import Shown, ViewError, embeddable, read_file

PARTS = Path(__file__).parent / "viewer"
MODULES = ("dom", "state", "store", "chart", "list", "blocks", "legend", "head", "reader", "controls", "app")
SCRIPTS = (*MODULES, "start")  # what runs at once comes last
FOLDERS = {"train": "rollouts", "eval": "eval/rollouts"}
LATEST = 1 << 62  # a step after all others
RESERVE = 4000  # bytes for what is said about all episodes together


@dataclass
class Chosen:
    """What is on the page."""

    shown: list[Shown] = field(default_factory=list)
    left_out: int = 0  # episodes that did not fit
    size: int = 0  # bytes


def write_page(run: Path, out: Path, steps: tuple[int, int] = (0, LATEST), max_bytes: int = 50_000_000) -> Chosen:
    """Write the page of a run's output folder, and return what is on it.

    steps: the first and the last one. Raises ViewError when there is nothing to show, when a line is broken, or when
    not one episode fits; OSError when the disk is full.
    """
    files = _files(run, *steps)
    about = {"name": run.resolve().name, "curve": _curve(run)}
    frame = len(_page(about, [])) + RESERVE
    chosen = _choose(files, max_bytes - frame)
    if not chosen.shown and chosen.left_out:
        raise ViewError(
            f"not one of {chosen.left_out} episodes fits into {max_bytes / 1e6:g} MB, of which the page alone takes "
            f"{frame / 1e6:.2f}: raise --max-mb"
        )
    if not chosen.shown:
        raise ViewError(f"the files of rollouts in {run} are empty: log.rollouts_per_step = 0 writes none")
    said = {"leftOut": chosen.left_out, "maxMb": max_bytes / 1e6, "advantage": _scale(chosen.shown)}
    page = _page(about | said | {"facts": _columns(chosen.shown)}, [shown.body for shown in chosen.shown])
    with explain_full_disk(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        writing = out.with_name(f"{out.name}.part")
        writing.write_bytes(page)
        writing.replace(out)
    chosen.size = len(page)
    return chosen


def _files(run: Path, first: int, last: int) -> list[tuple[Path, str, int]]:
    """(path, kind, step) of every file of these steps."""
    if not run.is_dir():
        raise ViewError(f"there is no folder {run}: name the output folder of a run")
    files = [
        (path, kind, int(found[1]))
        for kind, folder in FOLDERS.items()
        for path in sorted((run / folder).glob("step_*.jsonl"))
        if (found := re.fullmatch(r"step_(\d+)", path.stem))
    ]
    if not files:
        raise ViewError(
            f"{run} has no rollouts/step_*.jsonl: is it the output folder of a run that finished a step? "
            "log.rollouts_per_step says how many episodes of a step a run writes down; 0 = none"
        )
    there = sorted({step for _, _, step in files})
    files = [file for file in files if first <= file[2] <= last]
    if not files:
        raise ViewError(f"{run} has no rollouts of these steps; it has {len(there)} from {there[0]} to {there[-1]}")
    return files


def _choose(files: list[tuple[Path, str, int]], budget: int) -> Chosen:
    """Episodes in the order of their files until the budget is spent; small files leave their share to large ones."""
    chosen = Chosen()
    by_size = sorted(files, key=lambda file: file[0].stat().st_size)
    for number, (path, kind, step) in enumerate(by_size):
        share = (budget - chosen.size) // (len(files) - number)
        for episode in read_file(path, kind, step):
            size = len(episode.body) + len(embeddable([*episode.facts.values()]))
            if size > share:
                chosen.left_out += 1
                continue
            share -= size
            chosen.size += size
            chosen.shown.append(episode)
    chosen.shown.sort(key=lambda shown: (shown.facts["step"], shown.facts["kind"] == "train", shown.facts["number"]))
    return chosen


def _columns(shown: list[Shown]) -> dict[str, list[Any]]:
    """One column per fact; texts as places in a table."""
    columns: dict[str, list[Any]] = {name: [s.facts[name] for s in shown] for name in shown[0].facts}
    for name, plural in (("kind", "kinds"), ("source", "sources"), ("status", "statuses")):
        places = {text: place for place, text in enumerate(sorted(set(columns[name])))}
        columns[name] = [places[text] for text in columns[name]]
        columns[plural] = list(places)
    return columns


def _scale(shown: list[Shown]) -> float:
    """The advantage that gets the full colour, from the 98th percentile on; 0: there is none."""
    sizes = sorted(s.advantage for s in shown if s.advantage)
    return sizes[int(0.98 * (len(sizes) - 1))] if sizes else 0.0


def _curve(run: Path) -> dict[str, list[list[float]]]:
    """[step, value] of the mean reward and of the evaluations, as metrics.jsonl has them."""
    wanted = {
        "train": ("rl", names.REWARD),
        "greedy": ("eval", names.EVAL_GREEDY),
        "sampled": ("eval", names.EVAL_SAMPLED),
    }
    curve: dict[str, list[list[float]]] = {name: [] for name in wanted}
    path = run / FILE_NAME
    if not path.exists():
        return curve
    try:
        for record in read_metrics(path):
            for name, (phase, key) in wanted.items():
                if record["phase"] == phase and record.get(key) is not None:
                    curve[name].append([record["step"], round(record[key], 6)])
    except (ValueError, LookupError, TypeError) as error:
        raise ViewError(f"{path} is broken ({error}): move it away to look at the rollouts alone") from error
    return curve


def _page(about: dict[str, Any], bodies: list[bytes]) -> bytes:
    style, page = _part("style.css"), _part("page.html")
    script = b"(() => {\n'use strict';\n" + b"\n".join(_part(f"{name}.js") for name in SCRIPTS) + b"})();\n"
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    parts = {
        "title": html.escape(about["name"]).encode("utf-8", "replace"),
        "policy": policy.encode(),
        "style": style,
        "script": script,
        "run": embeddable(about),
        "episodes": b"\n".join(bodies),
    }
    # In one pass: a text of the model may look like a place to fill.
    return re.sub(rb"\{\{(\w+)\}\}", lambda found: parts[found[1].decode()], page)


def _part(name: str) -> bytes:
    return (PARTS / name).read_bytes()


def _hash(content: bytes) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content).digest()).decode()
