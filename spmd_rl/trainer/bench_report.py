"""The figures of a bench, from what every rank measured; as a table for people and as JSON.

Speed, phases and MFU are those of the median step (the lower one of two), so that they belong together; phases are the
mean over ranks, memory is the largest of any rank. It refuses to know how anything was measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from spmd_rl.config.tree import Config
from spmd_rl.rollouts.packing import Packed
from spmd_rl.rollouts.types import TrainSample
from spmd_rl.trainer.bench_lengths import median_of
from spmd_rl.trainer.peak import mfu
from spmd_rl.world.mesh import Mesh

WIDTH = 140
LEFT = ("lengths", "seconds")  # columns of words


@dataclass(frozen=True)
class Step:
    """One measured step on one rank."""

    seconds: float  # between two barriers, so of all ranks
    tokens: float  # of all ranks, as the learner counts them
    loss: float
    phases: dict[str, float]  # seconds of this rank
    cp_bytes: float
    peak_mib: float  # allocated
    reserved_mib: float


@dataclass(frozen=True)
class Kind:
    """Figures of one kind of lengths."""

    lengths: str
    documents: int
    documents_of_run: int
    rows: int  # of each data rank, over all minibatches
    fill: float
    idle: float
    tokens: float
    step_s: float
    steps_s: list[float]
    losses: list[float]  # equal, but for a critic that learns
    tokens_per_s: float
    flops: float | None  # of the documents; None where the model's cost is not known
    phases: dict[str, float]
    peak_mib: float
    reserved_mib: float
    cp_bytes: float
    ranks: list[dict[str, Any]]  # of each trainer rank: phases of the median step, peaks

    @classmethod
    def of(
        cls,
        name: str,
        minibatches: Sequence[Sequence[TrainSample]],
        documents_of_run: int,
        packed: Sequence[Packed],
        cost: Callable[[np.ndarray], np.ndarray] | None,
        of_ranks: Sequence[Sequence[Step]],
    ) -> Kind:
        """of_ranks: the same steps, as each trainer rank measured them."""
        lengths = np.array([len(sample.tokens) for minibatch in minibatches for sample in minibatch])
        steps_s = [step.seconds for step in of_ranks[0]]
        middle = median_at(steps_s)
        medians = [steps[middle] for steps in of_ranks]
        tokens, step_s = medians[0].tokens, steps_s[middle]
        weights = [part.stats.micro_steps for part in packed]
        phases = medians[0].phases
        return cls(
            lengths=name,
            documents=len(lengths),
            documents_of_run=documents_of_run,
            rows=sum(weights),
            fill=float(np.average([part.stats.fill for part in packed], weights=weights)),
            idle=float(np.average([part.stats.idle for part in packed], weights=weights)),
            tokens=tokens,
            step_s=step_s,
            steps_s=steps_s,
            losses=[step.loss for step in of_ranks[0]],
            tokens_per_s=tokens / step_s,
            flops=None if cost is None else float(cost(lengths).sum()),
            phases={key: float(np.mean([one.phases[key] for one in medians])) for key in phases},
            peak_mib=max(step.peak_mib for steps in of_ranks for step in steps),
            reserved_mib=max(step.reserved_mib for steps in of_ranks for step in steps),
            cp_bytes=max(one.cp_bytes for one in medians),
            ranks=[
                {"phases": one.phases, "peak_mib": max(step.peak_mib for step in steps), "cp_bytes": one.cp_bytes}
                for one, steps in zip(medians, of_ranks, strict=True)
            ],
        )


def median_at(seconds: Sequence[float]) -> int:
    """Where the median stands; the lower one of two, so that it is one that was measured."""
    return int(np.argsort(seconds, kind="stable")[(len(seconds) - 1) // 2])


def phases_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """A learner's seconds, by phase."""
    return {name[5:-2]: seconds for name, seconds in metrics.items() if name.startswith("time/")}


def phases_text(phases: Mapping[str, float]) -> str:
    """For a cell of a table."""
    return " ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items())


def report(
    config: Config,
    command: str,
    mesh: Mesh,
    device: str,
    facts: Mapping[str, float],
    peak_from: str,
    kinds: Sequence[Kind],
) -> dict[str, Any]:
    """Print the figures and write them where `bench.json` says; returns them.

    facts: load_s, gather_s and peak_flops of the slowest rank, or the largest; peak_flops is 0 where it is not known.
    """
    ranks, peak = len(mesh.trainers), facts["peak_flops"]
    lines = []
    for kind in kinds:
        used = mfu(kind.flops, kind.step_s, ranks, peak) if kind.flops and peak else None
        lines.append(asdict(kind) | {"tokens_per_s_per_rank": kind.tokens_per_s / ranks, "mfu": used})
    figures = {
        "command": command,
        "model": config.model.name,
        "ranks": ranks,
        "layout": mesh.dims.describe(),
        "device": device,
        "dtype": config.trainer.model.dtype,
        "threads": config.trainer.threads,
        "seq_len": config.seq_len,
        "algorithm": config.orchestrator.algorithm.type if command == "rl" else "cross-entropy",
        "median_length": median_of(config),
        "warmup": config.bench.warmup,
        **facts,
        "peak_from": peak_from,
        "lengths": lines,
    }
    show(figures, Console(width=WIDTH))
    if config.bench.json:
        path = Path(config.bench.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def show(figures: Mapping[str, Any], console: Console) -> None:
    """Print the figures for people."""
    f = figures
    table = Table(
        title=f"{f['command']} --bench: {f['model']}, {f['dtype']}, {f['algorithm']}, rows of {f['seq_len']} tokens, "
        f"{f['ranks']} × {f['device']}, {f['layout']}"
    )
    for title in ("lengths", "tokens", "tok/s", "per rank", "MFU", "step s", "peak MiB", "idle", "CP MiB", "seconds"):
        table.add_column(title, justify="left" if title in LEFT else "right")
    for line in f["lengths"]:
        used = "–" if line["mfu"] is None else f"{line['mfu']:.1%}"
        low, high = min(line["steps_s"]), max(line["steps_s"])
        table.add_row(
            *(line["lengths"], f"{line['tokens']:.0f}"),
            *(f"{line['tokens_per_s']:.0f}", f"{line['tokens_per_s_per_rank']:.0f}", used),
            f"{line['step_s']:.3g} ({low:.3g}–{high:.3g})",
            *(f"{line['peak_mib']:.0f}", f"{line['idle']:.1%}", f"{line['cp_bytes'] / 2**20:.1f}"),
            phases_text(line["phases"]),
        )
    console.print(table)
    console.print("\n".join(remarks(f)))


def remarks(figures: Mapping[str, Any]) -> list[str]:
    """What the table leaves open."""
    f = figures
    said = [f"load {f['load_s']:.3g} s; gathering all weights once {f['gather_s']:.3g} s"]
    peak = f["peak_flops"]
    of_peak = f"MFU is of {peak / 1e12:.4g} TFLOP/s a rank ({f['peak_from']})"
    said.append(of_peak if peak else f"no MFU: {f['peak_from']}; set bench.peak_tflops")
    for line in f["lengths"]:
        if line["documents"] < line["documents_of_run"]:
            said.append(
                f"{line['lengths']}: {line['documents']} documents, where a batch of the run has "
                f"{line['documents_of_run']}; bench.rows allows no more"
            )
        if line["flops"] is None:
            said.append("no MFU: config.json says the model's shape in words of its own")
    if any(line["lengths"] == "variable" for line in f["lengths"]):
        said.append(f"variable: lognormal around {f['median_length']} tokens (bench.median_length), seq_len at most")
    if not f["lengths"]:
        said.append("ended before a step was measured")
    return said
