"""Real gloo processes: two trainer ranks with a model of torchtitan compute what one computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.trainer.learner import Learner
from tests.distributed.test_trainer_ranks import launch
from tests.distributed.trainer_worker import make_config, train
from tests.models.titan_cases import folder_of, hugging_face
from tests.trainer.rows import VOCAB

pytest.importorskip("torchtitan", reason="torchtitan is not installed; launch/setup.sh dev installs it")

BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(hugging_face("deepseek_v3", vocab_size=VOCAB), tmp_path_factory.mktemp("deepseek"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_equal_one(folder: str, tmp_path: Path, dtype: str) -> None:
    torch.set_num_threads(1)
    single = train(Learner(make_config(folder, "float32", "titan"), None, torch.device("cpu"), None), rank=0, world=1)
    results = launch(Path(folder), tmp_path, 2, dtype, "DETAIL", "titan")
    metrics_within, scores_within = (1e-5, 5e-5) if dtype == "float32" else (0.1, 1.0)
    for result in results:
        for metrics, expected in zip(result["metrics"], single["metrics"], strict=True):
            for name in ("loss", "entropy", "grad_norm", "tokens/trained"):
                assert metrics[name] == pytest.approx(expected[name], rel=metrics_within), name
        for score, expected in zip(result["final_scores"], single["final_scores"], strict=True):
            np.testing.assert_allclose(score, expected, rtol=0, atol=scores_within)
        assert result["master_dtypes"] == {torch.float32} and result["untouched"]
        assert {wire for name, _, wire in result["table"] if BIAS in name} == {"float32"}
        assert {wire for name, _, wire in result["table"] if BIAS not in name} == {dtype}
    original, written = load_file(Path(folder) / "model.safetensors"), load_file(tmp_path / "export/model.safetensors")
    assert written.keys() == original.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, results[0]["weights"][name]), name
        assert torch.equal(tensor, original[name]) == (BIAS in name), name
