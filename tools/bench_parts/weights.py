"""One weight pull of a model of about 200 MB against a raw broadcast of as many bytes, in the same run and processes.

Idle: the engine has nothing to do while the pull runs. Busy: it steps through 64 requests; what its steps cost with and
without a pull beside them, and how long the swap stops it, are reported apart.
"""

from __future__ import annotations

import tempfile
from typing import Any

from tools.bench_parts.ranks import finish, make_model, run_ranks

SIZES = {"vocab_size": 8192, "layers": 6, "hidden": 768, "heads": 12, "kv_heads": 4, "head_dim": 64, "ff": 2304}
TARGETS = {"idle_ratio": 0.6, "busy_slowdown": 1.3}


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        report = run_ranks("weights_ranks.py", 2, make_model(folder, **SIZES))
    megabytes = report["bytes"] / 1e6
    print(f"{megabytes:.0f} MB, float32, gloo on loopback; medians of {report['rounds']} pulls")
    print(f"raw broadcast        {report['raw_s']:.3f} s  {megabytes / report['raw_s']:,.0f} MB/s")
    print(
        f"pull, idle engine    {report['idle_s']:.3f} s  ratio {report['idle_ratio']:.2f} (target {TARGETS['idle_ratio']})"
    )
    print(f"pull, busy engine    {report['busy_s']:.3f} s  ratio {report['busy_ratio']:.2f}")
    print(
        f"engine step          {report['step_s'] * 1e3:.1f} ms alone, {report['step_pull_s'] * 1e3:.1f} ms during a pull: "
        f"x {report['busy_slowdown']:.2f} (target {TARGETS['busy_slowdown']}), worst {report['busy_worst']:.2f}"
    )
    print(
        f"swap stops the engine for {report['swap_s'] * 1e3:.0f} ms; a memcpy of the bytes takes {report['memcpy_s'] * 1e3:.0f} ms"
    )
    return finish({"targets": TARGETS, **report}, json_path)
