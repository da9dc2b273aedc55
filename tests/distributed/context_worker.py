"""Ranks that share rows: `context_worker.py OUT`. Attention and gathering, forward and backward, against whole rows.

First the two behind rank 0, as the trainer ranks of a run, then all three. What goes wrong is in OUT/rank{r}.json.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.models.attention import attend
from spmd_rl.models.context import ContextParallel, bytes_per_layer
from spmd_rl.models.packed import Documents
from spmd_rl.trainer.parallel import TrainerMeshes
from spmd_rl.world.groups import as_default
from spmd_rl.world.trainer_mesh import TrainerDims

HEAD_DIM = 8
# Lengths of documents; (query heads, key-value heads). Rows of 1 and 2 tokens leave ranks without any.
ROWS = [[24], [7, 17], [1], [2], [5, 1, 1, 9, 3, 14], [3, 31], [600, 70, 3, 351], [1] * 9, [40, 1]]
HEADS = [(12, 12), (12, 4), (12, 6), (12, 1)]


def case(rows: list[int], heads: tuple[int, int], dtype: torch.dtype) -> tuple[Documents, list[torch.Tensor]]:
    """The row's documents, and queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(sum(rows) + heads[1])
    widths = (heads[0], heads[1], heads[1], heads[0])
    columns = [torch.randn(sum(rows), width, HEAD_DIM, generator=generator).to(dtype) for width in widths]
    return Documents.build(np.cumsum([0, *rows])), columns


def whole(documents: Documents, columns: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients of one rank."""
    q, k, v = (column.clone().requires_grad_() for column in columns[:3])
    out = attend(q, k, v, documents, "sdpa")
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), columns[3])]


def check(context: ContextParallel, documents: Documents, columns: list[torch.Tensor], tolerance: float) -> list[str]:
    """What differs from one rank, on this rank."""
    share = context.share(documents)
    q, k, v = (column[share.places_N].requires_grad_() for column in columns[:3])
    out = attend(q, k, v, share, "sdpa")
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), columns[3][share.places_N])]
    expected = [tensor[share.places_N] for tensor in whole(documents, columns)]
    wrong = []
    for name, mine, theirs in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        if mine.dtype != theirs.dtype or not torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance):
            wrong.append(f"{name} differs by {(mine - theirs).abs().max()}")
    return wrong


def check_gathering(context: ContextParallel, documents: Documents) -> list[str]:
    """Columns come back in the row's order, and a gradient of the whole row goes to whom it belongs."""
    share = context.share(documents)
    first_T = torch.arange(documents.tokens, dtype=torch.float32)
    one, two, three = (column[share.places_N].requires_grad_() for column in (first_T, first_T * 2, first_T * 3))
    whole_one, whole_two, _ = share.gather(one, two, three)
    wrong = [] if torch.equal(whole_one, first_T) and torch.equal(whole_two, first_T * 2) else ["gathered wrongly"]
    ((whole_one * first_T).sum() + whole_two.sum()).backward()
    good = torch.equal(one.grad, first_T[share.places_N]) and torch.equal(two.grad, torch.ones_like(two))
    return wrong + ([] if good and three.grad is None else ["gradients went wrong"])


def check_bytes(context: ContextParallel, heads: tuple[int, int]) -> list[str]:
    """What was sent is what the formula says."""
    tokens = 12 * context.size
    documents, columns = case([tokens], heads, torch.float32)
    share = context.share(documents)
    q, k, v = (column[share.places_N].requires_grad_() for column in columns[:3])
    before = context.sent_bytes
    out = attend(q, k, v, share, "sdpa")
    between = context.sent_bytes
    out.sum().backward()
    found = (between - before, context.sent_bytes - between)
    expected = bytes_per_layer(context.style, tokens, context.size, *heads, HEAD_DIM, 4)
    return [] if found == expected else [f"sent {found}, expected {expected}"]


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wrong = []
    everybody, trainers = dist.group.WORLD, dist.new_group([1, 2])
    trains = dist.get_rank() > 0
    with as_default(trainers) if trains else nullcontext():
        cp = TrainerMeshes.build(TrainerDims(cp=2), "cpu").cp if trains else None
    for size, group in ((2, cp and cp.get_group()), (3, everybody)):
        if group is None:
            continue
        for style in ("ulysses", "ring"):
            context = ContextParallel(group, style)
            for rows in ROWS:
                wrong += [
                    f"{style} {size} {rows}: {what}"
                    for what in check_gathering(context, case(rows, (1, 1), torch.float32)[0])
                ]
                for heads in HEADS:
                    documents, columns = case(rows, heads, torch.float64)
                    wrong += [
                        f"{style} {size} {rows} {heads}: {what}" for what in check(context, documents, columns, 1e-10)
                    ]
            documents, columns = case(ROWS[4], HEADS[1], torch.bfloat16)
            wrong += [f"{style} {size} bfloat16: {what}" for what in check(context, documents, columns, 0.06)]
            for heads in HEADS:
                wrong += [f"{style} {size} {heads}: {what}" for what in check_bytes(context, heads)]
    (Path(out) / f"rank{dist.get_rank()}.json").write_text(json.dumps(wrong))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
