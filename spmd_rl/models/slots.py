"""Tokens copied to slots and slots added up to tokens: the two moves around experts, each the other's gradient.

Every token has `each` slots (one per choice, or one per rank), numbered token by token; some of them are in use. On a
GPU the plain way, `index_add`, adds in whatever order threads come, so that no run repeats another. Here every used
slot has a place of its own, and a token's places are added in order.
"""

from __future__ import annotations

from typing import Any

import torch


def spread(x_TD: torch.Tensor, slot_S: torch.Tensor, each: int) -> torch.Tensor:
    """[S, D]: for every used slot its token. `slot_S`: int64, all different, token × each + number."""
    return _Spread.apply(x_TD, slot_S, each)


def collect(y_SD: torch.Tensor, slot_S: torch.Tensor, tokens: int, each: int) -> torch.Tensor:
    """[tokens, D]: for every token the sum of its used slots, in the order of their numbers."""
    return _Collect.apply(y_SD, slot_S, tokens, each)


def _take(x_TD: torch.Tensor, slot_S: torch.Tensor, each: int) -> torch.Tensor:
    return x_TD.index_select(0, slot_S // each)


def _add(y_SD: torch.Tensor, slot_S: torch.Tensor, tokens: int, each: int) -> torch.Tensor:
    places_ND = y_SD.new_zeros(tokens * each, y_SD.shape[1]).index_copy_(0, slot_S, y_SD)
    return places_ND.view(tokens, each, y_SD.shape[1]).sum(1)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, slot_S: torch.Tensor, each: int) -> torch.Tensor:
        ctx.save_for_backward(slot_S)
        ctx.tokens, ctx.each = len(x_TD), each
        return _take(x_TD, slot_S, each)

    @staticmethod
    def backward(ctx: Any, grad_SD: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _add(grad_SD, *ctx.saved_tensors, ctx.tokens, ctx.each), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_SD: torch.Tensor, slot_S: torch.Tensor, tokens: int, each: int) -> torch.Tensor:
        ctx.save_for_backward(slot_S)
        ctx.each = each
        return _add(y_SD, slot_S, tokens, each)

    @staticmethod
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _take(grad_TD, *ctx.saved_tensors, ctx.each), None, None, None
