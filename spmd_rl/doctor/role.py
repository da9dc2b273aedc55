"""`main.py doctor`: what this command is asked, and which doctor answers.

    python spmd_rl/main.py doctor [--for rl] [--config FILE …] [--KEY VALUE …] [--json FILE]
    torchrun --nproc-per-node N spmd_rl/main.py doctor …

Alone it looks at this machine and starts no ranks; as a rank of torchrun it looks at every host and the links between
all ranks. Exit code: 0 nothing failed, 1 something did, 2 it was asked wrongly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from spmd_rl.doctor import machine
from spmd_rl.doctor.finding import run_checks
from spmd_rl.doctor.place import here
from spmd_rl.doctor.report import Report
from spmd_rl.doctor.wishes import read

COMMANDS = ("rl", "sft", "eval", "generate", "serve")
USAGE = """main.py doctor: is this machine, or under torchrun this cluster, fit?

  --for rl|sft|eval|generate|serve   what it shall be fit for (rl)
  --config FILE.toml, --KEY VALUE    the run that it shall be fit for; under torchrun its mesh and groups are tried
  --json FILE                        the report for machines

Exit code 0: nothing failed; 1: a line says FAIL, and what to do."""


@dataclass(frozen=True)
class Question:
    """The command line."""

    command: str = "rl"
    json: str = ""
    words: tuple[str, ...] = ()  # of the config


def parse(argv: Sequence[str]) -> Question:
    """Split the doctor's own words off. Raises ValueError."""
    own, words, rest = {"--for": "rl", "--json": ""}, [], list(argv)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in own:
            words.append(name + equals + value)
            continue
        if not equals:
            value = rest.pop(0) if rest else ""
        if not value or value.startswith("--"):
            raise ValueError(f"{name} needs a value after it")
        own[name] = value
    if own["--for"] not in COMMANDS:
        raise ValueError(f"--for {own['--for']}: choose one of {', '.join(COMMANDS)}")
    return Question(own["--for"], own["--json"], tuple(words))


def main(argv: Sequence[str]) -> int:
    """The exit code; a rank ends in here."""
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    try:
        question = parse(argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if "RANK" in os.environ:
        from spmd_rl.doctor.cluster import run_rank

        run_rank(question.command, question.words, question.json)
    return publish(one_machine(question), question.json)


def one_machine(question: Question) -> Report:
    """No ranks: the checks of this machine."""
    asked = read(question.command, question.words, 0)
    lines = run_checks(machine.CHECKS, here(1, 1, asked.wishes))
    return Report([*asked.lines, *lines])


def publish(report: Report, path: str) -> int:
    """On the screen and into the file; the exit code."""
    print(report.render(), flush=True)
    if path:
        try:
            report.write(path)
        except OSError as error:
            print(f"error: --json {path}: {error.strerror}: name a file that can be written", file=sys.stderr)
            return 1
    return report.exit_code
