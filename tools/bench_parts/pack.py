"""Benchmark of packing: CPU time of the layout and how even it is, at 64 ranks × 8 rows of log-normal lengths.

Invariant: lengths come from a fixed seed, so two runs differ in time only.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.rollouts.packing import describe, lay_out

RANKS, ROWS, SEQ_LEN, RUNS = 64, 8, 32768, 5
FULL = 0.97  # of ranks × rows × seq_len tokens are drawn: rows are never all full in practice
MAX_SECONDS, MAX_IMBALANCE = 0.1, 1.02
SIGMAS, MEANS = (0.5, 1.0), (1024, 2048, 4096)


def main(json_path: str) -> None:
    """Print the table and write it as JSON."""
    cases = [measure(mean, sigma) for sigma in SIGMAS for mean in MEANS]
    columns = [
        "sigma",
        "mean_length",
        "samples",
        "micro_steps",
        "fill",
        "layout_s",
        "rank_imbalance",
        "micro_imbalance",
    ]
    print(f"packing for {RANKS} ranks, seq_len {SEQ_LEN}; target: {MAX_SECONDS} s CPU, max/mean ≤ {MAX_IMBALANCE}")
    print("  ".join(f"{c:>15}" for c in [*columns, "target"]))
    for case in cases:
        cells = [f"{case[c]:.4f}" if isinstance(case[c], float) else str(case[c]) for c in columns]
        print("  ".join(f"{c:>15}" for c in [*cells, "met" if case["target_met"] else "MISSED"]))
    result = {"ranks": RANKS, "seq_len": SEQ_LEN, "target_s": MAX_SECONDS, "target_imbalance": MAX_IMBALANCE}
    Path(json_path).write_text(json.dumps({**result, "cases": cases}, indent=2) + "\n")


def measure(mean: int, sigma: float) -> dict[str, Any]:
    """One case: CPU seconds (median of RUNS) and the layout's statistics."""
    lengths = draw_lengths(mean, sigma)
    seconds = []
    for _ in range(RUNS):
        started = time.process_time()
        layout = lay_out(lengths, RANKS, SEQ_LEN)
        seconds.append(time.process_time() - started)
    stats = describe(layout, lengths, SEQ_LEN)
    layout_s = statistics.median(seconds)
    even = max(stats.rank_imbalance, stats.micro_imbalance) <= MAX_IMBALANCE
    return {
        "sigma": sigma,
        "mean_length": mean,
        "samples": len(lengths),
        "longest": int(lengths.max()),
        "micro_steps": stats.micro_steps,
        "fill": stats.fill,
        "layout_s": layout_s,
        "rank_imbalance": stats.rank_imbalance,
        "micro_imbalance": stats.micro_imbalance,
        "target_met": bool(even and layout_s <= MAX_SECONDS),
    }


def draw_lengths(mean: int, sigma: float) -> np.ndarray:
    """int64[n] log-normal lengths with this mean, cut at SEQ_LEN, as many as fill FULL of the rows."""
    rng = np.random.default_rng(0)
    mu = np.log(mean) - sigma**2 / 2  # the mean of a log-normal is exp(mu + sigma²/2)
    lengths = np.clip(rng.lognormal(mu, sigma, 2 * RANKS * ROWS * SEQ_LEN // mean), 1, SEQ_LEN).astype(np.int64)
    return lengths[: int(np.searchsorted(lengths.cumsum(), FULL * RANKS * ROWS * SEQ_LEN))]
