"""Any `AutoModelForCausalLM` of transformers, behind the interface of our own models.

One forward of its decoder over the packed row: position ids that restart tell transformers where documents begin, and
its own masks (sliding windows included) keep them apart; the head is ours. Not every family can do that: recurrent
states and absolute positions leak over document borders, and some heads do more than a matrix product. So
`check_packing` tries it on two short documents, and refuses the model class by name. What it refuses to know: families.

Invariants: parameter names are those of the Hugging Face state dict; dropout is always off, because the policy
that is trained must be the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from spmd_rl.models import conversion
from spmd_rl.models.conversion import Wire
from spmd_rl.models.lm_head import token_logprobs
from spmd_rl.models.packed import Documents

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of hidden states, relative to their root mean square


class HFModel(nn.Module):
    """A transformers causal language model on packed rows."""

    def __init__(self, hf: Any, lm_head_chunk: int = 1024) -> None:
        super().__init__()
        head = hf.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            why = "no output embeddings" if head is None else "a bias in its output embeddings"
            raise ValueError(f"{type(hf).__name__} has {why}, which the chunked LM head cannot compute")
        self.hf = hf.eval()
        self.lm_head_chunk = lm_head_chunk

    def train(self, mode: bool = True) -> HFModel:
        """Keep the inner model in evaluation mode: no dropout."""
        super().train(mode)
        self.hf.eval()
        return self

    def wires(self) -> Iterator[Wire]:
        """Its parameters and buffers, as they are in transformers' state dict."""
        return conversion.wires(self, rename=lambda name: name.removeprefix("hf."))

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers: the modules that transformers itself would not split, else the longest module list."""
        names = set(getattr(self.hf, "_no_split_modules", None) or ())
        blocks = [module for module in self.hf.modules() if type(module).__name__ in names]
        if blocks:
            return blocks
        lists = [module for module in self.hf.modules() if isinstance(module, nn.ModuleList)]
        return list(max(lists, key=len, default=[]))

    def forward(
        self, tokens_T: torch.Tensor, documents: Documents, targets_T: torch.Tensor, temperatures_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log p(target), entropy), float32[T] each, of the distribution after every token of the row."""
        hidden_TD = self.hidden(tokens_T, documents)
        weight_VD = self.hf.get_output_embeddings().weight
        return token_logprobs(hidden_TD, weight_VD, targets_T, temperatures_T, self.lm_head_chunk)

    def logits(self, tokens_T: torch.Tensor, documents: Documents) -> torch.Tensor:
        """All logits [T, V], for comparisons on short rows."""
        return self.hf.get_output_embeddings()(self.hidden(tokens_T, documents))

    def hidden(self, tokens_T: torch.Tensor, documents: Documents) -> torch.Tensor:
        """Hidden states [T, D] after the final norm."""
        if len(tokens_T) != documents.tokens:
            raise ValueError(f"the row has {len(tokens_T)} tokens, its documents {documents.tokens}")
        # Without a cache and without an attention mask transformers reads the documents off the position ids.
        decoded = self.hf.base_model(
            input_ids=tokens_T[None].long(), position_ids=documents.positions_T[None], use_cache=False
        )
        return decoded.last_hidden_state[0]

    @torch.no_grad()
    def check_packing(self) -> None:
        """Try the model on two short documents, packed and apart. Raises ValueError naming its class if it differs."""
        name, device = type(self.hf).__name__, self.hf.get_output_embeddings().weight.device
        vocab = self.hf.get_output_embeddings().weight.shape[0]
        tokens_T = (torch.arange(16, device=device) * 7 + 3) % vocab
        other_T = torch.cat((tokens_T[:5].flip(0), tokens_T[5:]))
        packed = Documents.build(np.array([0, 5, 16]), device)
        try:
            hidden_TD = self.hidden(tokens_T, packed)
            leaked_TD = self.hidden(other_T, packed)
            alone_TD = self.hidden(tokens_T[5:], Documents.build(np.array([0, 11]), device))
        except TypeError as error:
            raise ValueError(f"{name} cannot be trained on packed rows: {error}") from error
        tolerance = TOLERANCE[hidden_TD.dtype] * hidden_TD.float().pow(2).mean().sqrt()
        for what, other_TD in (("sees the document before it", leaked_TD[5:]), ("depends on packing", alone_TD)):
            error = (hidden_TD[5:].float() - other_TD.float()).abs().max()
            if not error <= tolerance:
                raise ValueError(
                    f"{name} cannot be trained on packed rows: a document {what} (hidden states differ by "
                    f"{error:.1e}); choose another model family, such as Qwen3 or Llama"
                )
        self._check_head(tokens_T, name)

    def _check_head(self, tokens_T: torch.Tensor, name: str) -> None:
        """What leaves the head's matrix product must be the logits: no soft cap, no scale after it."""
        head = self.hf.get_output_embeddings()
        ramp = torch.linspace(-100, 100, head.weight.shape[0], device=tokens_T.device, dtype=head.weight.dtype)
        seen: list[torch.Tensor] = []

        def replace(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            seen.append(args[0])
            return ramp.expand_as(output)

        hook = head.register_forward_hook(replace)
        try:
            logits = self.hf(input_ids=tokens_T[None], use_cache=False).logits
        finally:
            hook.remove()
        hidden_TD = self.hidden(tokens_T, Documents.build(np.array([0, len(tokens_T)]), tokens_T.device))
        same_output = torch.equal(logits[0].to(ramp.dtype), ramp.expand_as(logits[0]))
        same_input = torch.allclose(seen[0][0], hidden_TD, rtol=0, atol=TOLERANCE[hidden_TD.dtype])
        if not (same_output and same_input):
            raise ValueError(f"{name} scales or caps its logits, which the chunked LM head does not compute")
