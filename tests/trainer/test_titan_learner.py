"""The learner with models of torchtitan: a step is transformers' step, and an export is what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.config.tree import Config, ModelConfig, MoeConfig, TrainerConfig, TrainerModelConfig
from spmd_rl.trainer.learner import Learner
from tests.models.titan_cases import OF_FAMILY, folder_of, hugging_face
from tests.trainer.rows import VOCAB, make_document, make_row

pytest.importorskip("torchtitan", reason="torchtitan is not installed; launch/setup.sh dev installs it")


def make_learner(folder: str | Path, impl: str = "titan") -> Learner:
    trainer = TrainerConfig(model=TrainerModelConfig(impl=impl, lm_head_chunk=8))
    return Learner(Config(model=ModelConfig(str(folder)), trainer=trainer), None, torch.device("cpu"), None)


def documents() -> list[dict[str, Any]]:
    return [make_document(length, seed) for seed, length in enumerate((7, 12, 3, 9))]


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.full_tensors()}


@pytest.mark.parametrize("family", OF_FAMILY)
def test_a_step_moves_the_weights_and_the_export_is_bit_exact(tmp_path: Path, family: str) -> None:
    folder = folder_of(hugging_face(family, vocab_size=VOCAB), tmp_path / "source")
    learner = make_learner(folder)
    before = weights(learner)
    assert [(name, tuple(tensor.shape), "float32") for name, tensor in before.items()] == learner.shards.table()
    losses = [learner.step([[make_row(*documents())]], lr=1e-3)["loss"] for _ in range(3)]
    assert losses[0] != losses[1] != losses[2]
    after = weights(learner)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {name for name in before if "e_score_correction_bias" in name}
    learner.export(tmp_path / "export")
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert stored.keys() == load_file(tmp_path / "source" / "model.safetensors").keys() == after.keys()
    again = weights(make_learner(tmp_path / "export"))
    assert all(torch.equal(stored[name], after[name]) and torch.equal(again[name], after[name]) for name in after)


def test_a_step_and_its_packing_equal_transformers(tmp_path: Path) -> None:
    folder = folder_of(hugging_face("deepseek_v3", vocab_size=VOCAB), tmp_path)
    packed, apart, peer = make_learner(folder), make_learner(folder), make_learner(folder, "hf")
    one_row, rows = [make_row(*documents())], [make_row(document) for document in documents()]
    for _ in range(2):
        metrics, others = packed.step([one_row], 1e-3), [apart.step([rows], 1e-3), peer.step([one_row], 1e-3)]
        for name in ("loss", "grad_norm", "entropy", "tokens/trained"):
            assert [other[name] for other in others] == pytest.approx([metrics[name]] * 2, rel=1e-4), name


def test_balancing_is_refused(tmp_path: Path) -> None:
    folder = folder_of(hugging_face("deepseek_v3"), tmp_path)
    trainer = TrainerConfig(model=TrainerModelConfig(impl="titan"), moe=MoeConfig(sequence_coef=0.1))
    with pytest.raises(ValueError, match="TitanModel has none that it could"):
        Learner(Config(model=ModelConfig(folder), trainer=trainer), None, torch.device("cpu"), None)
