"""From the command line to a `Config`: TOML files layered left to right, then flags on top.

    --config base.toml --config small.toml --trainer.optim.lr 1e-4
    @ base.toml @ small.toml --orchestrator.batch-size 32

Tables merge key by key, lists are replaced as a whole, the later one wins. tyro reads the flags of declared keys and
writes the help; the free tables (`inference.vllm`, `args`, `reward_args` and `weights` of sources) have no declared
keys, so their flags are read here. Refuses to know what keys mean and whether they fit together: that is `check.py`.

Invariant: whatever is wrong with the input ends in a ConfigError, never in a usage text and an exit.
"""

from __future__ import annotations

import contextlib
import io
import re
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, get_origin

import tyro

from spmd_rl.config.errors import ConfigError
from spmd_rl.config.schema import build, did_you_mean, holds_tables, known_kinds
from spmd_rl.config.tree import Config

COMMAND_LINE = "command line"
FREE_OF_SOURCES = ("args", "reward_args", "weights")
HELP = """One run, described by TOML files layered left to right (`--config a.toml --config b.toml`, or \
`@ a.toml @ b.toml`) and by the flags below, which win. `--inference.vllm.KEY VALUE` reaches any argument of the \
engine, `--orchestrator.source.0.args.KEY VALUE` any argument of an environment. `--dry-run` checks and prints, and \
starts nothing; `--bench` measures the trainer on made-up documents, and `--json FILE` keeps its figures."""


@dataclass(frozen=True)
class Arguments:
    """The command line, split but not yet interpreted."""

    toml_paths: tuple[Path, ...]
    dry_run: bool
    bench: bool
    flags: tuple[str, ...]


def split_argv(argv: Sequence[str]) -> Arguments:
    """Split off `--config a.toml`, `--config=a.toml`, `@ a.toml`, `@a.toml`, `--dry-run`, `--bench`; the rest is flags.

    `--json` is short for `--bench.json`. Raises ConfigError when a file name is missing. A flag's value that begins
    with `@` is written `--flag=@value`.
    """
    paths: list[Path] = []
    flags: list[str] = []
    words = iter(argv)
    for word in words:
        if word in ("--config", "@"):
            name = next(words, "")
            if not name or name.startswith(("-", "@")):
                raise ConfigError([f"{word} needs a TOML file after it, as in: {word} run.toml"], COMMAND_LINE)
            paths.append(Path(name))
        elif word.startswith(("--config=", "@")):
            paths.append(Path(word.removeprefix("--config=").removeprefix("@")))
        elif word == "--json" or word.startswith("--json="):
            flags.append(word.replace("--json", "--bench.json", 1))
        elif word not in ("--dry-run", "--bench"):
            flags.append(word)
    return Arguments(tuple(paths), "--dry-run" in argv, "--bench" in argv, tuple(flags))


def load(argv: Sequence[str]) -> Config:
    """The config that a command line describes: defaults, then its files, then its flags.

    Names and types are checked, relations between keys are not (`check`). Raises ConfigError; `--help` prints
    the flags with the values of the files as defaults and exits.
    """
    arguments = split_argv(argv)
    table: dict[str, Any] = {}
    for path in arguments.toml_paths:
        layer = read_toml(path)
        build(layer, str(path))  # each file answers for its own mistakes
        table = merge(table, layer)
    layered = build(table, "the files together")
    free, declared = _split_flags(arguments.flags, len(layered.orchestrator.source))
    table = asdict(_parse_declared(declared, _without_free_tables(layered)))
    given = asdict(layered)  # a deep copy: the defaults are shared by all configs
    table["inference"]["vllm"] = given["inference"]["vllm"]
    table["orchestrator"]["source"] = [
        source | {name: known[name] for name in FREE_OF_SOURCES}
        for source, known in zip(table["orchestrator"]["source"], given["orchestrator"]["source"], strict=True)
    ]
    for flag_path, value in free.items():
        _put(table, flag_path, value)
    return build(table, COMMAND_LINE)  # once more: tyro takes nan and inf for floats


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a file. Raises ConfigError naming the file, and the line where TOML ends to make sense."""
    try:
        text = path.read_bytes().decode()
        return tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError([f"no such file (looked in {path.absolute().parent})"], str(path)) from None
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror}"], str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"not valid TOML: not UTF-8 at byte {error.start}"], str(path)) from None
    except tomllib.TOMLDecodeError as error:
        why = str(error).replace("at end of document", f"at line {text.count(chr(10)) + 1}, the end of the file")
        raise ConfigError([f"not valid TOML: {why}"], str(path)) from None


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """`high` over `low`: tables merge recursively, everything else (lists too) is replaced. Copies nothing below."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _split_flags(flags: Sequence[str], sources: int) -> tuple[dict[str, Any], list[str]]:
    """Values for the free tables, by dotted path, and the words that tyro shall read; every flag's name is checked.

    Raises ConfigError with all unknown flags and the nearest known ones.
    """
    kinds = known_kinds(sources)
    free_tables = tuple(f"{path}." for path, kind in kinds.items() if get_origin(kind) is dict)
    switches = {flag: path for path, kind in kinds.items() if kind is bool for flag in (path, _off(path))}
    free: dict[str, Any] = {}
    declared: list[str] = []
    problems: list[str] = []
    words = deque(flags)
    while words:
        word = words.popleft()
        name, equals, value = word.partition("=")
        path = name.removeprefix("--").replace("-", "_")
        has_value = bool(equals or (words and not words[0].startswith("--")))
        if not word.startswith("--") or name == "--help":
            declared.append(word)
        elif path.startswith(free_tables) and has_value:
            free[path] = _toml_value(value if equals else words.popleft())
        elif path.startswith(free_tables):
            problems.append(f"{name} needs a value")
        elif path not in kinds and path not in switches:
            problems.append(f"unknown flag {name}; {did_you_mean(path, kinds, '--')}")
        elif holds_tables(kinds.get(path)):
            problems.append(f"{name} is a table; set its keys one by one, as in {name}.KEY VALUE")
        elif path in switches and has_value:
            on = switches[path]
            problems.append(f"{name} is a switch and takes no value; --{on} turns it on, --{_off(on)} turns it off")
        else:
            declared.append(word)
    if problems:
        raise ConfigError(problems, COMMAND_LINE)
    return free, declared


def _off(path: str) -> str:
    """`log.wandb` to `log.no_wandb`, which is how tyro spells the flag that turns a boolean off."""
    parent, dot, leaf = path.rpartition(".")
    return f"{parent}{dot}no_{leaf}"


def _toml_value(text: str) -> Any:
    """`text` as a TOML value (4, 0.5, true, "4", [1, 2]); whatever is none is itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _without_free_tables(config: Config) -> Config:
    """tyro would make flags of their keys, which may be anything."""
    empty: dict[str, Any] = {name: {} for name in FREE_OF_SOURCES}
    sources = tuple(replace(source, **empty) for source in config.orchestrator.source)
    return replace(
        config,
        inference=replace(config.inference, vllm={}),
        orchestrator=replace(config.orchestrator, source=sources),
    )


def _parse_declared(words: Sequence[str], default: Config) -> Config:
    """tyro's reading of the flags, its complaints turned into a ConfigError."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(Config, default=default, args=words, prog="spmd_rl", description=HELP)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise ConfigError([_unframed(complaint.getvalue())], COMMAND_LINE) from None


def _unframed(text: str) -> str:
    """The first paragraph of a message that tyro drew in a box, without its title."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip("│ ") for line in plain.splitlines() if not line.startswith(("╭", "╰"))]
    paragraph = takewhile(lambda line: not line.startswith("─"), lines)
    return " ".join(paragraph) or plain


def _put(table: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, creating the tables on the way; a number is a place in a list."""
    *parents, leaf = path.split(".")
    node: Any = table
    for part in parents:
        node = node[int(part)] if isinstance(node, list | tuple) else node.setdefault(part, {})
    if not isinstance(node, dict):
        raise ConfigError([f"--{path}: {'.'.join(parents)} is a value, not a table"], COMMAND_LINE)
    node[leaf] = value
