"""Whole optimizer steps of RL against sampling alone and training alone, in the same processes and the same run.

Asynchronous RL is worth its name when a step takes hardly longer than the slower of the two. Qwen3 of 3.2 M parameters,
16 tasks × 8 rollouts, 32 and 128 new tokens, float32, one thread per role, three ranks.
"""

from __future__ import annotations

import tempfile
from typing import Any

from tools.bench_parts.ranks import finish, make_model, run_ranks

SIZES = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ff": 768}
TARGET = 1.15


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    cases = {}
    for new_tokens in (32, 128):
        with tempfile.TemporaryDirectory() as folder:
            case = run_ranks("e2e_ranks.py", 3, make_model(folder, **SIZES), str(new_tokens))
        cases[str(new_tokens)] = case
        verdict = "met" if case["ratio"] <= TARGET else "MISSED"
        print(
            f"{new_tokens} new tokens: step {case['step_s']:.2f} s, sampling alone {case['sample_s']:.2f} s, training "
            f"alone {case['train_s']:.2f} s: ratio {case['ratio']:.2f} ({verdict}: target {TARGET}); "
            f"{case['rollouts_per_s']:.0f} rollouts/s, {case['new_tokens_per_s']:,.0f} new tokens/s"
        )
        print("  CPU seconds per step: " + ", ".join(f"{role} {s:.2f}" for role, s in case["cpu_s"].items()))
    return finish({"target_ratio": TARGET, "cases": cases}, json_path)
