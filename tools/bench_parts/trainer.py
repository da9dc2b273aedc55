"""Trainer throughput and memory beside plain Hugging Face transformers, on the same packed tokens and one CPU thread.

One measurement is one child process, so that peaks of resident memory can be compared and no contender inherits the
allocator of another; contenders alternate, round after round. All do a whole optimizer step: forward, cross-entropy of
the next token, backward, clipping, fused AdamW. Ours also computes what RL needs (entropy, ratio, masks). In float32
the first losses of both must agree, so the work is the same. Speed is tokens per second of CPU time, which other
processes on the machine disturb less than wall-clock time; both are in the JSON.

bfloat16: ours and `hf autocast` keep float32 master weights; `hf pure` has bfloat16 weights and optimizer state, which
is less work and another algorithm.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
LENGTH, VOCAB = 1024, 4096
SHAPE = {"vocab_size": VOCAB, "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ff": 768}
LAYOUTS = {"one": [LENGTH], "mixed": [300, 17, 211, 64, 5, 160, 33, 98, 120, 16]}
CONTENDERS = {"float32": ("ours", "hf"), "bfloat16": ("ours", "hf autocast", "hf pure")}
HEAD = {"T": 8192, "V": 32768, "D": 256, "chunk": 1024}


def main(json_path: str | None = None, rounds: int = 3, steps: int = 4) -> dict:
    """Measures, prints a table and writes it to `json_path`; returns what was written."""
    with tempfile.TemporaryDirectory() as folder:
        _child("make_model", folder=folder)
        table = [
            line
            for dtype, contenders in CONTENDERS.items()
            for layout in LAYOUTS
            for line in _compare(folder, dtype, layout, contenders, rounds, steps)
        ]
    heads = {kind: _child("lm_head", kind=kind)["peak_mib"] for kind in ("chunked", "full")}
    report = {"shape": SHAPE | {"tokens": LENGTH}, "threads": 1, "steps": table, "lm_head": HEAD | {"peak_mib": heads}}
    _print(report)
    if json_path:
        Path(json_path).write_text(json.dumps(report, indent=1))
    return report


def _compare(folder: str, dtype: str, layout: str, contenders: tuple[str, ...], rounds: int, steps: int) -> list[dict]:
    """One line per contender: medians over rounds, and the ratio of our speed to it."""
    runs: dict[str, list[dict]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in contenders:
            runs[name].append(_child("train", folder=folder, dtype=dtype, layout=layout, name=name, steps=steps))
    if dtype == "float32":
        losses = {name: results[0]["first_loss"] for name, results in runs.items()}
        if max(losses.values()) - min(losses.values()) > 1e-4 * max(losses.values()):
            raise RuntimeError(f"the contenders do not compute the same loss: {losses}")
    speed = {name: statistics.median(run["tokens_per_cpu_s"] for run in results) for name, results in runs.items()}
    return [
        {
            "dtype": dtype,
            "documents": layout,
            "contender": name,
            "tokens_per_cpu_s": speed[name],
            "tokens_per_s": statistics.median(run["tokens_per_s"] for run in results),
            "runs": results,
            "peak_mib": statistics.median(run["peak_mib"] for run in results),
            "ours_over_this": speed["ours"] / speed[name],
        }
        for name, results in runs.items()
    ]


def _print(report: dict) -> None:
    print(f"one optimizer step on {LENGTH} packed tokens, one thread; peak = resident memory above the imports")
    print(f"{'dtype':10}{'documents':11}{'contender':13}{'tok/CPU s':>10}{'ours/this':>11}{'peak MiB':>10}")
    for line in report["steps"]:
        print(
            f"{line['dtype']:10}{line['documents']:11}{line['contender']:13}{line['tokens_per_cpu_s']:10.0f}"
            f"{line['ours_over_this']:11.2f}{line['peak_mib']:10.0f}"
        )
    peaks = report["lm_head"]["peak_mib"]
    print(
        f"LM head, forward + backward, T={HEAD['T']} V={HEAD['V']} D={HEAD['D']} float32: {peaks['chunked']:.0f} MiB "
        f"in chunks of {HEAD['chunk']}, {peaks['full']:.0f} MiB with full logits"
    )


def _child(job: str, **arguments: object) -> dict:
    """The JSON on the last line of a child process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, job, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def make_model(folder: str) -> dict:
    """The model folder that all contenders load."""
    from spmd_rl.models.tiny import make_tiny

    make_tiny(folder, seed=0, **SHAPE)
    return {}


def train(folder: str, dtype: str, layout: str, name: str, steps: int) -> dict:
    """One contender: a step to warm up, then `steps` timed ones."""
    import torch
    import transformers  # both sides carry it, so that peaks start from the same imports

    import spmd_rl.trainer.learner  # noqa: F401

    torch.set_num_threads(1)
    baseline = _memory_mib("VmRSS")
    transformers.utils.logging.disable_progress_bar()
    step = (_ours if name == "ours" else _hf)(folder, dtype, LAYOUTS[layout], name)
    first_loss = step()
    cpu_s, wall_s = zip(*(_timed(step) for _ in range(steps)), strict=True)
    return {
        "tokens_per_cpu_s": LENGTH / statistics.median(cpu_s),
        "tokens_per_s": LENGTH / statistics.median(wall_s),
        "peak_mib": _memory_mib("VmHWM") - baseline,
        "first_loss": first_loss,
    }


def _timed(step: Callable[[], float]) -> tuple[float, float]:
    """(CPU seconds, wall-clock seconds) of one step."""
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - cpu, time.perf_counter() - wall


def _tokens():
    import numpy as np

    return np.random.default_rng(0).integers(0, VOCAB, LENGTH).astype(np.int32)


def _ours(folder: str, dtype: str, lengths: list[int], name: str) -> Callable[[], float]:
    """A Learner step on one row, with cross-entropy on every token that has a successor."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from spmd_rl.config.tree import Config, ModelConfig, TrainerConfig, TrainerModelConfig
    from spmd_rl.rollouts.types import Row
    from spmd_rl.trainer.learner import Learner

    mesh = None
    if dtype == "bfloat16":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
    config = Config(model=ModelConfig(folder), trainer=TrainerConfig(model=TrainerModelConfig(dtype=dtype)))
    learner = Learner(config, mesh, torch.device("cpu"), None)
    tokens, cu_seqlens = _tokens(), np.cumsum([0, *lengths]).astype(np.int32)
    inner = np.ones(LENGTH, bool)
    inner[cu_seqlens[1:] - 1] = False
    zeros = np.zeros(LENGTH, np.float32)
    row = Row(
        tokens=tokens,
        targets=np.roll(tokens, -1) * inner,
        mask=inner.astype(np.uint8),
        logprobs=zeros,
        temperatures=zeros + 1,
        pg_weight=zeros,
        ce_weight=(inner / inner.sum()).astype(np.float32),
        cu_seqlens=cu_seqlens,
    )
    return lambda: learner.step([[row]], 1e-4)["loss"]


def _hf(folder: str, dtype: str, lengths: list[int], name: str) -> Callable[[], float]:
    """transformers with its own loss; documents are told apart by their positions."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if name == "hf pure" else torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.from_numpy(_tokens()).long()[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = tokens.masked_fill(positions == 0, -100)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "hf autocast"):
            loss = model(input_ids=tokens, position_ids=positions, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def lm_head(kind: str) -> dict:
    """Peak memory of the head alone: log-probability of the target, forward and backward."""
    import torch

    from spmd_rl.models.lm_head import token_logprobs

    torch.set_num_threads(1)
    hidden_TD = torch.randn(HEAD["T"], HEAD["D"], requires_grad=True)
    weight_VD = torch.randn(HEAD["V"], HEAD["D"], requires_grad=True)
    targets_T = torch.randint(HEAD["V"], (HEAD["T"],))
    baseline = _memory_mib("VmRSS")
    if kind == "chunked":
        loss = -token_logprobs(hidden_TD, weight_VD, targets_T, torch.ones(HEAD["T"]), HEAD["chunk"])[0].mean()
    else:
        loss = torch.nn.functional.cross_entropy(hidden_TD @ weight_VD.T, targets_T)
    loss.backward()
    return {"peak_mib": _memory_mib("VmHWM") - baseline}


def _memory_mib(field: str) -> float:
    """VmRSS is resident now, VmHWM its peak. (getrusage's peak starts from the parent's, which forked this process.)"""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


if __name__ == "__main__":
    job = {"make_model": make_model, "train": train, "lm_head": lm_head}[sys.argv[1]]
    print(json.dumps(job(**json.loads(sys.argv[2]))))
