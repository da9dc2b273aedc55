"""What each command of `main.py` makes of a command line: a config that was checked for it, and where it writes.

`eval`, `generate` and `serve` ask a model that a run has made, often by its config: they write beside its folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spmd_rl.config.check import check
from spmd_rl.config.load import load
from spmd_rl.config.tree import Config

ASKING = ("eval", "generate", "serve")


def config_for(command: str, argv: Sequence[str]) -> Config:
    """The config of `main.py COMMAND ARGV`. Raises ConfigError."""
    config = load(argv)
    if command in ASKING:
        given = any(word.startswith(("--output-dir", "--output_dir")) for word in argv)
        folder = config.output_dir if given else f"{config.output_dir}-{command}"
        # Nothing is trained, so there is nothing that ticks could be tied to.
        config = replace(config, output_dir=folder, clock=replace(config.clock, mode="free"))
    check(config, command)
    return config
