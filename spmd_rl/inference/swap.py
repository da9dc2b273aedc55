"""Swap a complete policy version into a running engine, between two of its steps.

Weights go in through vLLM's own layer-wise reload, under Hugging Face names, so every packing, fusing and sharding that
vLLM did at start is done again. Requests in flight keep their KV cache.

Invariant: after a swap all parameters of the engine were written exactly once, or the swap raised an error that names
one that was not. vLLM itself only logs a layer that got nothing, and silently ignores elements that come twice.

Patch list (checked on vLLM 0.30.0): `quant_method.moe_kernel = None` before each reload, because the CPU's MoE kernel
packs its weights only the first time and would go on with unpacked ones, with no error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from spmd_rl.world.buckets import WeightsError


@torch.no_grad()
def swap_weights(model_runner: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace all weights of the engine.

    Args:
        model_runner: the vLLM model runner of this rank.
        tensors: (Hugging Face name, tensor) of the whole model; unsharded.

    Raises:
        WeightsError: a parameter was not written, or not completely.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = model_runner.get_model()
    _forget_packed_experts(model)
    with set_current_vllm_config(model_runner.vllm_config):
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(iter(tensors))
            problem = _first_unwritten(model, loaded)
        finally:
            finalize_layerwise_reload(model, model_runner.model_config)
    if problem:
        raise WeightsError(problem)


def _forget_packed_experts(model: torch.nn.Module) -> None:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _first_unwritten(model: torch.nn.Module, loaded: set[str] | None) -> str | None:
    """Ask vLLM's bookkeeping, before it is reset, which layer still waits for elements.

    A layer that got everything is already processed and waits for nothing. Embeddings are padded to a multiple of 64
    rows, which no checkpoint fills.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        parameters = dict(layer.named_parameters(recurse=False))
        if not info.can_load() or not parameters:
            continue
        expected = sum(p.numel() for p in parameters.values()) - _padding_numel(layer)
        if info.load_numel != expected:
            return (
                f"layer {name!r} ({', '.join(parameters)}) got {info.load_numel} of {expected} elements: "
                "the trainer's tensors do not cover the engine's model"
            )
    if loaded is not None:
        unwritten = sorted({name for name, _ in model.named_parameters()} - loaded)
        if unwritten:
            return f"engine parameters that no tensor was written to: {unwritten[:5]}"
    return None


def _padding_numel(layer: torch.nn.Module) -> int:
    shards = getattr(layer, "shard_indices", None)
    if shards is None:
        return 0
    rows = shards.num_elements_padded - shards.num_org_elements
    return rows * layer.embedding_dim


def once(tensors: Iterable[tuple[str, torch.Tensor]], expected: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors through; WeightsError for a name that is unknown, repeated or missing at the end."""
    missing = set(expected)
    for name, tensor in tensors:
        if name not in missing:
            raise WeightsError(f"tensor {name!r} is not one of the checkpoint's, or came twice")
        missing.remove(name)
        yield name, tensor
    if missing:
        raise WeightsError(f"{len(missing)} tensors of the checkpoint did not arrive: {sorted(missing)[:5]}")
