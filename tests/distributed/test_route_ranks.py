"""Routed experts between real ranks: what is sent arrives, and what is wrong is an error that says whose it is."""

from __future__ import annotations

import json
from pathlib import Path

from tests.distributed.launch import start_ranks
from tests.distributed.routes_worker import LAYERS, REPLICAS, STEPS, TOP_K, TRAINERS, table


def test_experts_arrive_and_damage_is_named(tmp_path: Path) -> None:
    with start_ranks("routes_worker.py", TRAINERS + REPLICAS, tmp_path) as started:
        codes = started.wait(120)
        assert codes == [0] * 4, started.output()
    for trainer in range(TRAINERS):
        *right, damaged, too_large, late, count = json.loads((tmp_path / f"rank{trainer}.json").read_text())
        assert right == [True] * len(STEPS)
        assert "step 4 from replica 0 arrived damaged" in damaged
        assert "replica 0 took expert" in too_large and "the model has 300" in too_large
        assert "replica 0 sends" in late and "for step 5; step 6 needs" in late
        pieces = [table(step, trainer) for step in (*STEPS, 4, 5)]
        sizes = [(rows[:, 3] - rows[:, 2]) * (2 - rows[:, 0]) * LAYERS * TOP_K for rows in pieces]
        assert count == sum(int(size.sum()) for size in sizes)  # two bytes an index of replica 0, one of replica 1
