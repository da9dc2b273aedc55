"""Expert parallelism: tokens travel to the ranks that hold their experts, and what comes out travels back.

`Exchange` (moe.py) is the interface. `AllToAll` is the plain torch reference, on any back end; `deepep.py` has fused
kernels. A token goes to a rank once, however many of its experts live there, with its choices and gates; the rank adds
up what its experts say, and the token's own rank adds up the ranks.

What it refuses to know: routers, what experts compute, how their weights are sharded further. Invariants: experts lie
in order, E / ep on each rank; all ranks of the group take part in every exchange, also those that have nothing to send
or are sent nothing, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from spmd_rl.models.moe import Arrived, Exchange, Experts, given_to
from spmd_rl.models.slots import collect, spread

ExchangeMaker = Callable[[dist.ProcessGroup, int], Exchange]  # (ranks that share the experts, number of experts)


def divide_experts(model: nn.Module, ep: DeviceMesh, exchange: ExchangeMaker) -> list[Experts]:
    """Leaves each rank of `ep` its experts; the modules, to be sharded further. Parameters may be on the meta device.

    Raises ValueError when ep does not divide the number of experts.
    """
    modules = [module for module in model.modules() if isinstance(module, Experts)]
    ranks = ep.size()
    for module in modules:
        total = len(module.gate_up_proj)
        if problem := ep_problem(ranks, total):
            raise ValueError(problem)
        share = slice(ep.get_local_rank() * total // ranks, (ep.get_local_rank() + 1) * total // ranks)
        for name, parameter in list(module.named_parameters()):
            divided = DTensor.from_local(parameter.detach()[share], ep, [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
        module.exchange = exchange(ep.get_group(), total)
    return modules


def ep_problem(ep: int, experts: int) -> str:
    """Why a model with so many experts (0: dense) can't be divided over `ep` ranks, with the way out; or empty."""
    if ep == 1 or (experts and experts % ep == 0):
        return ""
    if not experts:
        return f"trainer.parallel.ep = {ep} divides experts, and the model has none of our own making: leave ep at 1"
    fitting = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
    return f"trainer.parallel.ep = {ep} does not divide the model's {experts} experts: set it to one of {fitting}"


@dataclass(frozen=True)
class _WayBack:
    """How results find their tokens."""

    tokens: int
    slot_P: torch.Tensor  # int64: token × ranks + rank, of every sent row
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank


class AllToAll:
    """Exchange by uneven all-to-alls of torch.

    Args:
        group: the ranks that share the experts, in order.
        experts: over all of them.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self._group, self._ranks, self._each = group, group.size(), experts // group.size()

    def dispatch(self, x_TD: torch.Tensor, choice_TK: torch.Tensor, gates_TK: torch.Tensor) -> Arrived:
        """This rank's tokens to the ranks of their experts. Collective."""
        tokens, width = x_TD.shape
        owner_TK = choice_TK // self._each
        goes_TR = torch.zeros(tokens, self._ranks, dtype=torch.bool, device=x_TD.device).scatter_(1, owner_TK, True)
        counts_R2 = torch.stack((goes_TR.sum(0), given_to(owner_TK.flatten(), self._ranks)), 1)
        arriving_R2 = wait_tensor(all_to_all_single(counts_R2, None, None, self._group))
        (sent, _), (received, slots) = (c.T.tolist() for c in torch.stack((counts_R2, arriving_R2)).cpu())
        rank_P, token_P = goes_TR.T.nonzero(as_tuple=True)
        slot_P = token_P * self._ranks + rank_P
        ours_PK = owner_TK[token_P] == rank_P[:, None]
        choice_PK = torch.where(ours_PK, choice_TK[token_P] - rank_P[:, None] * self._each, -1)
        gates_PK = torch.where(ours_PK, spread(gates_TK, slot_P, self._ranks), 0)
        payload_PN = torch.cat((spread(x_TD, slot_P, self._ranks), gates_PK), 1)
        payload_RN = self._exchange(payload_PN, sent, received)
        x_RD, gates_RK = payload_RN.split((width, choice_TK.shape[1]), dim=1)
        choice_RK = self._exchange(choice_PK, sent, received)
        return Arrived(x_RD, choice_RK, gates_RK, sum(slots), _WayBack(tokens, slot_P, sent, received))

    def combine(self, y_RD: torch.Tensor, arrived: Arrived) -> torch.Tensor:
        """Results to the ranks that sent the tokens. Collective."""
        back: _WayBack = arrived.way_back
        y_PD = self._exchange(y_RD, back.received, back.sent)
        return collect(y_PD, back.slot_P, back.tokens, self._ranks)

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return wait_tensor(all_to_all_single(rows.contiguous(), received, sent, self._group))
