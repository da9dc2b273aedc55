"""From a model folder to a module with weights, and from a module back to named tensors.

Chooses between our own definitions and transformers' (`impl`), and is strict about weights: every parameter is
written exactly once from a tensor of its own name and shape, or there is an error that names it. What it refuses to
know: sharding, ranks, optimizers. Invariant: the names of `hf_named_parameters` are the wire format of weight sync,
of exports and of the folders that were read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spmd_rl.models.attention import resolve_backend
from spmd_rl.models.hf_config import HELP, read_config, resolve
from spmd_rl.models.hf_folder import export, read_tensors, tensor_shapes
from spmd_rl.models.hf_model import HFModel
from spmd_rl.models.qwen3 import Qwen3

__all__ = ["build", "build_and_load", "export", "hf_named_parameters", "hidden_size", "load_weights", "resolve"]

CUSTOM = {"qwen3": Qwen3}  # by model_type


def build(
    folder: str,
    impl: str = "auto",
    attn: str = "auto",
    lm_head_chunk: int = 1024,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The folder's model with parameters on `device` in `dtype`; their values are not loaded.

    `impl`: "custom" (our definitions), "hf" (transformers), "auto" (custom where there is one). Raises
    FileNotFoundError or ValueError, naming the folder and the way out.
    """
    model_type = read_config(folder)["model_type"]
    config = _hf_config(folder)
    reason = _no_custom(model_type, config)
    if impl == "custom" and reason:
        raise ValueError(f"model folder {folder!r}: trainer.model.impl = custom has no {reason}; use impl = hf")
    if impl not in ("auto", "custom", "hf"):
        raise ValueError(f"unknown trainer.model.impl {impl!r}; choose auto, custom or hf")
    if impl == "hf" or reason:
        return _build_hf(folder, config, attn, lm_head_chunk, device, dtype)
    return CUSTOM[model_type](config, resolve_backend(attn, device), lm_head_chunk, device, dtype)


def build_and_load(
    folder: str,
    impl: str = "auto",
    attn: str = "auto",
    lm_head_chunk: int = 1024,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """`build`, then `load_weights`; a transformers model is also tried on packed documents."""
    model = build(folder, impl, attn, lm_head_chunk, device, dtype)
    load_weights(model, folder)
    if isinstance(model, HFModel):
        model.check_packing()
    return model


@torch.no_grad()
def load_weights(model: nn.Module, folder: str) -> None:
    """Copy the folder's safetensors into the model's parameters, converting the dtype only.

    Raises ValueError naming missing, unexpected or wrongly shaped tensors, or a damaged file.
    """
    if isinstance(model, HFModel):
        _load_hf(model, folder)
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))  # tied weights under each of their names
    written: dict[int, str] = {}
    seen: set[str] = set()
    for name, tensor in read_tensors(folder):
        parameter = parameters.get(name)
        if parameter is None:
            raise ValueError(f"model folder {folder!r}: unexpected tensor {name!r}, {type(model).__name__} has none")
        if parameter.shape != tensor.shape:
            raise ValueError(
                f"model folder {folder!r}: {name!r} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(parameter.shape)}"
            )
        value = tensor.to(parameter.device, parameter.dtype)
        if id(parameter) in written and not torch.equal(parameter, value):
            raise ValueError(f"model folder {folder!r}: {name!r} is tied to {written[id(parameter)]!r} but differs")
        parameter.copy_(value)
        written[id(parameter)] = name
        seen.add(name)
    missing = [name for name, parameter in parameters.items() if id(parameter) not in written]
    if missing:
        raise ValueError(f"model folder {folder!r} lacks {len(missing)} tensors: {', '.join(missing[:5])}")


def hf_named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once (tied weights under their first name) with its Hugging Face name, in a fixed order."""
    prefix = HFModel.PREFIX if isinstance(model, HFModel) else ""
    for name, parameter in model.named_parameters():
        yield name.removeprefix(prefix), parameter


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


def _build_hf(
    folder: str, config: Any, attn: str, lm_head_chunk: int, device: torch.device | str, dtype: torch.dtype
) -> HFModel:
    from transformers import AutoModelForCausalLM

    if attn == "varlen":
        raise ValueError("trainer.model.attn = varlen needs impl = custom; use flash_attention_2 or sdpa")
    backend = "sdpa" if attn == "auto" else resolve_backend(attn, device)
    try:
        with torch.device(device):
            hf = AutoModelForCausalLM.from_config(config, attn_implementation=backend, dtype=dtype)
    except (ValueError, KeyError) as error:
        raise ValueError(f"model folder {folder!r}: transformers cannot build it: {error}; {HELP}") from error
    return HFModel(hf, lm_head_chunk)


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
    tensor_shapes(folder)  # names damaged and missing files before transformers does
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
