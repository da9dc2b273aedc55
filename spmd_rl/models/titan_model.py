"""A model of torchtitan on packed rows, behind the interface of our own models.

Built from a Hugging Face folder without memory, so that it can be sharded first and every rank reads only its part.
Documents go through torchtitan's decoder where it expects attention masks, to an attention of ours; the head is ours.
What it refuses to know: families (`titan_families.py`), files, ranks.

Invariants: names of wires are those of Hugging Face's checkpoints; the decoder is always in evaluation mode, so it
neither counts tokens of experts nor moves their selection biases: these leave as they came.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spmd_rl.models import conversion
from spmd_rl.models.lm_head import token_logprobs
from spmd_rl.models.packed import Documents

if TYPE_CHECKING:
    from spmd_rl.models.titan_families import TitanFamily

OUTSIDE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm"}  # of the layers: torchtitan's, Hugging Face's
CURE = (
    "pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 (with Triton, which they need too), or the extra titan"
)


def titan_family(folder: str, config: Any) -> TitanFamily:
    """How torchtitan computes the folder's model.

    Raises ValueError naming the folder: torchtitan is not installed, has no such family here, or can't express a field.
    """
    try:
        from spmd_rl.models.titan_families import FAMILIES
    except ImportError as error:
        raise ValueError(
            f"model folder {folder!r}: trainer.model.impl = titan needs torchtitan ({error}): {CURE}"
        ) from error
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"model folder {folder!r}: trainer.model.impl = titan has no model type {config.model_type!r} (it has "
            f"{', '.join(FAMILIES)}); use impl = auto"
        )
    if problem := family.unsupported(config):
        raise ValueError(
            f"model folder {folder!r}: torchtitan's {config.model_type} can't express {problem}; use impl = auto"
        )
    return family


class TitanModel(nn.Module):
    """A torchtitan decoder on packed rows. It takes no memory before `materialize`."""

    def __init__(
        self,
        family: TitanFamily,
        config: Any,
        backend: str,
        lm_head_chunk: int = 1024,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.family, self.lm_head_chunk = family, lm_head_chunk
        layers, further = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
        # What predicts further tokens serves speculative decoding, and is neither trained nor exported.
        self.ignored = tuple(f"model.layers.{layer}." for layer in range(layers, layers + further))
        self._settings = family.translate(config, backend)
        with torch.device("meta"):
            self.decoder = self._settings.build()
            self._share_rope()
        self.lm_head, self.decoder.lm_head = self.decoder.lm_head, None
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        self.decoder.eval()
        # torchtitan's router asks for float32 by autocast, which the CPU does not know; our gate is in float32 anyway.
        warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype is not supported")

    def materialize(self, device: torch.device | str) -> None:
        """Gives the parameters memory, but no values, sharded or whole; and the positions their table."""
        self.to_empty(device=device)
        with torch.device(device):
            self._share_rope()

    def _share_rope(self) -> None:
        """One table of positions for all layers, instead of one each."""
        rope = self._settings.first_attention.rope.build()
        for layer in self.blocks:
            layer.attention.rope = rope

    def train(self, mode: bool = True) -> TitanModel:
        """Keep the decoder in evaluation mode."""
        super().train(mode)
        self.decoder.eval()
        return self

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers."""
        return list(self.decoder.layers.values())

    def wires(self) -> Iterator[conversion.Wire]:
        """As `conversion.wires`, by Hugging Face's names; selection biases last."""
        return conversion.wires(self, self.family.stacked, self._hf_name)

    def _hf_name(self, name: str) -> str:
        name = name.removeprefix("decoder.")
        if not name.startswith("layers."):
            head, _, rest = name.partition(".")
            return f"{OUTSIDE.get(head, head)}.{rest}"
        _, layer, inside = name.split(".", 2)
        (mine,) = (known for known in self.family.names if f"{inside}.".startswith(f"{known}."))
        return f"model.layers.{layer}.{self.family.names[mine]}{inside.removeprefix(mine)}"

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
        return self.decoder(tokens_T[None].long(), documents.positions_T[None], documents)[0]
