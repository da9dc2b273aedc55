"""Random models of every family as Hugging Face has them, ours with the same weights, and rows for both."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spmd_rl.models import conversion
from spmd_rl.models.build import CUSTOM
from spmd_rl.models.decoder import Decoder
from spmd_rl.models.packed import Documents

SPARSE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "qwen3_moe": SPARSE,
    "qwen2_moe": SPARSE | {"shared_expert_intermediate_size": 20},
}


def hugging_face(family: str = "qwen3", heads: tuple[int, int] = (4, 2), std: float = 0.3, **settings: Any) -> Any:
    """A random model whose norms and biases are random too, with weights large enough for errors to show."""
    given = {"vocab_size": 61, "hidden_size": 16, "head_dim": 8} | OF_FAMILY[family] | settings
    config = AutoConfig.for_model(
        family,
        num_hidden_layers=2,
        intermediate_size=20,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        initializer_range=std,
        **given,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        elif name.endswith("gate.weight"):  # far apart, so that no rounding decides who is chosen
            torch.nn.init.normal_(parameter, 0.0, 2.0)
    return model.eval()


def ours(hf: Any, chunk: int = 8) -> Decoder:
    """The same weights: transformers' modules have our names and layouts."""
    model = Decoder(CUSTOM[hf.config.model_type], hf.config, lm_head_chunk=chunk, dtype=hf.dtype)
    model.load_state_dict(hf.state_dict())
    return model


def row(lengths: list[int], vocab: int = 61) -> tuple[torch.Tensor, Documents]:
    """Random tokens in documents of these lengths."""
    torch.manual_seed(1)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return torch.randint(0, vocab, (sum(lengths),), dtype=torch.int32), Documents.build(cu_seqlens)


def unpacked_logits(hf: Any, tokens_T: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Hugging Face's, one document at a time."""
    return torch.cat([hf(input_ids=part[None].long()).logits[0] for part in tokens_T.split(lengths)])


def checkpoint(hf: Any) -> dict[str, torch.Tensor]:
    """The tensors as Hugging Face's checkpoints name them, made here and not by the code under test."""
    tensors = {}
    for name, tensor in hf.state_dict().items():
        before, stack, _ = name.partition("experts.")
        if not stack:
            tensors[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            if name.endswith("down_proj"):
                tensors[f"{before}experts.{e}.down_proj.weight"] = matrix
            else:
                gate, up = matrix.chunk(2)
                tensors |= {f"{before}experts.{e}.gate_proj.weight": gate, f"{before}experts.{e}.up_proj.weight": up}
    if hf.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    return {name: tensor.clone() for name, tensor in tensors.items()}


def wires(model: Decoder) -> list[conversion.Wire]:
    """Its parameters and checkpoint names."""
    return list(conversion.wires(model, model.family.conversion))
