"""Roles on other ranks than they come: groups have their members in the order of the mesh, not of ranks."""

from __future__ import annotations

import json

from tests.distributed.launch import start_ranks


def test_the_sender_of_weights_is_the_trainer_wherever_it_is(tmp_path):
    with start_ranks("map_worker.py", 3, tmp_path) as started:
        assert started.wait(120) == [0] * 3, started.output()
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)] == [
        {"role": "orchestrator", "heard": 0, "ctl": 0},
        {"role": "inference", "heard": 2, "ctl": 2},
        {"role": "trainer", "heard": 2, "ctl": 1},
    ]
