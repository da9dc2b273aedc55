"""The table in docs/algorithms.md says what the code does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from spmd_rl.algorithms import ALGORITHMS
from spmd_rl.algorithms.types import Algorithm
from spmd_rl.config.tree import CorrectionConfig

DOC = (Path(__file__).parents[2] / "docs/algorithms.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in DOC.splitlines() if line.startswith("| `")]


def defaults(algorithm: Algorithm) -> str:
    """The policy loss in short: what is on."""
    policy = asdict(algorithm.policy)
    shape = {"surrogate": policy.pop("surrogate"), "ratio": policy.pop("ratio")}
    named = [shape["surrogate"]] + (["sequence ratio"] if shape["ratio"] == "sequence" else [])
    return ", ".join(named + [f"{name} {value:g}" for name, value in policy.items() if value])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_row_of_an_algorithm(name):
    algorithm = ALGORITHMS[name]
    (row,) = [row for row in ROWS if row[0] == f"`{name}`" and len(row) == 7]
    _, _, aggregation, std, loss, group, source = row
    assert (aggregation, std, loss) == (algorithm.aggregation, algorithm.std, defaults(algorithm))
    assert group == ("yes" if algorithm.baseline == "group" and algorithm.learns == "advantages" else "no")
    assert source


def test_every_correction_has_a_row():
    corrections = {row[0] for row in ROWS if len(row) == 4}
    assert {f"`{name}`" for name in asdict(CorrectionConfig())} <= corrections


def test_every_algorithm_has_its_curves():
    curves = [row for row in ROWS if len(row) == 5]
    assert {row[0] for row in curves} == {f"`{name}`" for name in ALGORITHMS}
    assert all(int(row[2]) <= 150 for row in curves)
    assert all(len([row for row in curves if row[0] == f"`{name}`"]) == 2 for name in ALGORITHMS)
