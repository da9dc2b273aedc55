"""A table of ours as TOML: only the keys it has, where `show.to_toml` writes the whole config.

It refuses to know what keys mean. Invariant: `tomllib` reads back the table that was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any


def table_to_toml(table: Mapping[str, Any]) -> str:
    """TOML of a table of strings, booleans, numbers, lists and tables; lists of tables under headers of their own."""
    return "\n".join(_lines(table, "")).lstrip() + "\n"


def _lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in table.items():
        if not _has_header(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if _has_header(value):
            header = f"{path}.{_key(key)}" if path else _key(key)
            several = isinstance(value, list)
            for element in value if several else [value]:
                if several or not element or any(not _has_header(inner) for inner in element.values()):
                    yield f"\n[[{header}]]" if several else f"\n[{header}]"
                yield from _lines(element, header)


def _has_header(value: Any) -> bool:
    tables = isinstance(value, list) and bool(value) and all(isinstance(inner, Mapping) for inner in value)
    return isinstance(value, Mapping) or tables


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)
