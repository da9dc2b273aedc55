"""TOML files of prime-rl as one table, with today's names, and how the user wrote each of its paths.

Files of one part (trainer, orchestrator, inference) are put under its name, an `sft.toml` is taken apart; files of the
same kind are layered left to right, as prime-rl does. The string "None" is its way to write that there is no value.

It refuses to know what keys mean. Invariant: `shown` gives back the words that stand in the user's file.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from spmd_rl.config.errors import ConfigError
from spmd_rl.config.load import merge, read_toml
from spmd_rl.config.prime_rl.earlier import renamed
from spmd_rl.config.prime_rl.keys import Place, leaves

Command = Literal["rl", "sft"]
PARTS = ("trainer", "orchestrator", "inference")
OF_THE_RUN = ("output_dir", "run", "clean", "dry_run", "slurm")  # an sft.toml has them where an rl.toml has them
OF_SFT = ("data", "val", "eval", "inference", "weight_broadcast", "renderer")
OF_SFT_DEPLOYMENT = ("num_gpus", "num_nodes", "num_eval_gpus", "num_eval_nodes")


@dataclass(frozen=True)
class Theirs:
    """What the files say: values by dotted path."""

    command: Command
    values: dict[str, Any]
    moved: dict[str, str] = field(default_factory=dict)  # new path → the old one, which the file has

    def shown(self, path: str) -> str:
        """A path as the file has it."""
        return _shown(path, self.command, self.moved)


def read_files(
    root: Place,
    files: Sequence[Path] = (),
    parts: dict[str, Sequence[Path]] | None = None,
    sft: Sequence[Path] = (),
) -> Theirs:
    """The files together. Raises ConfigError for files that can't be read, unknown keys and values of other types."""
    table: dict[str, Any] = {}
    for path in files:
        table = merge(table, read_toml(path))
    for part, paths in (parts or {}).items():
        for path in paths:
            table = merge(table, {part: read_toml(path)})
    for path in sft:
        table = merge(table, _of_sft(read_toml(path)))
    origin = ", ".join(map(str, _all(files, parts or {}, sft)))
    try:
        return read_table(root, table, "sft" if sft else "rl", origin)
    except ConfigError as error:
        hints = _other_forms(root, table) if files and not any((parts or {}).values()) else []
        raise ConfigError([*error.problems, *hints], origin) from None


def read_table(root: Place, table: dict[str, Any], command: Command = "rl", origin: str = "") -> Theirs:
    """The same for a table that is an `rl.toml`, or an `sft.toml` that was taken apart. Raises ConfigError."""
    table = _without_none(table)
    moved, problems = renamed(table)
    values, wrong = leaves(table, root, lambda path: _shown(path, command, moved))
    if problems or wrong:
        raise ConfigError([_of_an_sft_file(problem) for problem in problems + wrong], origin)
    return Theirs(command, values, moved)


def _other_forms(root: Place, table: dict[str, Any]) -> list[str]:
    """What else the file may be than an `rl.toml`."""
    forms = {part: {part: table} for part in PARTS} | {"sft": _of_sft(table)}
    fitting = []
    for name, form in forms.items():
        try:
            read_table(root, deepcopy(form))
            fitting.append(f"--{name} FILE")
        except ConfigError:
            continue
    return [f"these are keys of another kind of file: pass it as {' or '.join(fitting)}"] if fitting else []


def _of_sft(table: dict[str, Any]) -> dict[str, Any]:
    """An `sft.toml` in the places where an `rl.toml` has the same things; the rest under `sft`."""
    run: dict[str, Any] = {name: table[name] for name in OF_THE_RUN if name in table}
    own: dict[str, Any] = {name: table[name] for name in OF_SFT if name in table}
    deployment = table.get("deployment", {})
    if isinstance(deployment, dict):
        own["deployment"] = {name: value for name, value in deployment.items() if name in OF_SFT_DEPLOYMENT}
        run["deployment"] = {name: value for name, value in deployment.items() if name not in OF_SFT_DEPLOYMENT}
    else:
        run["deployment"] = deployment
    trainer = {name: value for name, value in table.items() if name not in {*run, *own, "deployment"}}
    return run | {"trainer": trainer, "sft": own}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return None if value == "None" else value


def _shown(path: str, command: Command, moved: dict[str, str]) -> str:
    for new in sorted(moved, key=len, reverse=True):
        if path == new or path.startswith(f"{new}."):
            path = moved[new] + path[len(new) :]
            break
    if command == "sft":
        path = path.removeprefix("sft.").removeprefix("trainer.")
    return path


def _of_an_sft_file(problem: str) -> str:
    """The names of an sft.toml, as people know them."""
    words = []
    for word in problem.split(" "):
        name = word.removeprefix("sft.")
        words.append(
            word if name == word else f"{name.rstrip('?,')} of an sft.toml (--sft FILE){word[len(word.rstrip('?,')) :]}"
        )
    return " ".join(words)


def _all(files: Sequence[Path], parts: dict[str, Sequence[Path]], sft: Sequence[Path]) -> list[Path]:
    return [*files, *(path for paths in parts.values() for path in paths), *sft]
