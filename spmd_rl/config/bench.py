"""What `main.py rl --bench` and `main.py sft --bench` measure: a part of the tree (`tree.py`), and what can't work.

Model, layout, optimizer, algorithm and batch are those of the run; only what a run does not say is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from spmd_rl.config.tree import Config


@dataclass(frozen=True)
class BenchConfig:
    """Steps of the trainer alone, on made-up documents. docs/benchmarks.md says how to read the figures."""

    steps: int = 5  # measured, of each kind of lengths
    warmup: int = 2  # before them, not measured
    lengths: Literal["fixed", "variable", "both"] = "both"  # fixed: seq_len tokens a document; variable: lognormal
    median_length: int = 0  # tokens of documents of variable length; 0 = a quarter of seq_len
    rows: int = 8  # of seq_len tokens, per data rank and optimizer step at most; 0 = as many as the run's batch fills
    peak_tflops: float = 0.0  # of one rank, what MFU compares with; 0 = by the GPU's name, on a CPU measured
    json: str = ""  # file for the figures


def check_bench(c: Config) -> Iterator[str]:
    """What can't be measured."""
    b = c.bench
    if b.median_length > c.seq_len:
        yield f"bench.median_length = {b.median_length} is above seq_len = {c.seq_len}, the longest row: lower it"
    if b.json and Path(b.json).is_dir():
        yield f"bench.json = {b.json!r} is a folder: name a file for the figures"
    if c.deployment.placement == "colocated":
        yield (
            "deployment.placement = colocated: a trainer that takes turns with an engine shares its memory, and the "
            "bench has no engine; measure the trainer alone with --deployment.placement disaggregated"
        )
