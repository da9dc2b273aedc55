"""Real processes: loading a sharded model, no rank ever holds more than its part and the pages that it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spmd_rl.models.tiny import make_tiny
from tests.distributed.launch import torchrun
from tests.distributed.loading_worker import LAYOUTS

RANKS = 4
SHAPE = {"vocab_size": 8000, "layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "ff": 1024}
SPARSE = {"architecture": "qwen3_moe", "experts": 16, "top_k": 2, "expert_ff": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_tiny(tmp_path_factory.mktemp("model"), seed=0, **SHAPE, **SPARSE)


@pytest.fixture(scope="module")
def ranks(folder, tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("loading")
    with torchrun("loading_worker.py", RANKS, out, folder) as started:
        assert started.wait(300) == [0], started.output()
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_ever_holds_the_whole_model(folder, ranks, layout):
    size = (Path(folder) / "model.safetensors").stat().st_size
    for results in ranks:
        sharded, whole = results[layout, "sharded"], results[layout, "whole"]
        print(f"{layout}: {size >> 20} MiB, grew by {sharded['growth'] >> 20}, loaded whole by {whole['growth'] >> 20}")
        assert sharded["held"] == whole["held"] < 0.3 * size
        assert sharded["growth"] < 0.75 * size  # its quarter twice: in memory, and mapped from the file
        assert whole["growth"] > 2 * sharded["growth"]
        assert sharded["sums"] == whole["sums"]
