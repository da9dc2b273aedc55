"""Configs of other programs as ours.

    python tools/convert_config.py prime-rl rl.toml > ours.toml
    python tools/convert_config.py prime-rl base.toml more.toml --output ours.toml     # layers, left to right
    python tools/convert_config.py prime-rl --trainer t.toml --orchestrator o.toml --inference i.toml
    python tools/convert_config.py prime-rl --sft sft.toml
    python tools/convert_config.py prime-rl slurm.toml --overlay                       # only what the file says
    python tools/convert_config.py prime-rl --table                                    # every key, as Markdown

What is lost, differs or is to be set by hand goes to stderr, each with its key, why, and the way out. It ends with 2
when a key can't be converted, and with --strict with 1 when anything is lost; then nothing is written. The table of all
keys is in docs/migrating.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmd_rl.algorithms.check import check_algorithm
from spmd_rl.config import ConfigError
from spmd_rl.config.prime_rl import ROOT, Converted, convert, read_files
from spmd_rl.config.prime_rl.reference import tables
from spmd_rl.config.prime_rl.work import Kind
from spmd_rl.config.show import table_to_toml
from spmd_rl.world.mesh import Mesh, MeshError

TITLES: dict[Kind, str] = {
    "later": "not yet: the run does without",
    "never": "no counterpart: the run does without",
    "by hand": "to be set by hand",
    "differs": "converted, with another meaning",
}


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    given = parse(argv)
    if given.table:
        print(tables(), end="")
        return 0
    try:
        parts = {part: getattr(given, part) for part in ("trainer", "orchestrator", "inference")}
        converted = convert(read_files(ROOT, given.files, parts, given.sft))
        by_hand = open_ends(converted)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tell(converted, by_hand)
    if given.strict and (converted.losses or by_hand):
        print("error: --strict, and something is lost: nothing is written", file=sys.stderr)
        return 1
    origin = " ".join(map(str, [*given.files, *(path for paths in parts.values() for path in paths), *given.sft]))
    text = f"# From {origin}, by tools/convert_config.py.\n\n"
    text += table_to_toml(converted.overlay if given.overlay else converted.table)
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line. Exits with a usage text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=["prime-rl"], help="whose config it is")
    parser.add_argument("files", nargs="*", type=Path, help="rl.toml, and files over it")
    for part in ("trainer", "orchestrator", "inference", "sft"):
        parser.add_argument(f"--{part}", nargs="+", type=Path, default=[], metavar="TOML", help=f"config of its {part}")
    parser.add_argument("--output", "-o", type=Path, help="where to write; else to the standard output")
    parser.add_argument("--overlay", action="store_true", help="only what the files say, without prime-rl's defaults")
    parser.add_argument("--strict", action="store_true", help="end with 1 when anything is lost")
    parser.add_argument("--table", action="store_true", help="print what becomes of every key")
    given = parser.parse_args(argv)
    of_rl = given.files or given.trainer or given.orchestrator or given.inference
    if bool(of_rl) == bool(given.sft) and not given.table:
        parser.error("name an rl.toml, or the trainer's, orchestrator's and inference's files, or one --sft")
    return given


def open_ends(converted: Converted) -> list[str]:
    """What `main.py` would refuse yet, beyond the config's own checks."""
    found: list[str] = []
    try:
        if converted.command == "rl":
            check_algorithm(converted.config)
    except ConfigError as error:
        found += error.problems
    try:
        Mesh.of(converted.command, converted.config, 0)
    except MeshError as error:
        found.append(str(error))
    return found


def tell(converted: Converted, by_hand: list[str]) -> None:
    """All notes, on stderr."""
    for kind, title in TITLES.items():
        lines = [str(note) for note in converted.notes if note.kind == kind]
        lines += by_hand if kind == "by hand" else []
        if lines:
            print("\n".join([f"{title}:", *(f"  {line}" for line in lines)]), file=sys.stderr)
    needless = [note.key for note in converted.notes if note.kind == "needless"]
    if needless:
        print(f"not needed here: {', '.join(dict.fromkeys(needless))}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
