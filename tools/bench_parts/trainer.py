"""Trainer throughput, use of the processor and memory, beside plain Hugging Face and torchtitan's model, and on layouts
of two ranks.

One measurement is one child process, so that peaks of resident memory can be compared and no contender inherits the
allocator of another; contenders alternate, round after round. All do whole optimizer steps on the same made-up
sequences: forward, cross-entropy of the next token, backward, clipping, fused AdamW. Ours also computes what RL needs
(entropy, ratio, masks). In float32 the first losses must agree, so the work is the same. Speed is tokens per second of
CPU time on the CPU, which other processes on the machine disturb less than wall-clock time; both are in the JSON.

bfloat16: ours, `hf autocast` and `titan autocast` keep float32 master weights; `hf pure` has bfloat16 weights and
optimizer state, which is less work and another algorithm. MFU: operations of the formula in docs/parallelism.md per
second, over those of the best large matrix product of the same dtype in the same run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spmd_rl.trainer.bench_report import phases_text
from spmd_rl.trainer.peak import mfu
from tools.bench_parts.ranks import finish, run_ranks
from tools.bench_parts.trainer_steps import HEAD, LENGTHS, SEQ_LEN, SHAPE

ROOT = Path(__file__).parents[2]
CONTENDERS = {
    "float32": ("ours", "hf", "titan"),
    "bfloat16": ("ours", "hf autocast", "hf pure", "titan autocast"),
}
TARGET = 1.1
Figures = dict[str, Any]


def main(json_path: str | None = None, rounds: int = 3, steps: int = 4) -> Figures:
    """Measures, prints tables and writes them to `json_path`; returns what was written."""
    with tempfile.TemporaryDirectory() as folder:
        _child("make_model", folder=folder)
        able = {dtype: [name for name in names if _installed(name)] for dtype, names in CONTENDERS.items()}
        peaks = {dtype: _child("peak_flops", dtype=dtype)["flops"] for dtype in CONTENDERS}
        lines = [
            line
            for dtype, names in able.items()
            for lengths in LENGTHS
            for line in _compare(folder, dtype, lengths, names, peaks[dtype], rounds, steps)
        ]
        layouts = run_ranks("trainer_ranks.py", 2, folder, str(steps))["layouts"]
    heads = {kind: _child("lm_head", kind=kind)["peak_mib"] for kind in ("chunked", "full")}
    report = {"shape": SHAPE | {"seq_len": SEQ_LEN}, "threads": 1, "peak_flops": peaks, "contenders": lines}
    report |= {"layouts": layouts, "lm_head": HEAD | {"peak_mib": heads}, "target": TARGET}
    for layout in layouts:
        layout["mfu"] = mfu(layout["flops_per_s"], 1.0, 2, peaks["float32"])
    _print(report)
    return finish(report, json_path)


def _compare(
    folder: str, dtype: str, lengths: str, names: list[str], peak: float, rounds: int, steps: int
) -> list[Figures]:
    """One line per contender: medians over rounds, and the ratio of our speed to it."""
    runs: dict[str, list[Figures]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            runs[name].append(_child("train", folder=folder, dtype=dtype, lengths=lengths, name=name, steps=steps))
    if dtype == "float32":
        losses = {name: results[0]["first_loss"] for name, results in runs.items()}
        if max(losses.values()) - min(losses.values()) > 1e-4 * max(losses.values()):
            raise RuntimeError(f"the contenders do not compute the same loss: {losses}")
    lines = []
    for name, results in runs.items():
        middle = {key: statistics.median(run[key] for run in results) for key in results[0] if key != "phases"}
        phases = {key: statistics.median(run["phases"][key] for run in results) for key in results[0]["phases"]}
        ratios = [
            ours["tokens_per_cpu_s"] / this["tokens_per_cpu_s"]
            for ours, this in zip(runs["ours"], results, strict=True)
        ]
        line = {"dtype": dtype, "lengths": lengths, "contender": name, **middle, "phases": phases, "runs": results}
        used = mfu(middle["flops_per_cpu_s"], 1.0, 1, peak)
        lines.append(line | {"mfu": used, "ours_over_this": statistics.median(ratios)})
    return lines


def _print(report: Figures) -> None:
    console = Console(width=140)
    table = Table(
        title=f"one process, one thread, {SEQ_LEN} packed tokens a step; medians; target: ours / best peer ≥ {TARGET}"
    )
    for title in ("dtype", "lengths", "contender", "tok/s", "tok/CPU s", "ours/this", "MFU", "peak MiB", "seconds"):
        table.add_column(title, justify="left" if title in ("dtype", "lengths", "contender", "seconds") else "right")
    for line in report["contenders"]:
        numbers = (f"{line['tokens_per_s']:.0f}", f"{line['tokens_per_cpu_s']:.0f}", f"{line['ours_over_this']:.2f}")
        table.add_row(
            *(line["dtype"], line["lengths"], line["contender"]),
            *(*numbers, f"{line['mfu']:.0%}", f"{line['peak_mib']:.0f}", phases_text(line["phases"])),
        )
    console.print(table)
    table = Table(title="two processes, float32, variable lengths; idle: waiting for the heaviest row of a micro-step")
    for title in ("layout", "tok/s", "per rank", "MFU", "peak MiB", "idle", "idle by cost", "CP bytes", "seconds"):
        table.add_column(title, justify="left" if title in ("layout", "seconds") else "right")
    for line in report["layouts"]:
        table.add_row(
            *(line["layout"], f"{line['tokens_per_s']:.0f}", f"{line['tokens_per_s'] / 2:.0f}", f"{line['mfu']:.0%}"),
            *(f"{line['peak_mib']:.0f}", f"{line['idle']:.1%}", f"{line['idle_by_cost']:.1%}"),
            *(f"{line['cp_bytes'] / 2**20:.1f} MiB", phases_text(line["phases"])),
        )
    console.print(table)
    peaks = report["lm_head"]["peak_mib"]
    console.print(
        f"LM head, forward + backward, T={HEAD['T']} V={HEAD['V']} D={HEAD['D']} float32: {peaks['chunked']:.0f} MiB "
        f"in chunks of {HEAD['chunk']}, {peaks['full']:.0f} MiB with full logits"
    )
    if not _installed("titan"):
        console.print("torchtitan is not installed, so it was not compared with")


def _installed(contender: str) -> bool:
    return not contender.startswith("titan") or find_spec("torchtitan") is not None


def _child(job: str, **arguments: object) -> Figures:
    """The JSON on the last line of a child process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).with_name("trainer_steps.py")), job, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
