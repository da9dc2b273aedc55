"""One weight pull of a model of about 200 MB against a raw broadcast of as many bytes, in the same run and processes.

Idle: the engine has nothing to do while the pull runs. Busy: it steps through 64 requests; what its steps cost with and
without a pull beside them, and how long the swap stops it, are reported apart. Both with the whole model staged, and
bucket by bucket, where most of the pull lies inside of the swap.
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
        make_model(folder, **SIZES)
        report = {staging: run_ranks("weights_ranks.py", 2, folder, staging) for staging in ("whole", "buckets")}
    for staging, figures in report.items():
        show(staging, figures)
    return finish({"targets": TARGETS, **report}, json_path)


def show(staging: str, r: dict[str, Any]) -> None:
    """For people. Targets are those of a pull that is staged whole: the first bucket alone could not miss them."""
    target = f"(target {TARGETS['idle_ratio']})" if staging == "whole" else "(of the first bucket)"
    megabytes, ms = r["bytes"] / 1e6, 1e3
    print(f"== staging {staging}: {r['staging_bytes'] / 1e6:.0f} MB of buffers")
    print(f"{megabytes:.0f} MB, float32, gloo on loopback; medians of {r['rounds']} pulls")
    print(f"raw broadcast      {r['raw_s']:.3f} s  {megabytes / r['raw_s']:,.0f} MB/s")
    print(f"pull*, idle engine {r['idle_s']:.3f} s  ratio {r['idle_ratio']:.2f} {target}")
    print(f"pull*, busy engine {r['busy_s']:.3f} s  ratio {r['busy_ratio']:.2f}")
    print(
        f"engine step        {r['step_s'] * ms:.1f} ms alone, {r['step_pull_s'] * ms:.1f} ms during a pull: "
        f"x {r['busy_slowdown']:.2f} (target {TARGETS['busy_slowdown']}), worst x {r['busy_worst']:.2f}"
    )
    print(f"the swap stops the engine for {r['swap_s'] * ms:.0f} ms; a memcpy takes {r['memcpy_s'] * ms:.0f} ms")
    print(f"pull and swap      {r['both_s']:.3f} s, idle engine")
    print("* until the swap may begin: " + ("all of it" if staging == "whole" else "the first bucket"))
