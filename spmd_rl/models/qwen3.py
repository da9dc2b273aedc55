"""Dense Qwen3 on packed rows, with Hugging Face's parameter names, so that conversion is the identity.

Tokens lie in one row without a batch dimension; only attention and positions know about documents. The language-model
head is computed inside `forward`, so that whoever shards the root module also sees the head's weight being used.
What it refuses to know: key-value caches, generation, losses, ranks. Invariants: parameter names and shapes are those
of `transformers.Qwen3ForCausalLM`; float32 logits equal its logits; there are no buffers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spmd_rl.models.attention import attend
from spmd_rl.models.lm_head import token_logprobs
from spmd_rl.models.packed import Documents

ROPE_TYPES = ("default", "linear", "yarn", "llama3")  # those whose frequencies do not depend on the sequence


class Qwen3(nn.Module):
    """Qwen3ForCausalLM. `config` is a `transformers.Qwen3Config`; parameters are uninitialised."""

    def __init__(
        self,
        config: Any,
        backend: str = "sdpa",
        lm_head_chunk: int = 1024,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config
        self.lm_head_chunk = lm_head_chunk
        self.inv_freq_h, self.rope_scale = rope_frequencies(config)  # plain attributes: never cast, never saved
        with torch.device(device):
            self.model = Decoder(config, backend, dtype)
            self.lm_head = linear(config.hidden_size, config.vocab_size, False, dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @staticmethod
    def unsupported(config: Any) -> str | None:
        """Why this file cannot compute `config`'s model, or None."""
        if config.hidden_act != "silu":
            return f"hidden_act {config.hidden_act!r}"
        if "sliding_attention" in config.layer_types:
            return "sliding-window attention"
        if config.attention_dropout:
            return "attention dropout"
        if config.rope_parameters["rope_type"] not in ROPE_TYPES:
            return f"rope type {config.rope_parameters['rope_type']!r}"
        return None

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules that are sharded, recomputed or compiled one by one."""
        return list(self.model.layers)

    def forward(
        self, tokens_T: torch.Tensor, documents: Documents, targets_T: torch.Tensor, temperatures_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log p(target), entropy), float32[T] each, of the distribution after every token of the row."""
        hidden_TD = self.hidden(tokens_T, documents)
        return token_logprobs(hidden_TD, self.lm_head.weight, targets_T, temperatures_T, self.lm_head_chunk)

    def logits(self, tokens_T: torch.Tensor, documents: Documents) -> torch.Tensor:
        """All logits [T, V], for comparisons on short rows."""
        return self.lm_head(self.hidden(tokens_T, documents))

    def hidden(self, tokens_T: torch.Tensor, documents: Documents) -> torch.Tensor:
        """Hidden states [T, D] after the final norm."""
        if len(tokens_T) != documents.tokens:
            raise ValueError(f"the row has {len(tokens_T)} tokens, its documents {documents.tokens}")
        angles_Th = documents.positions_T[:, None].float() * self.inv_freq_h.to(tokens_T.device)
        dtype = self.model.embed_tokens.weight.dtype
        cos_T1h = (angles_Th.cos() * self.rope_scale).to(dtype)[:, None]
        sin_T1h = (angles_Th.sin() * self.rope_scale).to(dtype)[:, None]
        return self.model(tokens_T, cos_T1h, sin_T1h, documents)


class Decoder(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, config: Any, backend: str, dtype: torch.dtype) -> None:
        super().__init__()
        weight_VD = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self.embed_tokens = nn.Embedding.from_pretrained(weight_VD, freeze=False)
        self.layers = nn.ModuleList([Block(config, backend, dtype) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(
        self, tokens_T: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor, documents: Documents
    ) -> torch.Tensor:
        x_TD = self.embed_tokens(tokens_T)
        for layer in self.layers:
            x_TD = layer(x_TD, cos_T1h, sin_T1h, documents)
        return self.norm(x_TD)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, config: Any, backend: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = Attention(config, backend, dtype)
        self.mlp = FeedForward(config, dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(
        self, x_TD: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor, documents: Documents
    ) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos_T1h, sin_T1h, documents)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys and rotary positions."""

    def __init__(self, config: Any, backend: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.backend = backend
        width, bias = config.hidden_size, config.attention_bias
        q_width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = linear(width, q_width, bias, dtype)
        self.k_proj = linear(width, kv_width, bias, dtype)
        self.v_proj = linear(width, kv_width, bias, dtype)
        self.o_proj = linear(q_width, width, bias, dtype)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype)

    def forward(
        self, x_TD: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor, documents: Documents
    ) -> torch.Tensor:
        q_THd, k_TKd, v_TKd = (
            proj(x_TD).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_THd = rotate(self.q_norm(q_THd), cos_T1h, sin_T1h)
        k_TKd = rotate(self.k_norm(k_TKd), cos_T1h, sin_T1h)
        return self.o_proj(attend(q_THd, k_TKd, v_TKd, documents, self.backend).flatten(1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size, False, dtype)
        self.up_proj = linear(config.hidden_size, config.intermediate_size, False, dtype)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, False, dtype)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32, rounded before the weight is applied."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    """An uninitialised linear layer: weights always come from a folder, random numbers for them would be wasted."""
    return nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, dtype=dtype, device=torch.get_default_device())


def rotate(x_THd: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (arXiv 2104.09864) on halves: (a, b) -> (a cos - b sin, b cos + a sin)."""
    a_THh, b_THh = x_THd.chunk(2, dim=-1)
    return torch.cat((a_THh * cos_T1h - b_THh * sin_T1h, b_THh * cos_T1h + a_THh * sin_T1h), dim=-1)


def rope_frequencies(config: Any) -> tuple[torch.Tensor, float]:
    """(inverse frequencies float32[head_dim / 2], factor on cos and sin) of the config's rope parameters."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)), 1.0
