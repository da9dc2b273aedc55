"""Tiny random models in Hugging Face format, for tests, quickstarts and benchmarks that need no download.

Every tensor is drawn from a generator of its own, seeded by (seed, name): so the same seed gives the same tensor
whatever else the model holds. No tokenizer is written here.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from spmd_rl.models.qwen3 import Qwen3


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
) -> str:
    """Write config.json and float32 model.safetensors into `folder` (made if missing) and return it.

    Matrices are normal with standard deviation `init_std`, norm weights are 1. Raises ValueError for an architecture
    that is not "qwen3", or heads that `kv_heads` does not divide.
    """
    if architecture != "qwen3":
        raise ValueError(f"make_tiny knows no architecture {architecture!r}; choose qwen3")
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads, got {kv_heads} and {heads}")
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
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
    )
    tensors = {
        name: _random(parameter, name, seed, init_std)
        for name, parameter in Qwen3(config, device="meta").named_parameters()
    }
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
