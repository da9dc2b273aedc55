"""Mixtures of experts through the whole program: divided over trainers, sent to real engines, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors import safe_open

from spmd_rl.models.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, make_byte_tokenizer
from spmd_rl.models.tiny import make_tiny
from tests.e2e.runner import run
from tests.e2e.test_layouts import SHORT, assert_agreement

SIZES = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ff": 96, "init_std": 0.1}
EXPERTS = {"architecture": "qwen3_moe", "experts": 8, "top_k": 2, "expert_ff": 32, "mlp_only_layers": [0]}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    """A dense layer, then one with experts."""
    folder = str(tmp_path_factory.mktemp("mixture"))
    make_byte_tokenizer(folder)
    about = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    return make_tiny(folder, seed=0, **about, **SIZES, **EXPERTS)


def test_experts_over_two_trainers_agree_with_the_engine(mixture, tmp_path):
    """Engines know other kernels and layouts for experts: every version is compared."""
    args = [*SHORT, "--model.name", mixture, "--deployment.train-ranks", "2", "--trainer.parallel.ep", "2"]
    done = run(tmp_path / "run", [*args, "--trainer.moe.sequence-coef", "0.01"], 4)
    assert_agreement(done, 4, 1e-8)
    for record in (*done.phase("warmup"), *done.phase("rl")):
        assert 0 < record["moe/max_violation"] < 3


def test_engines_with_experts_of_their_own_get_just_these(mixture, tmp_path):
    """Every rank receives half of the experts, and the rest of the model."""
    args = [*SHORT, "--model.name", mixture, "--deployment.infer-ranks", "2", "--inference.tp", "2"]
    args += ["--inference.expert-parallel", "--trainer.router-replay", "--weights.bucket-mb", "0.01"]
    done = run(tmp_path / "run", args, 4, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert_agreement(done, 4, 1e-8)
    table = safe_open(done.folder / "hf" / "model.safetensors", "pt")
    sizes = {name: 4 * np.prod(table.get_slice(name).get_shape()) for name in table.keys()}  # noqa: SIM118
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    expected = sum(sizes.values()) - experts / 2
    for record in done.versions:
        assert expected <= record["weights/bytes"] < 1.01 * expected + 4000  # padding and trailers
    for record in done.phase("rl"):
        assert record["moe/replay_agreement"] > 0.999


def test_a_dense_model_has_no_experts_to_divide_over_engines(model, tmp_path):
    args = [*SHORT, "--model.name", model, "--deployment.infer-ranks", "2", "--inference.tp", "2"]
    done = run(tmp_path / "run", [*args, "--inference.expert-parallel"], 4)
    assert done.returncode != 0
    assert "inference.expert_parallel divides experts" in done.last_lines(20)


def test_supervised_training_chooses_how_many_ranks_share_experts(mixture, tmp_path):
    args = ["--model.name", mixture, "--data.type", "fake", "--data.batch-size", "8", "--max-steps", "2"]
    args += ["--trainer.parallel.ep", "0", "--trainer.parallel.dp-replicate", "2", "--data.fake-length", "32"]
    done = run(tmp_path / "run", [*args, "--seq-len", "64"], 4, command="sft")
    assert done.returncode == 0, done.output[-4000:]
    assert (done.folder / "hf" / "model.safetensors").exists()
    assert all(record["moe/max_violation"] > 0 for record in done.phase("sft"))


def test_a_dense_model_has_no_experts_to_share(model, tmp_path):
    args = ["--model.name", model, "--data.type", "fake", "--trainer.parallel.ep", "2"]
    done = run(tmp_path / "run", args, 2, command="sft")
    assert done.returncode != 0
    assert "trainer.parallel.ep = 2 divides experts, and the model has none" in done.last_lines()
