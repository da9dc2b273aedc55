"""An evaluation as a file and as a table."""

from __future__ import annotations

import json
from pathlib import Path

from spmd_rl.observe.evaluations import score_table, write_evaluation

PLAIN = {
    "step": 8,
    "k": 4,
    "metrics": {},
    "sources": {
        "guess": {"reward": 0.5, "reward_ci": 0.1, "pass@1": 0.5, "pass@1_ci": 0.1},
        "calculator": {"reward": 0.25, "reward_ci": 0.2},
    },
    "tasks": [{"source": "guess"}, {"source": "guess"}, {"source": "calculator"}],
}


def test_the_table_has_a_line_per_source() -> None:
    lines = score_table(PLAIN).splitlines()
    assert [line.split() for line in lines] == [
        ["source", "tasks", "avg@4", "pass@1"],
        ["guess", "2", "0.500", "±", "0.100", "0.500", "±", "0.100"],
        ["calculator", "1", "0.250", "±", "0.200", "–"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_the_file_holds_everything(tmp_path: Path) -> None:
    path = write_evaluation(tmp_path, PLAIN)
    assert path.name == "step_000008.json" and json.loads(path.read_text()) == PLAIN
