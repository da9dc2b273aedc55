"""Models of transformers on packed rows: equal to one document at a time, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spmd_rl.models.hf_model import HFModel
from spmd_rl.models.packed import Documents
from tests.models.titan_cases import hugging_face as deepseek

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = [
    ("qwen3", SMALL),
    ("llama", SMALL),
    ("mistral", SMALL | {"sliding_window": 4}),
    ("gemma3_text", SMALL | SLIDING),
    ("qwen3_moe", SMALL | MOE),
    ("gpt_neox", {key: SMALL[key] for key in SMALL if key not in ("num_key_value_heads", "head_dim")}),
    ("gpt2", GPT2),
]


def hugging_face(family: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_packed_equals_one_document_at_a_time(family: str, settings: dict[str, Any]) -> None:
    hf = hugging_face(family, settings)
    model = HFModel(hf, lm_head_chunk=8)
    model.check_packing()
    lengths = [9, 1, 17, 6]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens_T = torch.randint(0, 97, (33,), dtype=torch.int32)
    targets_T, temperatures_T = tokens_T.roll(-1).long(), torch.linspace(0.6, 1.4, 33)

    logp_T, entropy_T = model(tokens_T, Documents.build(cu_seqlens), targets_T, temperatures_T)
    logp_T.sum().backward()
    got = {name: parameter.grad.clone() for name, parameter in hf.named_parameters()}
    hf.zero_grad()

    logits_TV = torch.cat([hf(input_ids=part[None].long()).logits[0] for part in tokens_T.split(lengths)])
    logp_TV = torch.log_softmax(logits_TV / temperatures_T[:, None], -1)
    expected_T = logp_TV.gather(1, targets_T[:, None])[:, 0]
    torch.testing.assert_close(logp_T, expected_T, atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_T, -(logp_TV.exp() * logp_TV).sum(-1), atol=5e-5, rtol=1e-4)
    expected_T.sum().backward()
    for name, parameter in hf.named_parameters():
        error = (got[name] - parameter.grad).norm() / (parameter.grad.norm() + 1e-6)
        assert error <= 1e-4, name


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        (
            "opt",
            {"vocab_size": 97, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
            | {"word_embed_proj_dim": 32},
            "OPTForCausalLM cannot be trained on packed rows: a document sees",
        ),
        ("cohere", SMALL, "CohereForCausalLM scales or caps its logits"),
        ("qwen3_next", SMALL | MOE, "Qwen3NextForCausalLM cannot be trained on packed rows"),
    ],
    ids=["opt", "cohere", "qwen3_next"],
)
def test_families_that_cannot_be_packed_are_refused_by_name(family: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        HFModel(hugging_face(family, settings)).check_packing()


def test_a_head_with_a_bias_is_refused() -> None:
    settings = {key: SMALL[key] for key in SMALL if key != "head_dim"}
    with pytest.raises(ValueError, match="PhiForCausalLM has a bias"):
        HFModel(hugging_face("phi", settings))


def test_buffers_that_checkpoints_hold_are_on_the_wire() -> None:
    """A selection bias, but no table of rotary positions."""
    model = HFModel(deepseek("deepseek_v3"))
    assert [(wire.name, wire.dtype(torch.bfloat16)) for wire in model.wires() if not wire.trained] == [
        (f"model.layers.{layer}.mlp.gate.e_score_correction_bias", torch.float32) for layer in (1, 2)
    ]


def test_blocks_are_the_decoder_layers() -> None:
    model = HFModel(hugging_face("llama", SMALL))
    assert model.blocks == list(model.hf.model.layers)


def test_dropout_stays_off_in_training() -> None:
    model = HFModel(hugging_face("gpt2", GPT2 | {"attn_pdrop": 0.5, "resid_pdrop": 0.5})).train()
    row = (torch.arange(12), Documents.build(np.array([0, 12])), torch.zeros(12).long(), torch.ones(12))
    assert torch.equal(model(*row)[0], model(*row)[0])
