"""Benchmarks: `python tools/bench.py PART [--json FILE]`; `--help` lists the parts.

Each compares us with the raw limit or a peer in the same run and prints ratios; absolute times belong to the machine.
One part is one file in `bench_parts/`, with a `main(json_path)`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

PARTS = (
    "engine",
    "e2e",
    "trainer",
    "sft",
    "weights",
    "pack",
    "batch",
    "async",
    "clock",
    "journal",
    "soak",
    "soak_real",
    "start",
    "replay",
    "routes",
    "width",
    "envs",
    "pool",
    "sandbox",
    "verifiers",
)
FILES = {"async": "overlap"}  # a word of Python is no name for a module


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", metavar="FILE", help="write the figures here as well")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    name = FILES.get(arguments.part, arguments.part)
    importlib.import_module(f"tools.bench_parts.{name}").main(arguments.json)


if __name__ == "__main__":
    main()
