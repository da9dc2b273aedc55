"""Random models of transformers, of families that torchtitan computes, and what checkpoints call their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_nextn_predict_layers": 0,
}
SINKS = {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 4}
OF_FAMILY = {"deepseek_v3": LATENT, "gpt_oss": GROUPED | SINKS, "qwen3": GROUPED}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def hugging_face(family: str, **settings: Any) -> Any:
    """A random model, vectors and selection biases too."""
    config = AutoConfig.for_model(family, **COMMON | OF_FAMILY[family] | settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            norm = name.endswith("norm.weight")
            torch.nn.init.normal_(parameter, float(norm), 0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)
    return model.eval()


def folder_of(model: Any, folder: Path) -> str:
    """As transformers writes it."""
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    return str(folder)


def by_checkpoint_name(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the names of transformers' modules, as checkpoints have them: DeepSeek's experts one by one."""
    if model.config.model_type != "deepseek_v3":
        return tensors
    found = {}
    for name, tensor in tensors.items():
        before, stack, kind = name.partition("experts.")
        if not stack or "shared_" in name:
            found[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            if kind == "down_proj":
                found[f"{before}experts.{e}.down_proj.weight"] = matrix
            else:
                parts = zip(("gate", "up"), matrix.chunk(2), strict=True)
                found |= {f"{before}experts.{e}.{part}_proj.weight": rows for part, rows in parts}
    return found
