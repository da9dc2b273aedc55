"""From a model folder to a module with weights, and from a module back to named tensors.

Chooses between our own definitions, transformers' and torchtitan's (`impl`). What it refuses to know: sharding, ranks,
optimizers.
Invariant: the names of `wires` are the wire format of weight sync, of exports and of the folders that were read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spmd_rl.models import load
from spmd_rl.models.attention import resolve_backend
from spmd_rl.models.conversion import Wire
from spmd_rl.models.decoder import Decoder, Family
from spmd_rl.models.hf_config import HELP, read_config, resolve
from spmd_rl.models.hf_folder import check_dtype, export, stored_tensors
from spmd_rl.models.hf_model import HFModel
from spmd_rl.models.llama import LLAMA
from spmd_rl.models.qwen2_moe import QWEN2_MOE
from spmd_rl.models.qwen3 import QWEN3
from spmd_rl.models.qwen3_moe import QWEN3_MOE
from spmd_rl.models.titan_model import TitanModel, titan_family

__all__ = [
    "ModelOptions",
    "begin",
    "build",
    "build_and_load",
    "expert_count",
    "export",
    "finish",
    "hf_named_tensors",
    "hidden_size",
    "is_ours",
    "load_weights",
    "resolve",
    "wires",
]

CUSTOM: dict[str, Family] = {family.model_type: family for family in (QWEN3, LLAMA, QWEN3_MOE, QWEN2_MOE)}


@dataclass(frozen=True)
class ModelOptions:
    """How a folder's model is computed, and where."""

    # "custom" (our definitions), "hf" (transformers), "titan" (torchtitan), "auto" (custom where there is one, else hf)
    impl: str = "auto"
    attn: str = "auto"  # of `resolve_backend`
    lm_head_chunk: int = 1024  # tokens
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32  # of parameters


DEFAULT = ModelOptions()


def build(folder: str, options: ModelOptions = DEFAULT) -> nn.Module:
    """The folder's model with parameters on its device; their values are not loaded.

    Raises FileNotFoundError or ValueError, naming the folder and the way out.
    """
    model = _outline(folder, options)
    if not isinstance(model, HFModel):
        model.materialize(options.device)
    return model


def build_and_load(folder: str, options: ModelOptions = DEFAULT) -> nn.Module:
    """`build`, then `load_weights`; a transformers model is also tried on packed documents."""
    model = build(folder, options)
    load_weights(model, folder)
    if isinstance(model, HFModel):
        model.check_packing()
    return model


def begin(folder: str, options: ModelOptions = DEFAULT) -> nn.Module:
    """A model to shard first and `finish` then: transformers' is loaded, others take no memory yet."""
    model = _outline(folder, options)
    if isinstance(model, HFModel):
        load_weights(model, folder)
        model.check_packing()
    return model


def finish(model: nn.Module, folder: str, device: torch.device | str) -> None:
    """Gives a model of `begin` memory and values for what this process holds of it, sharded or whole."""
    if not isinstance(model, HFModel):
        load.check(model, wires(model), folder, _ignored(model))  # before there is memory for what may not fit
        model.materialize(device)
        load.load(model, wires(model), folder)


@torch.no_grad()
def load_weights(model: nn.Module, folder: str) -> None:
    """Copy the folder's safetensors into the model's parameters, converting the dtype only.

    Raises ValueError naming missing, unexpected or wrongly shaped tensors, or a damaged file.
    """
    if isinstance(model, HFModel):
        _load_hf(model, folder)
    else:
        load.check(model, wires(model), folder, _ignored(model))
        load.load(model, wires(model), folder)


def _ignored(model: nn.Module) -> tuple[str, ...]:
    return model.ignored if isinstance(model, TitanModel) else ()


def wires(model: nn.Module) -> list[Wire]:
    """Every parameter once (tied weights under their first name), and every buffer that checkpoints hold, with the
    checkpoint tensors that it is made of."""
    return list(model.wires())


def hf_named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, view of the parameter) of every checkpoint tensor of a model that is not sharded."""
    for wire in wires(model):
        for piece in wire.pieces:
            yield piece.name, piece.of(wire.parameter)


def is_ours(folder: str, impl: str) -> bool:
    """Whether `build` takes our own definitions of the folder's model. Allocates nothing."""
    return impl in ("auto", "custom") and _no_custom(read_config(folder)["model_type"], _hf_config(folder)) is None


def expert_count(folder: str, impl: str) -> int:
    """How many experts each layer of our own model of the folder has; 0 for a dense one. Allocates nothing."""
    if not is_ours(folder, impl):
        return 0
    return int(getattr(_hf_config(folder), "num_experts", 0) or 0)


def hidden_size(folder: str) -> int:
    """Width of the hidden states of the folder's model."""
    return int(_hf_config(folder).get_text_config().hidden_size)


def _no_custom(model_type: str, config: Any) -> str | None:
    """What of this model our own definitions lack, or None."""
    if model_type not in CUSTOM:
        return f"model type {model_type!r} (it has {', '.join(CUSTOM)})"
    return CUSTOM[model_type].unsupported(config)


def _hf_config(folder: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers validates with a class of its own per field
        raise ValueError(f"{folder}/config.json is not a config that transformers understands: {error}") from error


def _outline(folder: str, options: ModelOptions) -> Decoder | TitanModel | HFModel:
    """The folder's model without memory; transformers' has memory, but no values."""
    model_type, impl = read_config(folder)["model_type"], options.impl
    config = _hf_config(folder)
    reason = _no_custom(model_type, config)
    if impl == "custom" and reason:
        raise ValueError(f"model folder {folder!r}: trainer.model.impl = custom has no {reason}; use impl = hf")
    if impl not in ("auto", "custom", "hf", "titan"):
        raise ValueError(f"unknown trainer.model.impl {impl!r}; choose auto, custom, hf or titan")
    if impl == "titan":
        family, backend = titan_family(folder, config), resolve_backend(options.attn, options.device)
        return TitanModel(family, config, backend, options.lm_head_chunk, options.dtype)
    if impl == "hf" or reason:
        return _build_hf(folder, config, options)
    backend = resolve_backend(options.attn, options.device)
    return Decoder(CUSTOM[model_type], config, backend, options.lm_head_chunk, "meta", options.dtype)


def _build_hf(folder: str, config: Any, options: ModelOptions) -> HFModel:
    from transformers import AutoModelForCausalLM

    if options.attn == "varlen":
        raise ValueError("trainer.model.attn = varlen needs impl = custom; use flash_attention_2 or sdpa")
    backend = "sdpa" if options.attn == "auto" else resolve_backend(options.attn, options.device)
    try:
        with torch.device(options.device):
            hf = AutoModelForCausalLM.from_config(config, attn_implementation=backend, dtype=options.dtype)
    except (ValueError, KeyError) as error:
        raise ValueError(f"model folder {folder!r}: transformers cannot build it: {error}; {HELP}") from error
    return HFModel(hf, options.lm_head_chunk)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no warnings of transformers' loader: every rank would print them."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


@torch.no_grad()
def _load_hf(model: HFModel, folder: str) -> None:
    """Through transformers' own loader, which knows the families whose files are laid out unlike their modules."""
    for name, stored in stored_tensors(folder):  # names damaged and missing files before transformers does
        check_dtype(folder, name, stored)
    hf = model.hf
    strict = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # both end in the report, judged below
    with _quiet():
        loaded, report = type(hf).from_pretrained(
            folder, config=hf.config, dtype=hf.dtype, local_files_only=True, **strict
        )
    for kind in ("mismatched_keys", "missing_keys", "unexpected_keys"):
        if report[kind]:
            names = ", ".join(str(name) for name in sorted(report[kind])[:5])
            raise ValueError(f"model folder {folder!r}: {kind.replace('_keys', ' tensors')}: {names}")
    hf.load_state_dict(loaded.state_dict())
