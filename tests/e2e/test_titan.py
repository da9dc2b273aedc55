"""A DeepSeek-V3 of torchtitan through the whole program: real engines compute what its trainer computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.models.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, make_byte_tokenizer
from tests.e2e.runner import run
from tests.e2e.test_layouts import COLOCATED, SHORT, assert_agreement
from tests.models.titan_cases import folder_of, hugging_face

pytest.importorskip("torchtitan", reason="torchtitan is not installed; launch/setup.sh dev installs it")

# vLLM's latent attention knows these widths only, and its router needs to be told of the selection bias.
WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("deepseek")
    about = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "bos_token_id": None}
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    settings = {"initializer_range": 0.05, "max_position_embeddings": 8192}
    model = hugging_face("deepseek_v3", **about, **sizes, **WIDTHS, **ROUTER, **settings)
    make_byte_tokenizer(folder)
    return folder_of(model, folder)


@pytest.mark.parametrize(
    ("ranks", "dtype", "limit", "flags"),
    [(3, "bfloat16", 1e-2, []), (2, "float32", 1e-8, COLOCATED)],
    ids=["in bfloat16", "in turns in one process"],
)
def test_every_version_agrees_with_the_engine(
    deepseek: str, tmp_path: Path, ranks: int, dtype: str, limit: float, flags: list[str]
) -> None:
    """The warm-up has moved the weights before the first version; a selection bias keeps its float32 all the way."""
    args = [*SHORT, "--model.name", deepseek, "--trainer.model.impl", "titan", "--trainer.model.dtype", dtype, *flags]
    done = run(tmp_path / "run", args, ranks)
    assert_agreement(done, 4, limit)
    before, after = load_file(Path(deepseek) / "model.safetensors"), load_file(done.folder / "hf/model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == (torch.float32 if BIAS in name else getattr(torch, dtype)), name
        assert torch.equal(tensor, before[name]) == (BIAS in name), name
