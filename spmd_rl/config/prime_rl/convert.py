"""Their table to ours, row by row and rule by rule; then through our own loader and checks.

It refuses to know about files and printing. Invariant: what `convert` returns loads and passes `check`; whatever of
theirs is not in it is named by a note.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmd_rl.config.check import check
from spmd_rl.config.errors import ConfigError
from spmd_rl.config.prime_rl import rules_algorithm, rules_job, rules_run, rules_tasks
from spmd_rl.config.prime_rl.keys import MISSING, Key, Place, places
from spmd_rl.config.prime_rl.read import Command, Theirs
from spmd_rl.config.prime_rl.table_inference import INFERENCE
from spmd_rl.config.prime_rl.table_orchestrator import ORCHESTRATOR
from spmd_rl.config.prime_rl.table_run import RUN
from spmd_rl.config.prime_rl.table_sft import SFT
from spmd_rl.config.prime_rl.table_trainer import TRAINER
from spmd_rl.config.prime_rl.work import LOSSES, Note, Work
from spmd_rl.config.schema import build, known_kinds
from spmd_rl.config.tree import Config

ROWS: tuple[Key, ...] = (*RUN, *TRAINER, *ORCHESTRATOR, *INFERENCE, *SFT)
ROOT: Place = places(ROWS)
OURS = frozenset(known_kinds())
FREE = "inference.vllm."
RULES: dict[Command, tuple[Callable[[Work], None], ...]] = {
    "rl": (
        rules_run.folder,
        rules_run.model,
        rules_run.lengths,
        rules_run.batches,
        rules_run.ranks,
        rules_run.records,
        rules_run.engine,
        rules_algorithm.algorithm,
        rules_algorithm.loss,
        rules_algorithm.optimizer,
        rules_tasks.sampling,
        rules_tasks.sources,
        rules_tasks.evaluation,
        rules_job.job,
    ),
    "sft": (
        rules_run.folder,
        rules_run.model,
        rules_tasks.rows,
        rules_tasks.steps,
        rules_run.records,
        rules_algorithm.optimizer,
        rules_job.processes,
    ),
}


@dataclass(frozen=True)
class Converted:
    """A config of ours, and what there is to tell.

    `table` holds what prime-rl would do, its defaults included; `overlay` only what the files say.
    """

    command: Command
    config: Config
    table: dict[str, Any]
    overlay: dict[str, Any]
    notes: tuple[Note, ...]

    @property
    def losses(self) -> tuple[Note, ...]:
        """The notes that say that something is missing or to be set by hand."""
        return tuple(note for note in self.notes if note.kind in LOSSES)


def convert(theirs: Theirs) -> Converted:
    """The whole conversion. Raises ConfigError that names every key of theirs that can't be."""
    w = Work(theirs)
    for row in ROWS:
        if row.fate == "converted" and not row.ruled:
            _write(w, row)
    for path, value in theirs.values.items():
        row = row_of(path)
        if row.fate != "converted" and row.loses(value):
            planned = f" (planned: {row.ours})" if row.ours else ""
            w.note(row.fate, path, row.why + planned, row.instead)
    for rule in RULES[theirs.command]:
        rule(w)
    written = {ours: value for ours, value in w.written.items() if ours.startswith(FREE) or ours in OURS}
    for ours in w.written.keys() - written.keys():
        for path in w.because[ours]:
            w.note("later", path, f"there is no {ours} yet", "leave it out")
    if w.problems:
        raise ConfigError(w.problems, "prime-rl")
    table = _nested(written, w.sources)
    try:
        config = build(table, "what was converted")
        check(config, theirs.command)
    except ConfigError as error:
        raise ConfigError([_named(w, problem) for problem in error.problems], "what was converted") from None
    overlay = _nested({ours: value for ours, value in written.items() if w.because[ours]}, w.sources)
    return Converted(theirs.command, config, table, overlay, tuple(dict.fromkeys(w.notes)))


def row_of(path: str) -> Key:
    """The row of a path that `leaves` found."""
    place: Place | None = ROOT
    for name in path.split("."):
        place = place.at(name) if place else None
    assert place is not None and place.row is not None, path
    return place.row


def _write(w: Work, row: Key) -> None:
    value = w.theirs.values.get(row.path, row.default)
    if value is MISSING or (value is None and row.read is None):
        return
    if w.theirs.command == "sft" and not w.given(row.path) and row.path.startswith("inference"):
        return
    w.put(row.ours, row.read(value) if row.read else value, row.path)


def _nested(written: dict[str, Any], sources: list[dict[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for ours, value in written.items():
        free = ours.startswith(FREE)  # a name of vLLM's is one word
        *parents, leaf = ("inference", "vllm", ours.removeprefix(FREE)) if free else ours.split(".")
        node = table
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    if sources:
        table.setdefault("orchestrator", {})["source"] = sources
    return table


def _named(w: Work, problem: str) -> str:
    """A problem of our check, with the keys of theirs that it comes from."""
    keys = [path for ours, paths in w.because.items() if ours in problem for path in paths]
    keys += [f"orchestrator.train.source.{i}" for i in re.findall(r"orchestrator\.source\.(\d+)", problem) if w.sources]
    return problem + (f" (from {', '.join(dict.fromkeys(w.shown(path) for path in keys))})" if keys else "")
