"""Run one benchmark script on several ranks of this machine and collect the figures that rank 0 wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(script: str, nproc: int, *arguments: str, timeout_s: float = 900.0) -> dict[str, Any]:
    """What rank 0 of `bench_parts/<script>` wrote to the file it got as its last argument. RuntimeError with the log's
    end when a rank failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
        command += [str(ROOT / "tools" / "bench_parts" / script), *arguments, str(out)]
        env = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode or not out.exists():
            raise RuntimeError(f"{script} failed:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
        return json.loads(out.read_text())


def make_model(folder: str, **sizes: Any) -> str:
    """A random Qwen3 with the byte tokenizer."""
    from spmd_rl.models.byte_tokenizer import make_byte_tokenizer
    from spmd_rl.models.tiny import make_tiny

    tokenizer = make_byte_tokenizer(folder)
    sizes = {"vocab_size": len(tokenizer)} | sizes
    make_tiny(folder, seed=0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **sizes)
    return folder


def finish(report: dict[str, Any], json_path: str | None) -> dict[str, Any]:
    """Write the report where it was asked for."""
    if json_path:
        Path(json_path).write_text(json.dumps(report, indent=2) + "\n")
    return report
