"""The past of a run that is taken up again: its newest complete checkpoint, and the journal behind it.

In lockstep the checkpoint is everything: what came after it is cut off, and happens again. In free mode nothing that
happened is undone: batches that were taken after the checkpoint are trained on again, from the journal, until every
version that existed exists again; then the run goes on.

It refuses to know how state is put back (`loop.py`). Invariant: whatever is wrong is found, and said, before anything
is written or cut off.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spmd_rl.config.tree import Config
from spmd_rl.observe.disk import explain_full_disk
from spmd_rl.observe.metrics import truncate_metrics
from spmd_rl.orchestrator.records import AnyRecord, Record
from spmd_rl.world.checkpoints import SNAPSHOT, CheckpointError, find, read_state
from spmd_rl.world.journal import Journal, read
from spmd_rl.world.wire import decode

JOURNAL = "journal.bin"

# What the records of a run mean depends on these; everything else may be changed from one start to the next.
COMMON = (
    "model.name",
    "model.tokenizer",
    "seed",
    "seq_len",
    "clock.mode",
    "orchestrator.batch_size",
    "orchestrator.batch_unit",
    "orchestrator.max_batch_groups",
    "orchestrator.group_size",
    "orchestrator.max_lag",
    "orchestrator.order",
    "orchestrator.window_fraction",
    "orchestrator.sampling",
    "orchestrator.source",
    "orchestrator.algorithm",
    "orchestrator.shuffle_rewards",
)


@dataclass(frozen=True)
class Past:
    """What a run goes on from."""

    folder: str
    step: int
    snapshot: dict[str, Any]
    records: list[Record] = field(default_factory=list)  # behind the checkpoint, which are followed


def common(config: Config) -> dict[str, Any]:
    """What a resumed run must have in common with the run that wrote the checkpoint."""
    table = asdict(config)
    found: dict[str, Any] = {}
    for path in COMMON:
        value: Any = table
        for key in path.split("."):
            value = value[key]
        found[path] = value
    plain: dict[str, Any] = json.loads(json.dumps(found))  # tuples as lists, as they come back
    return plain


def find_past(config: Config, resume: str) -> Past:
    """What `resume` ("latest" or a folder) names. CheckpointError or JournalError when the run can't go on there."""
    folder = find(resume, config.output_dir).resolve()
    home = Path(config.output_dir).resolve()
    if folder.parent.parent != home:
        raise CheckpointError(
            f"{folder} is not in output_dir = {home}: a run goes on where its journal is. Set output_dir to "
            f"{folder.parent.parent}, or begin a new run from the checkpoint's weights (model.name = an export)"
        )
    state = read_state(folder)
    if state["command"] != "rl":
        raise CheckpointError(f"{folder} was written by main.py {state['command']}, and this is rl")
    _check_common(folder, state["run"], common(config))
    if state["step"] >= config.max_steps:
        raise CheckpointError(
            f"{folder} stands at step {state['step']}, and max_steps = {config.max_steps}: nothing is left; raise it"
        )
    snapshot = decode((folder / SNAPSHOT).read_bytes())
    lockstep = config.clock.mode == "lockstep"
    # Read to the end even where it is cut off afterwards: damage is found before anything is changed.
    records = [record for _, record in read(home / JOURNAL, AnyRecord, snapshot["journal"][0])]
    return Past(str(folder), state["step"], snapshot, [] if lockstep else records)


def open_journal(config: Config, past: Past | None) -> Journal:
    """The run's journal, to be written on behind what stays of it; metrics that will be written again are taken out."""
    path = Path(config.output_dir) / JOURNAL
    if past is None:
        path.unlink(missing_ok=True)
        return Journal(path, writing=explain_full_disk)
    truncate_metrics(config.output_dir, past.step, phases=("rl", "eval"))
    offset, number = past.snapshot["journal"]
    journal = Journal(
        path,
        keep=offset if config.clock.mode == "lockstep" else None,
        known=(offset, number),
        writing=explain_full_disk,
    )
    if journal.torn:
        print(
            f"{path}: the last record, at byte {journal.offset}, did not check out and was cut off. A machine that "
            f"died may leave this, and so may a damaged disk; a copy is in {journal.torn}"
        )
    return journal


def _check_common(folder: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [f"{key}: {_difference(was.get(key), value)}" for key, value in now.items() if was.get(key) != value]
    if changed:
        raise CheckpointError(
            f"{folder} belongs to another run. Changed since: {'; '.join(changed)}. Set these back, or begin a new run "
            "from its weights (model.name = an export) without ckpt.resume"
        )


def _difference(was: Any, now: Any) -> str:
    if isinstance(was, dict) and isinstance(now, dict):
        parts = [f"{key}: {_difference(was.get(key), value)}" for key, value in now.items() if was.get(key) != value]
        return ", ".join(parts)
    return f"{was!r} then, {now!r} now"
