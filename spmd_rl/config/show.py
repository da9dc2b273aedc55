"""The resolved config as text: TOML that loads to the same config again, and a hash that names it.

TOML is written here because the standard library only reads it and the config needs a small part of it: strings,
booleans, integers, finite floats, lists and tables.

Invariant: `load(["--config", path])` after `write_toml(config, path)` equals `config`, bit for bit in its floats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from spmd_rl.config.schema import build
from spmd_rl.config.tree import Config


def to_toml(config: Config) -> str:
    """The whole config as TOML, every default written out. Raises ConfigError for what the tree's types forbid."""
    return table_to_toml(_checked_table(config))


def table_to_toml(table: Mapping[str, Any]) -> str:
    """TOML of strings, booleans, numbers, lists and tables; lists of tables stand under headers of their own."""
    return "\n".join(_lines(table, "")).lstrip() + "\n"


def write_toml(config: Config, path: str | Path) -> None:
    """Write `to_toml(config)` to a file."""
    Path(path).write_text(to_toml(config), encoding="utf-8", newline="\n")


def config_hash(config: Config) -> str:
    """SHA-256 of the config's canonical JSON, as 64 hex digits: equal for equal configs, in any process."""
    text = json.dumps(_checked_table(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return sha256(text.encode()).hexdigest()


def _checked_table(config: Config) -> dict[str, Any]:
    """Through `build`, so that a config made in Python with `lr=1` reads and hashes like one that says `lr = 1.0`."""
    return asdict(build(asdict(config), "the config"))


def _lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """Values first, then tables: in TOML everything after a header belongs to it."""
    for key, value in table.items():
        if not _has_header(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if not _has_header(value):
            continue
        header, several = f"{path}.{_key(key)}" if path else _key(key), not isinstance(value, Mapping)
        for element in value if several else (value,):
            if several or not element or any(not _has_header(inner) for inner in element.values()):
                yield f"\n[[{header}]]" if several else f"\n[{header}]"
            yield from _lines(element, header)


def _has_header(value: Any) -> bool:
    """Tables, and arrays of nothing but tables."""
    tables = isinstance(value, list | tuple) and bool(value) and all(isinstance(inner, Mapping) for inner in value)
    return isinstance(value, Mapping) or tables


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    if isinstance(value, str):
        return _string(value)
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    """JSON's escapes are TOML's, but for DEL, which only TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
