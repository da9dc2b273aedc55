"""Plain tables (what TOML holds) to the config tree, with every name and every type checked.

Works from the type hints of the dataclasses alone: it refuses to know what any key means (`check.py` does), and where a
table came from (it is told, for its messages). A dotted path such as `orchestrator.source.1.env` names a key
everywhere; the number is the place in an array of tables.

Invariant: `build(asdict(config)) == config` for every config that `build` returned.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from os.path import commonprefix
from typing import Any, Literal, get_args, get_origin, get_type_hints

from spmd_rl.config.errors import ConfigError
from spmd_rl.config.tree import Config


def build(table: Mapping[str, Any], origin: str) -> Config:
    """A config from a table; absent keys keep their defaults. `origin` names the source of the table in errors.

    Raises ConfigError with every unknown key and every wrong type. Integers are accepted where floats are
    expected; booleans are not numbers; floats are finite.
    """
    problems: list[str] = []
    config: Config = _read(Config, table, "", problems)
    if problems:
        raise ConfigError(problems, origin)
    return config


def known_kinds(sources: int = 1) -> dict[str, Any]:
    """Declared type of every dotted path, tables included, in the tree's order; arrays have `sources` elements."""
    return dict(_walk(Config, "", sources))


def holds_tables(kind: Any) -> bool:
    """True for a type that is written as one or more tables rather than as a value."""
    return is_dataclass(kind) or _is_array_of_tables(kind) or get_origin(kind) is dict


def suggest(wanted: str, known: Collection[str]) -> list[str]:
    """Up to three known paths that `wanted` may stand for: similar names beside it, then the same name elsewhere."""
    parent, _, name = wanted.rpartition(".")
    siblings = {path.rpartition(".")[2]: path for path in known if path.rpartition(".")[0] == parent}
    similar = [siblings[match] for match in get_close_matches(name, siblings, n=2)]
    elsewhere = [path for path in known if path.rpartition(".")[2] == name]
    elsewhere.sort(key=lambda path: -len(commonprefix([path, wanted])))  # noqa: RUF071 (characters are meant)
    return (similar + elsewhere)[:3] or get_close_matches(wanted, known, n=1)


def did_you_mean(wanted: str, known: Collection[str], prefix: str = "") -> str:
    """The way out after an unknown name, as the end of a sentence; `prefix` stands before every path."""
    if candidates := suggest(wanted, known):
        return f"did you mean {' or '.join(prefix + path for path in candidates)}?"
    parent = wanted.rpartition(".")[0]
    beside = [path.rpartition(".")[2] for path in known if path.rpartition(".")[0] == parent]
    return f"known here: {', '.join(beside)}"


def _walk(kind: Any, prefix: str, sources: int) -> Iterator[tuple[str, Any]]:
    for name, inner in get_type_hints(kind).items():
        path = f"{prefix}{name}"
        yield path, inner
        if is_dataclass(inner):
            yield from _walk(inner, f"{path}.", sources)
        elif _is_array_of_tables(inner):
            for i in range(sources):
                yield from _walk(get_args(inner)[0], f"{path}.{i}.", sources)


def _is_array_of_tables(kind: Any) -> bool:
    return _is_list(kind) and is_dataclass(get_args(kind)[0])


def _is_list(kind: Any) -> bool:
    """True for tuple[X, ...], a list of any length."""
    return get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis


def _read(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    """`value` as `kind`. Appends to `problems` and returns something unusable when that fails."""
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _read_dataclass(kind, value, path, problems)
    if _is_list(kind) and isinstance(value, list | tuple):
        inner = get_args(kind)[0]
        return tuple(_read(inner, item, f"{path}.{i}", problems) for i, item in enumerate(value))
    if get_origin(kind) is tuple and isinstance(value, list | tuple) and len(value) == len(get_args(kind)):
        kinds = get_args(kind)
        return tuple(_read(k, v, f"{path}.{i}", problems) for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if kind is Any or (get_origin(kind) is dict and isinstance(value, Mapping)):
        return _read_free(value, path, problems)
    if kind is float and type(value) in (int, float) and _is_finite(value):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    if get_origin(kind) is Literal and type(value) is str and value in get_args(kind):
        return value
    problems.append(f"{path} = {_shown(value)}: expected {_expected(kind, path)}, got {_found(value)}")
    return None


def _read_dataclass(kind: Any, table: Mapping[str, Any], path: str, problems: list[str]) -> Any:
    hints = get_type_hints(kind)
    prefix = f"{path}." if path else ""
    values = {}
    for name, value in table.items():
        if name in hints:
            values[name] = _read(hints[name], value, prefix + name, problems)
        else:
            known = dict.fromkeys([prefix + field.name for field in fields(kind)]) | known_kinds()
            problems.append(f"unknown key {prefix}{name}; {did_you_mean(prefix + name, known)}")
    return kind(**values)


def _read_free(value: Any, path: str, problems: list[str]) -> Any:
    """A value of a free table: whatever both TOML and JSON can hold, copied."""
    if isinstance(value, Mapping):
        if strange := [key for key in value if type(key) is not str]:
            problems.append(f"{path}: keys must be strings, got {strange[0]!r}")
        return {key: _read_free(inner, f"{path}.{key}", problems) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_read_free(inner, f"{path}.{i}", problems) for i, inner in enumerate(value)]
    if type(value) in (str, bool, int) or (type(value) is float and _is_finite(value)):
        return value
    problems.append(f"{path} = {_shown(value)}: expected {_expected(Any, path)}, got {_found(value)}")
    return None


def _expected(kind: Any, path: str) -> str:
    if is_dataclass(kind):
        return f"a table ([{path}])"
    if _is_array_of_tables(kind):
        return f"an array of tables ([[{path}]])"
    if _is_list(kind):
        return f"a list of {get_args(kind)[0].__name__}s"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} {get_args(kind)[0].__name__}s"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in get_args(kind))
    if get_origin(kind) is dict:
        return f"a table ([{path}])"
    if kind is Any:
        return "a string, a boolean, a number, a list or a table"
    return str(kind.__name__)


def _found(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if type(value) in (int, float) and not _is_finite(value):
        return f"{type(value).__name__} that is not finite"
    return type(value).__name__


def _is_finite(number: int | float) -> bool:
    """False for nan, the infinities, and integers that no float can hold."""
    return abs(number) <= sys.float_info.max


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
