"""Swap a complete policy version into a running engine, between two of its steps.

Weights go in through vLLM's own layer-wise reload, under Hugging Face names, so every packing, fusing and sharding that
vLLM did at start is done again. Requests in flight keep their KV cache.

Invariant: after a swap all parameters of the engine were written exactly once, or the swap raised an error that names
one that was not. vLLM itself only logs a layer that got nothing, and silently ignores elements that come twice.

Patch list (checked on vLLM 0.30.0):
- `quant_method.moe_kernel = None` before each reload, because the CPU's MoE kernel packs its weights only the first
  time and would go on with unpacked ones, with no error;
- a tied LM head is processed again after each reload: no tensor is written to it, so vLLM leaves it alone, and on the
  CPU it would go on with its packed copy of the old embedding.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator
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

    # It names every layer that got nothing, such as rotary embeddings, which no checkpoint holds; what matters of that
    # is an error here.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    model = model_runner.get_model()
    aliases = _aliases(model)
    _forget_packed_experts(model)
    with set_current_vllm_config(model_runner.vllm_config):
        initialize_layerwise_reload(model)
        try:
            model.load_weights(iter(tensors))
            problem = _first_unwritten(model, aliases)
        finally:
            finalize_layerwise_reload(model, model_runner.model_config)
        for layer in aliases.values():
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)
    if problem:
        raise WeightsError(problem)


def _forget_packed_experts(model: torch.nn.Module) -> None:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _aliases(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Layers that only show the memory of an earlier one, and that no tensor is written to: a tied LM head, and latent
    attention, which vLLM itself renews from its projection."""
    owners: dict[int, str] = {}
    return {
        name: layer
        for name, layer in model.named_modules()
        for parameter in layer.parameters(recurse=False)
        if parameter.numel() and owners.setdefault(parameter.data_ptr(), name) != name
    }


def _first_unwritten(model: torch.nn.Module, aliases: Container[str]) -> str | None:
    """Ask vLLM's bookkeeping, before it is reset, which layer still waits for elements.

    A layer that got everything is already processed and waits for nothing. Embeddings are padded to a multiple of 64
    rows, which no checkpoint fills. (The names that `load_weights` returns are of no use: those of experts are not
    names of parameters.)
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        parameters = dict(layer.named_parameters(recurse=False))
        if not info.can_load() or not parameters or name in aliases:
            continue
        expected = sum(p.numel() for p in parameters.values()) - _padding_numel(layer)
        if info.load_numel != expected:
            return (
                f"layer {name!r} ({', '.join(parameters)}) got {info.load_numel} of {expected} elements: "
                "the trainer's tensors do not cover the engine's model"
            )
    return None


def _padding_numel(layer: torch.nn.Module) -> int:
    shards = getattr(layer, "shard_indices", None)
    if shards is None:
        return 0
    rows = shards.num_elements_padded - shards.num_org_elements
    return rows * layer.embedding_dim


def checked(
    tensors: Iterable[tuple[str, torch.Tensor]], expected: Iterable[str], shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors through; WeightsError for a name that is unknown, repeated or missing at the end, or another shape.

    `shapes` are those of the folder the engine was built from (a name it lacks is not checked): vLLM takes a tensor
    that is too large without a word and leaves the rest of it out.
    """
    missing = set(expected)
    for name, tensor in tensors:
        if name not in missing:
            raise WeightsError(f"tensor {name!r} is not one of the checkpoint's, or came twice")
        if tuple(tensor.shape) != shapes.get(name, tuple(tensor.shape)):
            raise WeightsError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, and {shapes[name]} in the engine's model folder: "
                "do all hosts see the same folder?"
            )
        missing.remove(name)
        yield name, tensor
    if missing:
        raise WeightsError(f"{len(missing)} tensors of the checkpoint did not arrive: {sorted(missing)[:5]}")
