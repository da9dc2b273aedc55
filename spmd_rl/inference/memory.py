"""The memory of an engine that shares its accelerator: given back while something else needs it, taken again after.

On accelerators vLLM's sleep mode (level 2) drops weights and KV cache and keeps the addresses: so weights are written
again by the next swap, which is why an engine sleeps only where a swap follows. vLLM's sleep does nothing on the CPU;
there the pages of the KV cache are handed back to the system, which gives zeros when they are next touched, and the
weights stay.

It refuses to know about requests: whoever releases has emptied the KV cache before.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from spmd_rl.inference.build import model_runner

_MADV_DONTNEED = 4


class EngineMemory:
    """One engine's."""

    def __init__(self, llm: Any) -> None:
        self._executor, self._runner = llm.model_executor, model_runner(llm)
        self._on_cpu = self._runner.device.type == "cpu"

    def release(self) -> None:
        """Give back what can be given back."""
        if not self._on_cpu:
            self._executor.sleep(level=2)
            return
        for tensor in self._runner.kv_caches:
            forget_pages(tensor)

    def take_weights(self) -> None:
        """Room for weights; what is in it is not defined."""
        if not self._on_cpu:
            torch.cuda.empty_cache()  # what the trainer freed, its allocator still holds
            self._executor.wake_up(tags=["weights"])

    def take_cache(self) -> None:
        """Room for the KV cache."""
        if not self._on_cpu:
            self._executor.wake_up(tags=["kv_cache"])


def forget_pages(tensor: torch.Tensor) -> None:
    """Hand the whole pages under a CPU tensor's storage back to the system; it reads as zeros afterwards, or as before.

    OSError when the system will not.
    """
    storage = tensor.untyped_storage()
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if size > 0 and libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), f"madvise of {size} bytes of KV cache failed")
