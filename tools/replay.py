"""Take a recorded run again, and say where it first goes another way.

    python tools/replay.py RUN                  run it again in lockstep, from its first step, into RUN-replay
    python tools/replay.py RUN --train-only     train on its journaled batches alone: no engines, any run
    python tools/replay.py RUN --against OTHER  compare two runs that are there already

RUN is an output folder with a journal. A run in lockstep comes out byte for byte, or the first record that differs is
shown. `--train-only` compares what every optimizer step reported; on as many trainer ranks it must be equal, on
another number nearly so. Ends with 0 when nothing differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmd_rl.config import load
from spmd_rl.config.tree import Config
from spmd_rl.observe.metrics import read_metrics
from spmd_rl.observe.names import is_time
from spmd_rl.orchestrator.past import JOURNAL
from spmd_rl.orchestrator.records import AnyRecord, Began, Steered
from spmd_rl.world.journal import JournalError, read

ROOT = Path(__file__).resolve().parent.parent
BEFORE = 3  # records shown before the first one that differs


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--against", type=Path, metavar="OTHER")
    parser.add_argument("--trainers", type=int, default=0, help="trainer ranks of --train-only; 0 = as many as then")
    given = parser.parse_args()
    try:
        began = first_record(given.run)
        if given.against:
            return compare(given.run, given.against)
        if given.train_only:
            return train_again(given.run, given.trainers or began.layout[0])
        return run_again(given.run, began)
    except (OSError, JournalError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def first_record(run: Path) -> Began:
    """How the run began."""
    records = read(run / JOURNAL, AnyRecord)
    _, began = next(records, (0, None))
    if not isinstance(began, Began):
        raise JournalError(f"{run / JOURNAL} does not say how the run began")
    return began


def run_again(run: Path, began: Began) -> int:
    """Everything again: sampling and training."""
    config = load(["--config", str(run / "config.toml")])
    if config.clock.mode != "lockstep":
        raise ValueError(
            f"{run} ran freely (clock.mode = free): what its engines did depended on time, and can't be taken again. "
            "--train-only takes its training again"
        )
    output = Path(f"{run}-replay")
    _repeat_commands(run, output)
    trainers, replicas, frozen = began.layout
    ranks = ["--deployment.train-ranks", str(trainers), "--deployment.infer-ranks", str(replicas * config.inference.tp)]
    count = 1 + trainers + (replicas + frozen) * config.inference.tp
    args = ["rl", "--config", str(run / "config.toml"), "--output-dir", str(output), "--ckpt.resume", "", *ranks]
    code = _torchrun(count, ROOT / "spmd_rl/main.py", *args)
    return code or compare(run, output)


def _repeat_commands(run: Path, output: Path) -> None:
    """Lay out what the run was told, each for its step."""
    folder = output / "steer"
    commands = [record for _, record in read(run / JOURNAL, AnyRecord) if isinstance(record, Steered)]
    if commands and output.exists():
        raise ValueError(f"{output} is there already: move it away first")
    for number, record in enumerate(commands):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:06d}.txt").write_text(f"@{record.step} {record.command}")


def train_again(run: Path, trainers: int) -> int:
    """Training alone, on the batches of the journal."""
    return _torchrun(trainers, ROOT / "tools/replay_ranks.py", str(run))


def _torchrun(ranks: int, program: Path, *args: str) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*torchrun, str(program), *args], check=False).returncode


def compare(run: Path, other: Path) -> int:
    """Journals record by record, metrics without times; 1 at the first difference."""
    before: list[Any] = []
    one, two = (read(folder / JOURNAL, AnyRecord) for folder in (run, other))
    number = 0
    while True:
        (_, was), (_, now) = next(one, (0, None)), next(two, (0, None))
        if was is None and now is None:
            break
        if _plain(was) != _plain(now):
            print(f"record {number} differs; before it, in both:")
            for record in before:
                print(f"    {_short(record)}")
            print(f"{run}:\n    {_short(was)}\n{other}:\n    {_short(now)}")
            return 1
        before, number = [*before, was][-BEFORE:], number + 1
    for was, now in zip(*(read_metrics(folder / "metrics.jsonl") for folder in (run, other)), strict=False):
        names = [n for n in was | now if not is_time(n) and was.get(n) != now.get(n)]
        if names:
            print(f"the journals are equal; metrics differ first at {was['phase']} step {was['step']}: {names[:5]}")
            return 1
    print(f"equal: {number} records, and the metrics")
    return 0


def _plain(record: Any) -> str:
    from spmd_rl.world.wire import encode

    return encode(record).hex()


def _short(record: Any) -> str:
    text = "the end" if record is None else repr(record).replace("\n", " ")
    return text if len(text) < 300 else f"{text[:300]}…"


def settings(run: Path) -> Config:
    """What the run ran with."""
    return load(["--config", str(run / "config.toml")])


if __name__ == "__main__":
    sys.exit(main())
