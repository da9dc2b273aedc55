"""Real gloo processes share rows: attention, gathering and gradients equal whole rows; bytes are as calculated."""

from __future__ import annotations

import json

import pytest

from tests.distributed.launch import torchrun

RANKS = 3  # two of them make a smaller group as well; three divide no power of two


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_ranks_that_share_rows_compute_what_one_computes(monkeypatch, tmp_path, debug):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    with torchrun("context_worker.py", RANKS, tmp_path) as started:
        assert started.wait(300) == [0], started.output()
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)] == [[]] * RANKS
