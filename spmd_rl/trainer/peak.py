"""The use that is made of a device: operations per second over the most it could do (MFU).

    MFU = operations of the documents (`rollouts/cost.py`) / (seconds · ranks · peak of one rank)

The operations are those of one forward and backward of the policy with a causal mask, however often it was computed: a
reference, a critic or a second pass make a step longer and MFU lower. The peak of a GPU is what its maker states for
dense matrix products in bfloat16, whatever dtype is used; that of a processor is measured.

It refuses to know about models and layouts.
"""

from __future__ import annotations

import time

import torch

# Dense bfloat16 with float32 accumulation, TFLOP/s, from the makers' data sheets. A GPU is the entry with the most
# words of its name; "H100" alone is the SXM one.
KNOWN_TFLOPS = {
    "A10": 125.0,
    "A100": 312.0,
    "L4": 121.0,
    "L40S": 362.0,
    "H20": 148.0,
    "H100": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "GH200": 989.4,
    "H200": 989.4,
    "H200 NVL": 835.5,
    "B200": 2250.0,
    "GB200": 2500.0,
}
SIZE, TRIES = 1536, 8  # of the matrix products that measure a processor


def mfu(flops: float, seconds: float, ranks: int, peak_flops: float) -> float:
    """A share of 1. flops: of all ranks together; peak_flops: of one rank, per second."""
    return flops / (seconds * ranks * peak_flops)


def peak_flops(device: torch.device, dtype: torch.dtype, threads: int) -> tuple[float, str]:
    """(Operations per second of one rank, where the number is from); 0 for a GPU that is not known."""
    if device.type != "cuda":
        return matrix_product_flops(dtype, threads), f"best of {TRIES} products of {SIZE}² {str(dtype)[6:]} here"
    name = torch.cuda.get_device_name(device)
    tflops = known_tflops(name)
    return tflops * 1e12, f"{name}, dense bfloat16" if tflops else f"{name} is not known"


def known_tflops(name: str) -> float:
    """Of a GPU as its driver calls it; 0 where it is not known."""
    words = set(name.replace("-", " ").split())
    found = [key for key in KNOWN_TFLOPS if set(key.split()) <= words]
    return KNOWN_TFLOPS[max(found, key=lambda key: len(key.split()))] if found else 0.0


def matrix_product_flops(dtype: torch.dtype, threads: int = 1) -> float:
    """Operations per second of the best of some large matrix products on this processor.

    By CPU time, which other processes disturb less than wall-clock time; `threads` are those torch computes with.
    """
    a, b = (torch.randn(SIZE, SIZE).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(TRIES):
        cpu = time.process_time()
        a @ b
        best = max(best, 2 * SIZE**3 * threads / (time.process_time() - cpu))
    return best
