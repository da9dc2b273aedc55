"""An evaluation on the disk and on the screen: eval/step_000080.json, and a table of scores with their intervals.

It refuses to know how scores are computed: it is handed plain data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spmd_rl.observe.disk import explain_full_disk


def write_evaluation(folder: str | Path, plain: dict[str, Any]) -> Path:
    """Write `Evaluation.plain()` below the run's output folder; the file. OSError when the disk is full."""
    path = Path(folder) / "eval" / f"step_{plain['step']:06d}.json"
    with explain_full_disk(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return path


def score_table(plain: dict[str, Any]) -> str:
    """One line per source: avg@k, greedy and pass@k, each with half the width of its 95 % interval."""
    sources: dict[str, dict[str, float]] = plain["sources"]
    names = [n for n in dict.fromkeys(n for found in sources.values() for n in found) if not n.endswith("_ci")]
    header = ["source", "tasks", *(f"avg@{plain['k']}" if name == "reward" else name for name in names)]
    rows = [header]
    for source, found in sources.items():
        tasks = sum(task["source"] == source for task in plain["tasks"])
        rows.append([source, str(tasks), *(_cell(found, name) for name in names)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _cell(found: dict[str, float], name: str) -> str:
    return f"{found[name]:.3f} ± {found[f'{name}_ci']:.3f}" if name in found else "–"
