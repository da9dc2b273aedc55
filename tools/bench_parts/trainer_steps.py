"""The child processes of the trainer's benchmark: one contender, the processor's best, or the LM head alone."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmd_rl.world.host_memory import peak_resident, resident

SEQ_LEN, VOCAB = 1024, 4096
SHAPE = {"vocab_size": VOCAB, "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ff": 768}
LENGTHS = {"fixed": [SEQ_LEN], "variable": [300, 17, 211, 64, 5, 160, 33, 98, 120, 16]}
HEAD = {"T": 8192, "V": 32768, "D": 256, "chunk": 1024}
Phases = dict[str, float]
Step = Callable[[], tuple[float, Phases]]  # the loss, and seconds by phase


def make_model(folder: str) -> dict:
    """The model folder that all contenders load."""
    from spmd_rl.models.tiny import make_tiny

    make_tiny(folder, seed=0, **SHAPE)
    return {}


def peak_flops(dtype: str) -> dict:
    """Operations per CPU second of the best of some large matrix products."""
    import torch

    from spmd_rl.trainer.peak import matrix_product_flops

    torch.set_num_threads(1)
    return {"flops": matrix_product_flops(getattr(torch, dtype))}


def train(folder: str, dtype: str, lengths: str, name: str, steps: int) -> dict:
    """One contender: two steps to warm up, then `steps` timed ones."""
    import numpy as np
    import torch
    import transformers  # both sides carry it, so that peaks start from the same imports

    import spmd_rl.trainer.learner  # noqa: F401
    from spmd_rl.rollouts.cost import TrainingCost

    torch.set_num_threads(1)
    baseline = resident()
    transformers.utils.logging.disable_progress_bar()
    make = {"ours": _ours, "titan": _titan}.get(name.split()[0], _hf)
    step = make(folder, dtype, LENGTHS[lengths], name)
    first_loss, _ = step()
    step()
    cpu_s, wall_s, phases = zip(*(_timed(step) for _ in range(steps)), strict=True)
    cost = TrainingCost.of(json.loads(Path(folder, "config.json").read_text()))
    flops = float(cost.flops(np.array(LENGTHS[lengths])).sum())
    return {
        "tokens_per_cpu_s": SEQ_LEN / statistics.median(cpu_s),
        "tokens_per_s": SEQ_LEN / statistics.median(wall_s),
        "flops_per_cpu_s": flops / statistics.median(cpu_s),
        "phases": {key: statistics.median(one[key] for one in phases) for key in phases[0]},
        "peak_mib": (peak_resident() - baseline) / 2**20,
        "first_loss": first_loss,
    }


def _timed(step: Step) -> tuple[float, float, Phases]:
    """(CPU seconds, wall-clock seconds, seconds by phase) of one step."""
    cpu, wall = time.process_time(), time.perf_counter()
    _, phases = step()
    return time.process_time() - cpu, time.perf_counter() - wall, phases


def make_row(lengths: list[int], seed: int = 0) -> Any:
    """Made-up documents in one row, with cross-entropy on every token that has a successor."""
    import numpy as np

    from spmd_rl.rollouts.types import Row

    total = sum(lengths)
    tokens = np.random.default_rng(seed).integers(0, VOCAB, total).astype(np.int32)
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    inner = np.ones(total, bool)
    inner[cu_seqlens[1:] - 1] = False
    zeros = np.zeros(total, np.float32)
    return Row(
        tokens=tokens,
        targets=np.roll(tokens, -1) * inner,
        mask=inner.astype(np.uint8),
        logprobs=zeros,
        temperatures=zeros + 1,
        pg_weight=zeros,
        ce_weight=(inner / inner.sum()).astype(np.float32),
        cu_seqlens=cu_seqlens,
    )


def _ours(folder: str, dtype: str, lengths: list[int], name: str) -> Step:
    """Steps of the learner on one row."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from spmd_rl.config.tree import Config, ModelConfig, TrainerConfig, TrainerModelConfig
    from spmd_rl.trainer.bench_report import phases_of
    from spmd_rl.trainer.learner import Learner
    from spmd_rl.trainer.parallel import TrainerMeshes

    meshes = None
    if dtype == "bfloat16":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        meshes = TrainerMeshes(init_device_mesh("cpu", (1,)))
    config = Config(model=ModelConfig(folder), trainer=TrainerConfig(model=TrainerModelConfig(dtype=dtype)))
    learner = Learner(config, meshes, torch.device("cpu"), None)
    row = make_row(lengths)

    def step() -> tuple[float, Phases]:
        metrics = learner.step([[row]], 1e-4)
        return metrics["loss"], phases_of(metrics)

    return step


def _hf(folder: str, dtype: str, lengths: list[int], name: str) -> Step:
    """transformers with its own loss; documents are told apart by their positions."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if name == "hf pure" else torch.float32)
    model.train()
    tokens, positions, labels = _inputs(lengths)
    inputs = {"input_ids": tokens, "position_ids": positions, "labels": labels, "use_cache": False}
    return _plain_steps(model, lambda: model(**inputs).loss, autocast=name == "hf autocast")


def _titan(folder: str, dtype: str, lengths: list[int], name: str) -> Step:
    """torchtitan's model with torch's loss on all logits, as its own trainer has it; only attention is ours, because
    none of its own has a backward on the CPU."""
    import numpy as np
    import torch.nn.functional as F

    from spmd_rl.models.build import ModelOptions, build_and_load
    from spmd_rl.models.packed import Documents

    model = build_and_load(folder, ModelOptions("titan"))
    documents = Documents.build(np.cumsum([0, *lengths]))
    tokens, _, labels = _inputs(lengths)

    def loss() -> Any:
        return F.cross_entropy(model.logits(tokens[0], documents)[:-1].float(), labels[0, 1:])

    return _plain_steps(model, loss, autocast=name == "titan autocast")


def _inputs(lengths: list[int]) -> Any:
    """(tokens, positions, labels), int64[1, T] each; a document's first token is no label."""
    import torch

    tokens = torch.from_numpy(make_row(lengths).tokens).long()[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return tokens, positions, tokens.masked_fill(positions == 0, -100)


def _plain_steps(model: Any, loss_of: Callable[[], Any], autocast: bool) -> Step:
    """Forward, backward, clipping and fused AdamW by torch alone."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> tuple[float, Phases]:
        marks = [time.perf_counter()]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of()
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        marks.append(time.perf_counter())
        names = ("forward", "backward", "optim")
        return loss.item(), {key: marks[i + 1] - marks[i] for i, key in enumerate(names)}

    return step


def lm_head(kind: str) -> dict:
    """Peak memory of the head alone: log-probability of the target, forward and backward."""
    import torch

    from spmd_rl.models.lm_head import token_logprobs

    torch.set_num_threads(1)
    hidden_TD = torch.randn(HEAD["T"], HEAD["D"], requires_grad=True)
    weight_VD = torch.randn(HEAD["V"], HEAD["D"], requires_grad=True)
    targets_T = torch.randint(HEAD["V"], (HEAD["T"],))
    baseline = resident()
    if kind == "chunked":
        loss = -token_logprobs(hidden_TD, weight_VD, targets_T, torch.ones(HEAD["T"]), HEAD["chunk"])[0].mean()
    else:
        loss = torch.nn.functional.cross_entropy(hidden_TD @ weight_VD.T, targets_T)
    loss.backward()
    return {"peak_mib": (peak_resident() - baseline) / 2**20}


if __name__ == "__main__":
    job = {"make_model": make_model, "peak_flops": peak_flops, "train": train, "lm_head": lm_head}[sys.argv[1]]
    print(json.dumps(job(**json.loads(sys.argv[2]))))
