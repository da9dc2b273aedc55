"""Real gloo processes: any number of trainer ranks computes what one rank computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from spmd_rl.models.tiny import make_tiny
from spmd_rl.trainer.learner import Learner
from tests.distributed.trainer_worker import SEQUENCES, make_config, train
from tests.trainer.rows import VOCAB

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(
        folder, seed=1, vocab_size=VOCAB, layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ff=50, init_std=0.2
    )
    return folder


@pytest.fixture(scope="module")
def single(folder):
    """One rank in float32, without FSDP and without processes."""
    torch.set_num_threads(1)
    return train(Learner(make_config(folder, "float32"), None, torch.device("cpu"), None), rank=0, world=1)


def launch(folder: Path, out: Path, world: int, dtype: str, debug: str, impl: str = "custom") -> list[dict]:
    """The results of all ranks of one torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    script = [str(ROOT / "tests/distributed/trainer_worker.py"), str(folder), str(out), dtype, impl]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCH_DISTRIBUTED_DEBUG": debug,
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run([*command, *script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


def assert_export_is_the_model(export: Path, result: dict, tolerance: float) -> None:
    """transformers reads the folder and computes what the sharded model computed."""
    peer = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    for name, tensor in peer.state_dict().items():
        assert torch.equal(tensor, result["weights"][name].float()), name
    for tokens, score in zip(SEQUENCES, result["final_scores"], strict=True):
        ids = torch.tensor(tokens).long()
        expected = peer(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(score, expected.detach().numpy(), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("world", "debug", "impl"), [(2, "OFF", "hf"), (2, "OFF", "custom"), (3, "DETAIL", "custom")])
def test_ranks_equal_one_rank(folder, single, tmp_path, world, debug, impl):
    """Three ranks divide neither the vocabulary nor the hidden size."""
    results = launch(folder, tmp_path, world, "float32", debug, impl)
    for result in results:
        for metrics, expected in zip(result["metrics"], single["metrics"], strict=True):
            for name in (name for name in expected if not name.startswith("time/")):
                assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name
        for scores in ("scores", "final_scores"):
            for score, expected in zip(result[scores], single[scores], strict=True):
                np.testing.assert_allclose(score, expected, rtol=0, atol=2e-5)
        assert result["table"] == single["table"]
        assert [(name, tuple(tensor.shape), "float32") for name, tensor in result["weights"].items()] == result["table"]
        for name, expected in single["weights"].items():
            assert (result["weights"][name] - expected).norm() <= 1e-5 * expected.norm(), name
        assert "the loss is nan" in result["poisoned"] and result["untouched"]
    assert [result["refused"] for result in results] == ["could not write"] + ["no error"] * (world - 1)
    assert single["metrics"][0]["grad_norm"] > 0.05  # so that clipping took part
    assert_export_is_the_model(tmp_path / "export", results[-1], tolerance=2e-5)


@pytest.mark.parametrize(("world", "debug"), [(1, "OFF"), (2, "DETAIL")])
def test_bfloat16_stays_near_float32_over_float32_master_weights(folder, single, tmp_path, world, debug):
    results = launch(folder, tmp_path, world, "bfloat16", debug)
    for result in results:
        for metrics, expected in zip(result["metrics"], single["metrics"], strict=True):
            for name in ("loss", "entropy", "grad_norm"):
                assert metrics[name] == pytest.approx(expected[name], rel=0.05), name
            assert metrics["tokens/trained"] == expected["tokens/trained"]
        assert result["master_dtypes"] == {torch.float32}
        assert {tensor.dtype for tensor in result["weights"].values()} == {torch.bfloat16}
        assert {dtype for _, _, dtype in result["table"]} == {"bfloat16"}
        assert result["untouched"]
    assert_export_is_the_model(tmp_path / "export", results[-1], tolerance=0.1)
