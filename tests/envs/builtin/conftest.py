"""Rows that stand for the tasks of an agent program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(20)]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
