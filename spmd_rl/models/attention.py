"""Causal attention inside the documents of one packed row, by one of several back ends.

`sdpa` is the plain torch reference and the only one with a CPU backward; the others are variable-length kernels for
GPUs, imported lazily. No function here knows about layers, rotary embeddings or caches. Invariant: all back ends
compute the same function, and no query ever sees a key of another document.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from spmd_rl.models.packed import Documents

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Documents], torch.Tensor]


class SharedRow(Protocol):
    """A row of which other ranks hold the other tokens (`context.py`)."""

    def attend(self, q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor, kernel: Kernel) -> torch.Tensor: ...


def attend(
    q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor, documents: Documents | SharedRow, backend: str
) -> torch.Tensor:
    """Causal attention per document with scale 1/sqrt(d); H query heads share K key-value heads (H % K == 0).

    Returns [T, H, d]. `backend` is a result of `resolve_backend`; the flash kernels exist in half precision only, so
    float32 takes sdpa whatever was asked for.
    """
    half = q_THd.dtype in (torch.bfloat16, torch.float16)
    kernel = BACKENDS[backend if half else "sdpa"]
    if isinstance(documents, Documents):
        return kernel(q_THd, k_TKd, v_TKd, documents)
    return documents.attend(q_THd, k_TKd, v_TKd, kernel)


def attend_sdpa(q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor, documents: Documents) -> torch.Tensor:
    """Torch's scaled dot-product attention, once per bucket of documents, without a mask tensor: on the CPU that is
    the flash kernel."""
    grouped = q_THd.shape[1] != k_TKd.shape[1]
    outputs = []
    for q, k, v in zip(documents.pad(q_THd), documents.pad(k_TKd), documents.pad(v_TKd), strict=True):
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [documents, heads, length, d]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2))
    return documents.unpad(outputs)


def attend_flash(
    q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor, documents: Documents, module: str
) -> torch.Tensor:
    """A flash-attention package (float16 and bfloat16, CUDA): that of generation 2, 3 or 4, which call it alike."""
    bounds: dict[str, Any] = {f"cu_seqlens_{side}": documents.cu_seqlens for side in "qk"}
    longest: dict[str, Any] = {f"max_seqlen_{side}": documents.max_length for side in "qk"}
    out = import_module(module).flash_attn_varlen_func(q_THd, k_TKd, v_TKd, **bounds, **longest, causal=True)
    return out[0] if isinstance(out, tuple) else out  # newer ones return the softmax's denominators as well


def attend_varlen(q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor, documents: Documents) -> torch.Tensor:
    """Torch's own variable-length flash kernel (float16 and bfloat16, CUDA)."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = documents.cu_seqlens, documents.max_length
    grouped = q_THd.shape[1] != k_TKd.shape[1]
    causal = (-1, 0)
    return varlen_attn(q_THd, k_TKd, v_TKd, bounds, bounds, longest, longest, window_size=causal, enable_gqa=grouped)


BACKENDS: dict[str, Kernel] = {
    "sdpa": attend_sdpa,
    "varlen": attend_varlen,
    "flash_attention_2": partial(attend_flash, module="flash_attn"),
    "flash_attention_3": partial(attend_flash, module="flash_attn_interface"),
    "flash_attention_4": partial(attend_flash, module="flash_attn.cute"),
}

# By back end: the module it needs, the least compute capability, what to install.
NEEDS: dict[str, tuple[str, tuple[int, int], str]] = {
    "varlen": ("torch.nn.attention.varlen", (8, 0), "a torch with torch.nn.attention.varlen"),
    "flash_attention_2": ("flash_attn", (8, 0), "`pip install flash-attn`"),
    "flash_attention_3": (
        "flash_attn_interface",
        (9, 0),
        "flash-attention 3 (build the folder hopper/ of its repository)",
    ),
    "flash_attention_4": ("flash_attn.cute", (9, 0), "`pip install flash-attn-4`"),
}


def resolve_backend(name: str, device: torch.device | str) -> str:
    """The back end that `name` ("auto" or one of BACKENDS) stands for on this device.

    "auto" is sdpa on the CPU; on CUDA flash-attn 2 where it is installed, else torch's varlen, else sdpa; 3 and 4 are
    taken when they are asked for. Raises ValueError for an unknown name, or for a back end that cannot run here, with
    the way out.
    """
    device = torch.device(device)
    if name == "auto":
        return next((one for one in ("flash_attention_2", "varlen") if not _lacks(one, device)), "sdpa")
    if name not in BACKENDS:
        raise ValueError(f"unknown attention back end {name!r}; choose auto, {', '.join(BACKENDS)}")
    if lack := _lacks(name, device):
        raise ValueError(f"attention back end {name!r} needs {lack}; device is {device}; use sdpa")
    return name


def _lacks(name: str, device: torch.device) -> str:
    """What a back end needs and this place does not have; empty when it can run."""
    if name not in NEEDS:
        return ""
    module, least, cure = NEEDS[name]
    lacks = []
    if device.type != "cuda":
        lacks.append("a CUDA device")
    elif torch.cuda.get_device_capability(device) < least:
        lacks.append(f"a GPU of compute capability {least[0]}.{least[1]}")
    if device.type != "cuda" or not _found(module):
        lacks.append(cure)
    return " and ".join(lacks)


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False
