"""The critic: a value for every token, advantages from values, and its own optimizer.

The network is a second model of the policy's architecture, begun from the policy's folder, with a scalar head that
begins at 0. It refuses to know about the policy's loss. Methods are collective over the trainer ranks.

    δ_t = r_t + γ V_{t+1} − V_t,  A_t = Σ_l (γλ)^l δ_{t+l},  return_t = A_t + V_t     (GAE, arXiv 1506.02438)

over the sampled tokens of a document: V_t is the value *before* the t-th sampled token, and 0 after the last one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmd_rl.config.tree import CriticConfig, OptimConfig
from spmd_rl.models.context import Share
from spmd_rl.models.packed import Documents
from spmd_rl.rollouts.types import Row
from spmd_rl.trainer.optim import clip_gradients, gradient_norm, make_optimizer
from spmd_rl.trainer.parallel import TrainerMeshes, last_backward, parallelize, reshard
from spmd_rl.trainer.row_tensors import RowTensors, tensor


class ValueModel(nn.Module):
    """A decoder with a scalar in the language model head's place."""

    def __init__(self, decoder: nn.Module, width: int, device: torch.device) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = nn.Linear(width, 1, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules that are sharded one by one."""
        return self.decoder.blocks

    def forward(self, tokens_T: Tensor, documents: Documents) -> Tensor:
        """The value after every token, float32[T]."""
        context = getattr(self.decoder, "context", None)
        if context is None:
            return self._values(tokens_T, documents)
        share = context.share(documents)
        return share.gather(self._values(tokens_T[share.places_N], share))[0]

    def _values(self, tokens_T: Tensor, documents: Documents | Share) -> Tensor:
        """`forward` on the tokens that this rank holds."""
        return self.head(self.decoder.hidden(tokens_T, documents)).squeeze(-1).float()


class Critic:
    """One trainer rank's share of the critic.

    Args:
        decoder: a model of its own, not sharded yet.
        width: of its hidden states.
        group: the trainer ranks; None for one.
        counts: this rank counts its rows in sums over ranks; of those that share rows one does.
        finish: gives the decoder values, once it is sharded.
    """

    def __init__(
        self,
        decoder: nn.Module,
        width: int,
        config: CriticConfig,
        optim: OptimConfig,
        meshes: TrainerMeshes | None,
        device: torch.device,
        dtype: str,
        group: dist.ProcessGroup | None,
        keep_gathered: bool = False,
        counts: bool = True,
        finish: Callable[[nn.Module], None] = lambda decoder: None,
    ) -> None:
        self.config, self.device, self._group, self._max_norm = config, device, group, optim.max_norm
        self._counts = counts
        self.model = ValueModel(decoder, width, device)
        parallelize(self.model, meshes, dtype, keep_gathered)
        finish(decoder)
        self.optimizer = make_optimizer(self.model.parameters(), optim)

    @torch.no_grad()
    def values(self, row: RowTensors) -> Tensor:
        """float32[T]: what the critic expects before every target."""
        values_T = self.model(row.tokens_T, row.documents)
        reshard(self.model)
        return values_T

    def advantages(self, rows: list[Row], tensors: list[RowTensors], normalise: bool) -> list[tuple[Tensor, Tensor]]:
        """(advantages, returns), float32[T] each, of every row of this rank; normalised over all ranks' tokens."""
        pairs, counts = [], torch.zeros(3, dtype=torch.float64, device=self.device)
        for row, row_tensors in zip(rows, tensors, strict=True):
            values_T = self.values(row_tensors).cpu().numpy()
            rewards_T = np.zeros(len(row.tokens), np.float32) if row.rewards is None else row.rewards
            advantages_T = gae(values_T, rewards_T, row.mask, row.cu_seqlens, self.config.gamma, self.config.lam)
            pairs.append((advantages_T, advantages_T + values_T))
            sampled = advantages_T[row.mask != 0]
            counts += torch.tensor([len(sampled), sampled.sum(), (sampled**2).sum()], dtype=torch.float64).to(counts)
        if normalise:
            self._add_up(counts)
            count, total, squares = counts.tolist()
            mean = total / max(1.0, count)
            std = max(0.0, squares / max(1.0, count) - mean**2) ** 0.5 + 1e-6
            pairs = [((a - mean) / std, returns) for a, returns in pairs]
        return [tuple(tensor(column, torch.float32, self.device) for column in pair) for pair in pairs]

    def step(self, rows: list[RowTensors], returns: list[Tensor], weights: list[Tensor]) -> dict[str, float]:
        """One optimizer step on ½ Σ weight · (V − return)². Returns the loss and the explained part of returns."""
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        for number, (row, returns_T, weights_T) in enumerate(zip(rows, returns, weights, strict=True), 1):
            last_backward(self.model, number == len(rows))
            errors_T = self.model(row.tokens_T, row.documents) - returns_T
            loss = (0.5 * weights_T * errors_T.square()).double().sum()
            loss.backward()
            with torch.no_grad():
                wide_T, squares_T = weights_T.double(), errors_T.double().square()
                parts = ((wide_T * squares_T).sum() / 2, wide_T.sum(), (wide_T * returns_T).sum())
                sums += torch.stack([*parts, (wide_T * returns_T.double().square()).sum()])
        self._add_up(sums)
        parameters = list(self.model.parameters())
        norm = gradient_norm(parameters)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient norm of the critic is {norm.item()}; its weights were not changed")
        clip_gradients(parameters, norm, self._max_norm)
        self.optimizer.step()
        loss, total, mean, squares = sums.tolist()
        variance = squares / max(total, 1e-30) - (mean / max(total, 1e-30)) ** 2
        explained = 1 - 2 * loss / (total * variance) if total * variance > 0 else 0.0
        return {"critic/loss": loss, "critic/grad_norm": norm.item(), "critic/explained_variance": explained}

    def _add_up(self, sums: Tensor) -> None:
        """Over all ranks, in place."""
        if self._group is not None:
            if not self._counts:
                sums.zero_()
            dist.all_reduce(sums, group=self._group)


def gae(
    values_T: np.ndarray, rewards_T: np.ndarray, mask_T: np.ndarray, cu_seqlens: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """Generalised advantage estimates, float32[T]; 0 on tokens that were not sampled.

    What the environment says in between takes no time: the next value is that of the next sampled token.
    """
    places = np.flatnonzero(mask_T)
    advantages_T = np.zeros(len(values_T), np.float32)
    document_N = np.searchsorted(cu_seqlens, places, side="right")
    next_advantage = next_value = 0.0
    for n in range(len(places) - 1, -1, -1):
        if n + 1 == len(places) or document_N[n + 1] != document_N[n]:
            next_advantage = next_value = 0.0
        t = places[n]
        delta = rewards_T[t] + gamma * next_value - values_T[t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = float(values_T[t])
        advantages_T[t] = next_advantage
    return advantages_T
