"""A causal decoder on packed rows, told by a family what its blocks are made of.

Tokens lie in one row without a batch dimension; only attention and positions know about documents. The language-model
head is computed inside `forward`, so that whoever shards the root module also sees the head's weight being used.
What it refuses to know: key-value caches, generation, losses, ranks. Invariants: parameter names are Hugging Face's;
float32 logits equal its logits; there are no buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spmd_rl.models import conversion
from spmd_rl.models.context import ContextParallel, Share
from spmd_rl.models.conversion import Stacked, Wire
from spmd_rl.models.layers import Attention, FeedForward, RMSNorm, Rotary, linear, rope_frequencies
from spmd_rl.models.lm_head import token_logprobs
from spmd_rl.models.moe import MoE, Routing
from spmd_rl.models.packed import Documents


@dataclass(frozen=True)
class Family:
    """What the models of one `model_type` have of their own. `config` is their transformers config."""

    model_type: str
    unsupported: Callable[[Any], str | None]  # (config): why this family's file can't compute the model, or None
    attention: Callable[[Any, str, torch.dtype], Attention]  # (config, back end, dtype)
    feed_forward: Callable[[Any, int, torch.dtype], FeedForward | MoE]  # (config, index of the layer, dtype)
    conversion: tuple[Stacked, ...] = ()  # parameters that Hugging Face stores in another way than one by one


class Decoder(nn.Module):
    """A causal language model of a family; parameters are uninitialised."""

    def __init__(
        self,
        family: Family,
        config: Any,
        backend: str = "sdpa",
        lm_head_chunk: int = 1024,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.family, self.config = family, config
        self.lm_head_chunk = lm_head_chunk
        self.context: ContextParallel | None = None  # where ranks share rows, `forward` takes whole ones and cuts them
        self.inv_freq_h, self.rope_scale = rope_frequencies(config)  # plain attributes: never cast, never saved
        with torch.device(device):
            self.model = Stack(family, config, backend, dtype)
            self.lm_head = linear(config.hidden_size, config.vocab_size, False, dtype)
        self.tie()

    def materialize(self, device: torch.device | str) -> None:
        """Gives the parameters memory, but no values, sharded or whole."""
        self.to_empty(device=device)
        self.tie()

    def tie(self) -> None:
        """Makes one parameter of both embeddings, where the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules that are sharded, recomputed or compiled one by one."""
        return list(self.model.layers)

    def wires(self) -> Iterator[Wire]:
        """Its parameters, and the checkpoint tensors that they are made of."""
        return conversion.wires(self, self.family.conversion)

    @property
    def moe_layers(self) -> list[MoE]:
        """The layers with experts, in order; none in a dense model."""
        return [block.mlp for block in self.model.layers if isinstance(block.mlp, MoE)]

    def forward(
        self,
        tokens_T: torch.Tensor,
        documents: Documents,
        targets_T: torch.Tensor,
        temperatures_T: torch.Tensor,
        routing: Routing | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log p(target), entropy), float32[T] each, of the distribution after every token of the row."""
        if self.context is None:
            return self._logprobs(tokens_T, documents, targets_T, temperatures_T, routing)
        share = self.context.share(documents)
        if routing is not None:
            routing = routing.at(share.places_N, self.context.group)
        tokens_N, targets_N, temperatures_N = (x_T[share.places_N] for x_T in (tokens_T, targets_T, temperatures_T))
        return share.gather(*self._logprobs(tokens_N, share, targets_N, temperatures_N, routing))

    def _logprobs(
        self,
        tokens_T: torch.Tensor,
        documents: Documents | Share,
        targets_T: torch.Tensor,
        temperatures_T: torch.Tensor,
        routing: Routing | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` on the tokens that this rank holds."""
        hidden_TD = self.hidden(tokens_T, documents, routing)
        return token_logprobs(hidden_TD, self.lm_head.weight, targets_T, temperatures_T, self.lm_head_chunk)

    def logits(self, tokens_T: torch.Tensor, documents: Documents, routing: Routing | None = None) -> torch.Tensor:
        """All logits [T, V], for comparisons on short rows."""
        return self.lm_head(self.hidden(tokens_T, documents, routing))

    def hidden(
        self, tokens_T: torch.Tensor, documents: Documents | Share, routing: Routing | None = None
    ) -> torch.Tensor:
        """Hidden states [T, D] after the final norm, of a whole row or of this rank's share of it."""
        if len(tokens_T) != documents.tokens:
            raise ValueError(f"the row has {len(tokens_T)} tokens, its documents {documents.tokens}")
        if routing is not None:
            routing.check(len(tokens_T), self.config, [layer.layer for layer in self.moe_layers])
        dtype = self.model.embed_tokens.weight.dtype
        rotary = Rotary.build(documents.positions_T, self.inv_freq_h, self.rope_scale, dtype)
        return self.model(tokens_T, rotary, documents, routing)


class Stack(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, family: Family, config: Any, backend: str, dtype: torch.dtype) -> None:
        super().__init__()
        weight_VD = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self.embed_tokens = nn.Embedding.from_pretrained(weight_VD, freeze=False)
        self.layers = nn.ModuleList(
            [Block(family, config, layer, backend, dtype) for layer in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(
        self, tokens_T: torch.Tensor, rotary: Rotary, documents: Documents | Share, routing: Routing | None
    ) -> torch.Tensor:
        x_TD = self.embed_tokens(tokens_T)
        for layer in self.layers:
            x_TD = layer(x_TD, rotary, documents, routing)
        return self.norm(x_TD)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, family: Family, config: Any, layer: int, backend: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = family.attention(config, backend, dtype)
        self.mlp = family.feed_forward(config, layer, dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(
        self, x_TD: torch.Tensor, rotary: Rotary, documents: Documents | Share, routing: Routing | None
    ) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), rotary, documents)
        normed_TD = self.post_attention_layernorm(x_TD)
        if isinstance(self.mlp, MoE):
            return x_TD + self.mlp(normed_TD, routing)
        return x_TD + self.mlp(normed_TD)
