"""How fast do routed experts travel from an engine to a trainer rank, against a raw send of as many bytes?"""

from __future__ import annotations

from typing import Any

from tools.bench_parts.ranks import finish, run_ranks

TARGET = 0.6


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    figures = run_ranks("routes_ranks.py", 2)
    verdict = "met" if figures["ratio"] >= TARGET else "MISSED"
    print(f"{figures['bytes'] / 1e6:.0f} MB of routed experts in {figures['pieces']:.0f} pieces, two ranks over gloo")
    print(f"  raw send {figures['raw_s'] * 1e3:.0f} ms")
    print(f"  cut, sent, checked and put into rows {figures['ours_s'] * 1e3:.0f} ms")
    print(f"  {figures['ratio']:.2f} of the raw rate ({verdict}: target {TARGET}); medians of {figures['rounds']:.0f}")
    return finish(figures, json_path)
