"""Causal attention inside the documents of one packed row, by one of three back ends.

`sdpa` is the plain torch reference and the only one with a CPU backward; the other two are variable-length kernels for
GPUs, imported lazily. No function here knows about layers, rotary embeddings or caches. Invariant: all back ends
compute the same function, and no query ever sees a key of another document.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from spmd_rl.models.packed import Documents


def attend(
    q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor, documents: Documents, backend: str
) -> torch.Tensor:
    """Causal attention per document with scale 1/sqrt(d); H query heads share K key-value heads (H % K == 0).

    Returns [T, H, d]. `backend` is a result of `resolve_backend`; the flash kernels exist in half precision only, so
    float32 takes sdpa whatever was asked for.
    """
    half = q_THd.dtype in (torch.bfloat16, torch.float16)
    return BACKENDS[backend if half else "sdpa"](q_THd, k_TKd, v_TKd, documents)


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


def attend_flash(q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor, documents: Documents) -> torch.Tensor:
    """The flash-attn package (float16 and bfloat16, CUDA)."""
    from flash_attn import flash_attn_varlen_func

    bounds, longest = documents.cu_seqlens, documents.max_length
    return flash_attn_varlen_func(q_THd, k_TKd, v_TKd, bounds, bounds, longest, longest, causal=True)


def attend_varlen(q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor, documents: Documents) -> torch.Tensor:
    """Torch's own variable-length flash kernel (float16 and bfloat16, CUDA)."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = documents.cu_seqlens, documents.max_length
    grouped = q_THd.shape[1] != k_TKd.shape[1]
    causal = (-1, 0)
    return varlen_attn(q_THd, k_TKd, v_TKd, bounds, bounds, longest, longest, window_size=causal, enable_gqa=grouped)


BACKENDS: dict[str, Callable[..., torch.Tensor]] = {
    "sdpa": attend_sdpa,
    "flash_attention_2": attend_flash,
    "varlen": attend_varlen,
}


def resolve_backend(name: str, device: torch.device | str) -> str:
    """The back end that `name` ("auto" or one of BACKENDS) stands for on this device.

    "auto" is sdpa on the CPU; on CUDA flash-attn where it is installed, else torch's varlen, else sdpa.
    Raises ValueError for an unknown name, or for a back end that cannot run here, with the way out.
    """
    on_cuda = torch.device(device).type == "cuda"
    available = {
        "sdpa": True,
        "flash_attention_2": on_cuda and find_spec("flash_attn") is not None,
        "varlen": on_cuda and find_spec("torch.nn.attention.varlen") is not None,
    }
    if name == "auto":
        return next(backend for backend in ("flash_attention_2", "varlen", "sdpa") if available[backend])
    if name not in available:
        raise ValueError(f"unknown attention back end {name!r}; choose auto, {', '.join(available)}")
    if not available[name]:
        cure = "`pip install flash-attn`" if name == "flash_attention_2" else "a torch with torch.nn.attention.varlen"
        raise ValueError(f"attention back end {name!r} needs a CUDA device and {cure}; device is {device}; use sdpa")
    return name
