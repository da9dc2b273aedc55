"""Supervised training from end to end, `main.py sft`, beside a plain Hugging Face loop with padding-free packing.

Both train the same model on the same made-up sequences in the same batches, float32, one process, one thread; the peer
lays sequences end to end up to `seq_len` and tells them apart by position ids. Speed is tokens per second from step to
step, so it includes what happens between steps: drawing, packing, metrics. First losses must agree. Contenders
alternate, round after round.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHAPE = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ff": 768}
SEQ_LEN, BATCH, LONGEST, SHORTEST = 1024, 16, 400, 20
STEPS, SKIPPED = 12, 3  # the first steps load and warm up
LR = 1e-4


def main(json_path: str | None = None, rounds: int = 3) -> None:
    """Measures, prints and writes the figures."""
    with tempfile.TemporaryDirectory() as folder:
        _child(f"make_model({folder!r})")
        runs: dict[str, list[dict]] = {"ours": [], "hf": []}
        for number in range(rounds):
            runs["ours"].append(ours(folder, f"{folder}/run{number}"))
            runs["hf"].append(_child(f"hf({folder!r})"))
    first = [results[0]["first_loss"] for results in runs.values()]
    if abs(first[0] - first[1]) > 1e-4 * first[1]:
        raise RuntimeError(f"the contenders do not compute the same loss: {first}")
    speed = {name: statistics.median(run["tokens_per_s"] for run in results) for name, results in runs.items()}
    report = {"shape": SHAPE, "seq_len": SEQ_LEN, "batch": BATCH, "lengths": [SHORTEST, LONGEST], "runs": runs}
    report |= {"tokens_per_s": speed, "ours_over_hf": speed["ours"] / speed["hf"], "target": 1.0}
    print(f"ours {speed['ours']:.0f} tokens/s, hf {speed['hf']:.0f}: ours/hf {report['ours_over_hf']:.2f} (target ≥ 1)")
    if json_path:
        Path(json_path).write_text(json.dumps(report, indent=1))


def flags(folder: str) -> list[str]:
    """The run, as flags."""
    data = {"type": "fake", "batch-size": BATCH, "fake-length": LONGEST, "fake-min-length": SHORTEST}
    return [
        *("--model.name", folder, "--seq-len", str(SEQ_LEN), "--max-steps", str(STEPS), "--trainer.optim.lr", str(LR)),
        *(word for key, value in data.items() for word in (f"--data.{key}", str(value))),
        *("--trainer.optim.weight-decay", "0.01", "--log.no-tensorboard", "--log.progress", "off"),
    ]


def ours(folder: str, out: str) -> dict:
    """The program itself."""
    command = [sys.executable, str(ROOT / "spmd_rl/main.py"), "sft", *flags(folder), "--output-dir", out]
    subprocess.run(command, env=_environment(), stdout=subprocess.DEVNULL, check=True)
    steps = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step["phase"] == "sft"]
    speeds = [step["tokens/packed"] / step["time/step_s"] for step in steps[SKIPPED:]]
    return {"tokens_per_s": statistics.median(speeds), "first_loss": steps[0]["loss"]}


def make_model(folder: str) -> dict:
    """The model that both load."""
    from spmd_rl.models.byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
    from spmd_rl.models.tiny import make_tiny

    make_byte_tokenizer(folder)
    make_tiny(folder, seed=0, vocab_size=VOCAB_SIZE, **SHAPE)
    return {}


def hf(folder: str) -> dict:
    """transformers, torch's AdamW and the usual loop."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from spmd_rl.config import load
    from spmd_rl.data.sequences import Sequences

    torch.set_num_threads(1)
    sequences = Sequences(load(flags(folder)), AutoTokenizer.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    speeds, first_loss = [], 0.0
    for step in range(1, STEPS + 1):
        started = time.perf_counter()
        batch = [torch.from_numpy(tokens).long() for tokens, _ in sequences.batch(step)]
        count = sum(len(tokens) - 1 for tokens in batch)
        total = 0.0
        optimizer.zero_grad(set_to_none=True)
        for row in _rows(batch):
            positions = torch.cat([torch.arange(len(tokens)) for tokens in row])[None]
            tokens = torch.cat(row)[None]
            labels = tokens.masked_fill(positions == 0, -100)
            logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        speeds.append(sum(map(len, batch)) / (time.perf_counter() - started))
        first_loss = first_loss or total
    return {"tokens_per_s": statistics.median(speeds[SKIPPED:]), "first_loss": first_loss}


def _rows(batch: list) -> list[list]:
    """Sequences end to end, a new row where the next one does not fit."""
    rows: list[list] = [[]]
    for tokens in batch:
        if sum(map(len, rows[-1])) + len(tokens) > SEQ_LEN:
            rows.append([])
        rows[-1].append(tokens)
    return rows


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def _child(call: str) -> dict:
    """The result of a call in a process of its own."""
    code = f"import json; from tools.bench_parts.sft import *; print(json.dumps({call}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=_environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
