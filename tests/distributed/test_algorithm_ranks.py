"""Real gloo processes: every algorithm's loss, reference, hint and critic are the same on two ranks as on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spmd_rl.models.tiny import make_tiny
from tests.distributed.algorithm_worker import two_steps
from tests.trainer.algorithm_cases import CASES
from tests.trainer.rows import VOCAB

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ff": 48, "init_std": 0.2}
    return [str(make_tiny(tmp_path_factory.mktemp("m"), seed=s, vocab_size=VOCAB, **sizes)) for s in range(2)]


@pytest.fixture(scope="module")
def ranks(folders, tmp_path_factory):
    """What two ranks computed, by rank and case."""
    out = tmp_path_factory.mktemp("out")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "tests/distributed/algorithm_worker.py"), str(out), *folders]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(folders, ranks, name):
    torch.set_num_threads(1)
    single = two_steps(folders, name, 0, 1, None, None)
    for result in (results[name] for results in ranks):
        for metrics, expected in zip(result["metrics"], single["metrics"], strict=True):
            for key in (key for key in expected if not key.startswith("time/")):
                assert metrics[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-7), key
        for key, expected in single["weights"].items():
            # Adam divides by the gradient's size, so a rounding of nearly nothing moves a weight by a part of lr.
            assert (result["weights"][key] - expected).norm() <= 2e-3 * expected.norm(), key
