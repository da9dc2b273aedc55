"""Our Qwen3 equals Hugging Face's: logits, log-probabilities and gradients, packed and unpacked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from spmd_rl.models.packed import Documents
from spmd_rl.models.qwen3 import Qwen3

CONFIGS = st.fixed_dictionaries(
    {
        "vocab_size": st.sampled_from([7, 61, 130]),
        "hidden_size": st.sampled_from([16, 24]),
        "head_dim": st.sampled_from([4, 8, 10]),
        "heads": st.sampled_from([(4, 2), (3, 1), (2, 2)]),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "rope_theta": st.sampled_from([1e4, 1e6]),
        "rms_norm_eps": st.sampled_from([1e-6, 1e-3]),
    }
)


def hugging_face(heads: tuple[int, int] = (4, 2), std: float = 0.3, **settings: Any) -> Qwen3ForCausalLM:
    """A random model whose norms and biases are random too, with weights large enough for errors to show."""
    given = {"vocab_size": 61, "hidden_size": 16, "head_dim": 8} | settings
    config = Qwen3Config(
        num_hidden_layers=2,
        intermediate_size=20,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        initializer_range=std,
        **given,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model


def ours(hf: Qwen3ForCausalLM, chunk: int = 8) -> Qwen3:
    model = Qwen3(hf.config, lm_head_chunk=chunk, dtype=hf.dtype)
    model.load_state_dict(hf.state_dict())
    return model


def row(lengths: list[int], vocab: int) -> tuple[torch.Tensor, Documents]:
    torch.manual_seed(1)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return torch.randint(0, vocab, (sum(lengths),), dtype=torch.int32), Documents.build(cu_seqlens)


def unpacked_logits(hf: Qwen3ForCausalLM, tokens_T: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.cat([hf(input_ids=part[None].long()).logits[0] for part in tokens_T.split(lengths)])


@settings(max_examples=30, deadline=None)
@given(CONFIGS, st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_logits_equal_hugging_face(config: dict[str, Any], lengths: list[int]) -> None:
    hf = hugging_face(**config)
    tokens_T, documents = row(lengths, config["vocab_size"])
    with torch.no_grad():
        expected_TV = unpacked_logits(hf, tokens_T, lengths)
        error = (ours(hf).logits(tokens_T, documents) - expected_TV).abs().max()
    assert error <= 1e-5 * max(1.0, expected_TV.abs().max().item())


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_equal_hugging_face(tied: bool) -> None:
    hf = hugging_face(tie_word_embeddings=tied, attention_bias=True)
    model = ours(hf)
    lengths = [9, 3, 17, 3]
    tokens_T, documents = row(lengths, 61)
    targets_T, temperatures_T = tokens_T.roll(-1).long(), torch.linspace(0.6, 1.4, 32)
    logp_T, entropy_T = model(tokens_T, documents, targets_T, temperatures_T)
    logp_TV = torch.log_softmax(unpacked_logits(hf, tokens_T, lengths) / temperatures_T[:, None], -1)
    hf_logp_T, hf_entropy_T = logp_TV.gather(1, targets_T[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)
    torch.testing.assert_close((logp_T, entropy_T), (hf_logp_T, hf_entropy_T), atol=2e-5, rtol=1e-5)

    weight_T = torch.linspace(-1, 1, 32)
    ((weight_T * logp_T).sum() + 0.1 * entropy_T.sum()).backward()
    ((weight_T * hf_logp_T).sum() + 0.1 * hf_entropy_T.sum()).backward()
    expected = dict(hf.named_parameters())
    mine = dict(model.named_parameters())
    assert list(mine) == list(expected)
    for name, parameter in mine.items():
        error = (parameter.grad - expected[name].grad).norm() / expected[name].grad.norm()
        assert error <= 1e-5, name


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rope_equals_hugging_face(rope: dict[str, Any]) -> None:
    hf = hugging_face(rope_parameters={"rope_theta": 1e4, **rope}, max_position_embeddings=64)
    tokens_T, documents = row([40], 61)
    with torch.no_grad():
        torch.testing.assert_close(
            ours(hf).logits(tokens_T, documents), unpacked_logits(hf, tokens_T, [40]), atol=3e-5, rtol=1e-5
        )


def test_bfloat16_is_as_close_as_rounding_allows() -> None:
    hf = hugging_face(std=0.1)
    tokens_T, documents = row([30, 12], 61)
    with torch.no_grad():
        exact_TV = unpacked_logits(hf, tokens_T, [30, 12])
        hf = hf.bfloat16()
        theirs = (unpacked_logits(hf, tokens_T, [30, 12]).float() - exact_TV).abs().mean()
        mine = (ours(hf).logits(tokens_T, documents).float() - exact_TV).abs().mean()
    assert mine <= 1.2 * theirs


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden_act": "gelu"},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"attention_dropout": 0.1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_is_not_computed_is_said(settings: dict[str, Any]) -> None:
    assert Qwen3.unsupported(Qwen3Config(**settings))
    assert Qwen3.unsupported(Qwen3Config()) is None


def test_a_row_that_disagrees_with_its_documents_is_refused() -> None:
    _, documents = row([4, 5], 61)
    with pytest.raises(ValueError, match="the row has 8 tokens, its documents 9"):
        ours(hugging_face()).logits(torch.zeros(8, dtype=torch.int32), documents)
