"""One pull from n trainer ranks that hold a sharded model to m inference ranks: time over raw, bytes, memory by rank.

Gathering shards is part of the pull. The raw limit, in the same run: one rank broadcasts as many bytes to the m others,
from one buffer. Memory is what a trainer rank grew by at most while it sent, over the size of the model.
"""

from __future__ import annotations

import tempfile
from typing import Any

from tools.bench_parts.ranks import finish, make_model, run_ranks

SIZES = {"vocab_size": 1024, "layers": 12, "hidden": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "ff": 1536}
LAYOUTS = ((1, 1), (2, 2), (4, 2))


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, **SIZES)
        print(
            "trainers  engines   model MB   sent MB by trainer   pull s   raw s   ratio   memory of a trainer / model"
        )
        for trainers, engines in LAYOUTS:
            r = run_ranks("width_ranks.py", 1 + trainers + engines, folder, str(trainers), str(engines))
            sent = "–".join(f"{n / 1e6:.0f}" for n in sorted({min(r["sent"]), max(r["sent"])}))
            print(
                f"{trainers:>8}{engines:>9}{r['bytes'] / 1e6:>11.0f}{sent:>21}{r['pull_s']:>9.2f}{r['raw_s']:>8.2f}"
                f"{r['ratio']:>8.2f}{r['memory']:>27.2f}"
            )
            report[f"{trainers}x{engines}"] = r
    return finish(report, json_path)
