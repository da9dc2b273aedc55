"""Generation through the full path (rank 0's link, ticks, our engine wrapper and noise) against raw vLLM in one run.

Both sides use one engine in one process with the same arguments and the same requests; raw is `add_request` and `step`
in a loop with vLLM's own sampler. Rounds alternate, so a machine that speeds up or slows down does so for both.
"""

from __future__ import annotations

import tempfile
from typing import Any

from tools.bench_parts.ranks import finish, make_model, run_ranks

MODELS = {
    "1.2M": {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ff": 512},
    "3.2M": {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ff": 768},
}
TARGET = 0.90


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return new tokens per second of both sides and their ratio."""
    cases = {}
    for name, sizes in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            cases[name] = run_ranks("engine_ranks.py", 3, make_model(folder, **sizes))
        case = cases[name]
        verdict = "met" if case["ratio"] >= TARGET else "MISSED"
        print(
            f"{name}: {case['requests']} requests x {case['new_tokens']} tokens: full path {case['full']:,.0f} tok/s, "
            f"raw vLLM {case['raw']:,.0f}, ratio {case['ratio']:.3f} ({verdict}), rounds {case['ratios']}"
        )
    return finish({"target_ratio": TARGET, "cases": cases}, json_path)
