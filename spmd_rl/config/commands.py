"""What each command of `main.py` makes of a command line: a config that was checked for it, and where it writes.

`eval`, `generate` and `serve` ask a model that a run has made, often by its config: they write beside its folder. So
does a bench, `rl --bench` or `sft --bench`: the trainer that a config describes, without anything around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spmd_rl.config.check import check
from spmd_rl.config.errors import ConfigError
from spmd_rl.config.load import COMMAND_LINE, load, split_argv
from spmd_rl.config.tree import Config

ASKING = ("eval", "generate", "serve")
BENCHES = ("rl --bench", "sft --bench")
BESIDE = "-bench"  # behind the output folder of the run that is measured
ALL_TRAIN = ("sft", *BENCHES)  # every rank trains


def command_of(argv: Sequence[str]) -> str:
    """The command that a command line begins with; the switch that makes a bench of it belongs to it.

    Raises ConfigError for a bench of what does not train.
    """
    command, arguments = argv[0], split_argv(argv[1:])
    if not arguments.bench:
        if any(word.startswith("--bench.json") for word in arguments.flags):
            raise ConfigError(["--json keeps the figures of a bench, and there is no --bench: add it"], COMMAND_LINE)
        return command
    if f"{command} --bench" not in BENCHES:
        raise ConfigError([f"--bench measures training, and {command} does none: main.py rl|sft --bench"], COMMAND_LINE)
    return f"{command} --bench"


def config_for(command: str, argv: Sequence[str]) -> Config:
    """The config of a command (`command_of`) with these words behind it. Raises ConfigError."""
    config = load(argv)
    if command in ASKING:
        given = any(word.startswith(("--output-dir", "--output_dir")) for word in argv)
        folder = config.output_dir if given else f"{config.output_dir}-{command}"
        # Nothing is trained, so there is nothing that ticks could be tied to.
        config = replace(config, output_dir=folder, clock=replace(config.clock, mode="free"))
    if command in BENCHES:
        # Even where a flag names the folder: --bench may stand behind a run's own command line.
        folder = f"{config.output_dir.removesuffix(BESIDE)}{BESIDE}"
        config = replace(config, output_dir=folder, ckpt=replace(config.ckpt, resume="", interval=0))
    if command == "rl --bench":
        # The map speaks of a world with engines.
        config = replace(config, deployment=replace(config.deployment, rank_map=()))
    check(config, command)
    return config
