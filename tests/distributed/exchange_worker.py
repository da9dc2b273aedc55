"""Ranks that exchange tokens for experts in every way there is: `exchange_worker.py OUT`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from spmd_rl.models.deepep import DeepEP
from spmd_rl.models.experts_parallel import AllToAll, ExchangeMaker, divide_experts
from spmd_rl.models.moe import MoE, Routing
from tests.distributed import fake_deep_ep

WIDTH, HIDDEN, EXPERTS, TOP_K = 256, 16, 8, 3
# Tokens of each of four ranks, and the experts they are sent to: None = as the router likes.
CASES: dict[str, tuple[list[int], list[int] | None]] = {
    "uneven": ([7, 1, 12, 5], None),
    "nothing to send": ([7, 0, 3, 0], None),
    "nothing arrives": ([4, 6, 2, 3], [4, 5, 6]),  # ranks 0 and 1 hold experts 0 to 3
    "one expert a rank": ([4, 6, 2, 3], [0, 3, 5]),
}


def layer(dtype: torch.dtype) -> MoE:
    torch.manual_seed(0)
    moe = MoE(0, WIDTH, HIDDEN, EXPERTS, TOP_K, True, dtype)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    return moe


def tokens(case: str, rank: int, dtype: torch.dtype) -> torch.Tensor:
    counts, _ = CASES[case]
    return torch.randn(sum(counts), WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype).split(counts)[rank]


def routing(case: str, count: int) -> Routing | None:
    experts = CASES[case][1]
    return None if experts is None else Routing(torch.tensor(experts).expand(count, 1, TOP_K))


def run(moe: MoE, case: str, x_TD: torch.Tensor) -> dict[str, torch.Tensor]:
    """What comes out, and gradients of a loss that is a sum over tokens."""
    x_TD = x_TD.clone().requires_grad_()
    y_TD = moe(x_TD, routing(case, len(x_TD)))
    (y_TD.float().sin()).sum().backward()
    grads = {name: parameter.grad for name, parameter in moe.named_parameters()}
    local = {name: grad.to_local() if hasattr(grad, "to_local") else grad for name, grad in grads.items()}
    return {"y": y_TD.detach(), "x": x_TD.grad} | local


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fake = ModuleType("deep_ep")
    fake.ElasticBuffer, fake.topk_idx_t = fake_deep_ep.ElasticBuffer, fake_deep_ep.topk_idx_t
    sys.modules["deep_ep"] = fake
    ep = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    makers: dict[str, tuple[ExchangeMaker, torch.dtype]] = {
        "torch": (AllToAll, torch.float32),
        "torch bfloat16": (AllToAll, torch.bfloat16),
        "deepep": (DeepEP(32), torch.bfloat16),
        "deepep in pieces": (DeepEP(2, chunked=True), torch.bfloat16),
    }
    results = {}
    for name, (maker, dtype) in makers.items():
        for case in CASES:
            moe = layer(dtype)
            divide_experts(moe, ep, maker)
            results[name, case] = run(moe, case, tokens(case, dist.get_rank(), dtype))
    results["buffers"] = fake_deep_ep.ElasticBuffer.made
    torch.save(results, Path(out) / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
