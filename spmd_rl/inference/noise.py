"""Counter-based sampling noise, in place of vLLM's per-request generators.

A token is drawn by inverting the cumulative distribution at one uniform number that is a pure function of (rollout
seed, absolute position of the token). So the same request meets the same noise whatever else is in the batch, in
however many pieces its prompt is prefilled, and after an abort and a resume; there is no generator state to save.
vLLM's own `seed=` would crash on the CPU (stack notes) and draws a whole vocabulary of noise per token.

Patch list (checked on vLLM 0.30.0): `TopKTopPSampler.forward` of the one sampler in this process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

SEED_KEY = "spmd_rl_seed"  # in SamplingParams.extra_args


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64[B] in [0, 1) with 53 random bits, a function of (seed uint64[B], position int64[B]) alone.

    Source: the SplitMix64 finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) over
    the seed and the position in turn.
    """
    with np.errstate(over="ignore"):
        x = _mix(seeds.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        x = _mix(x + positions.astype(np.uint64) * np.uint64(0xD1342543DE82EF95))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(probs_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Token ids int64[B]: the first whose cumulative probability exceeds u times the total.

    A token of probability zero is never drawn: the threshold stays below the total, and the cumulative sum is flat
    there.
    """
    cumulative_BV = probs_BV.cumsum(dim=-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    threshold_B1 = torch.minimum(uniforms_B[:, None] * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(-1)


def install(model_runner: Any) -> None:
    """Make the sampler of this engine draw with counter-based noise."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    sampler = model_runner.sampler.topk_topp_sampler
    if sampler.logprobs_mode != "processed_logprobs":
        raise RuntimeError(f"the engine reports {sampler.logprobs_mode}; training needs processed_logprobs")

    def forward(logits_BV, generators, k, p):
        logits_BV = apply_top_k_top_p(logits_BV, k, p)
        logprobs_BV = logits_BV.log_softmax(dim=-1, dtype=torch.float32)
        uniforms_B = torch.from_numpy(uniforms(*_seeds_and_positions(model_runner, logits_BV.shape[0])))
        return draw(logprobs_BV.exp(), uniforms_B.to(logits_BV.device)), logprobs_BV

    sampler.forward = forward


def _seeds_and_positions(model_runner: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    batch, requests = model_runner.input_batch, model_runner.requests
    seeds = np.zeros(rows, dtype=np.uint64)
    for row in range(rows):
        extra = requests[batch.req_ids[row]].sampling_params.extra_args
        if extra:
            seeds[row] = extra.get(SEED_KEY, 0)
    return seeds, batch.num_tokens_no_spec[:rows].astype(np.int64)
