"""tools/make_tiny.py: a folder that Hugging Face loads, the same for the same seed."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    command = [sys.executable, "tools/make_tiny.py", "--out", str(path)]
    env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=REPO, env=env, check=True, capture_output=True)
    return path


def test_the_default_is_the_quickstart_model(folder):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(folder)
    sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    assert sizes == (2, 128, 4, 2)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (32, 384, 265)
    assert (config.model_type, config.tie_word_embeddings) == ("qwen3", False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 258
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(0.02, rel=0.02)
    logits_TV = model(**tokenizer("hello", return_tensors="pt")).logits[0]
    assert logits_TV.shape == (5, len(tokenizer))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen2_moe"])
def test_every_family_is_one_of_transformers(tmp_path, family):
    from transformers import AutoModelForCausalLM

    main = runpy.run_path(str(REPO / "tools/make_tiny.py"))["main"]
    main(tmp_path, layers=1, hidden=32, ff=48, architecture=family, experts=6, top_k=3, expert_ff=16)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert model.config.model_type == family
    assert not report["missing_keys"] and not report["unexpected_keys"]
    if family != "llama":
        assert (model.config.num_experts, model.config.num_experts_per_tok) == (6, 3)
        assert model.model.layers[0].mlp.experts.down_proj.shape == (6, 32, 16)


def test_sizes_and_the_seed_make_the_weights(folder, tmp_path):
    main = runpy.run_path(str(REPO / "tools/make_tiny.py"))["main"]
    for name, seed in (("a", 3), ("same", 3), ("other", 4)):
        main(tmp_path / name, seed=seed, layers=1, hidden=32, ff=48)
    assert weights(tmp_path / "a") == weights(tmp_path / "same") != weights(tmp_path / "other")
    assert len(weights(tmp_path / "a")) < len(weights(folder))
