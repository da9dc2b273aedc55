"""Tiny random models in Hugging Face format, for tests, quickstarts and benchmarks that need no download.

Every tensor is drawn from a generator of its own, seeded by (seed, name): so the same seed gives the same tensor
whatever else the model holds. No tokenizer is written here.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from spmd_rl.models.build import CUSTOM, hf_named_tensors
from spmd_rl.models.decoder import Decoder

CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
}


def make_tiny(
    folder: str,
    *,
    seed: int,
    vocab_size: int,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ff: int,
    tied: bool = False,
    init_std: float = 0.02,
    architecture: str = "qwen3",
    eos_token_id: int | None = None,
    bos_token_id: int | None = None,
    pad_token_id: int | None = None,
    max_position_embeddings: int = 32768,
    experts: int = 8,
    top_k: int = 2,
    expert_ff: int = 32,
    **more: Any,
) -> str:
    """Write config.json and float32 model.safetensors into `folder` (made if missing) and return it.

    Matrices are normal with standard deviation `init_std`, vectors (norm weights, biases) are 1. `architecture` is a
    model_type of `CLASSES`; `experts`, `top_k` and `expert_ff` count where it has experts; `more` goes into the config
    as it is. Raises ValueError for another architecture, or heads that `kv_heads` does not divide.
    """
    if architecture not in CLASSES:
        raise ValueError(f"make_tiny knows no architecture {architecture!r}; choose {', '.join(CLASSES)}")
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads, got {kv_heads} and {heads}")
    if "moe" in architecture:
        sparse = {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": expert_ff}
        more = sparse | {"norm_topk_prob": True} | more
    if architecture == "qwen2_moe":
        more = {"shared_expert_intermediate_size": expert_ff} | more
    config = AutoConfig.for_model(
        architecture,
        architectures=[CLASSES[architecture]],
        vocab_size=vocab_size,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ff,
        tie_word_embeddings=tied,
        initializer_range=init_std,
        max_position_embeddings=max_position_embeddings,
        eos_token_id=eos_token_id,
        bos_token_id=bos_token_id,
        pad_token_id=pad_token_id,
        dtype="float32",
        **more,
    )
    model = Decoder(CUSTOM[architecture], config, device="meta")
    tensors = {name: _random(tensor, name, seed, init_std) for name, tensor in hf_named_tensors(model)}
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(root)
    special = {"eos_token_id": eos_token_id, "bos_token_id": bos_token_id, "pad_token_id": pad_token_id}
    generation = {name: value for name, value in special.items() if value is not None}
    (root / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    return str(root)


def _random(like: torch.Tensor, name: str, seed: int, std: float) -> torch.Tensor:
    if like.ndim == 1:
        return torch.ones(like.shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.empty(like.shape).normal_(0.0, std, generator=generator)
