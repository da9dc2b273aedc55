"""Does router replay close the gap between engine and trainer? And how many bytes does it cost?

One engine in bfloat16 samples more than 20,000 tokens from a random mixture of experts (8 layers, 64 experts, 8 of them
for a token); our trainer's model scores the same tokens with the same weights: choosing experts itself, with those that
the engine took, and with wrong ones (shifted by one position; of another sequence), which must be seen. Beside it a
dense model of the same size: the floor that rounding alone leaves. Each model has a process of its own, because vLLM
sets up experts for the first model of a process or never.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.bench_parts.ranks import ROOT, finish

LAYERS, EXPERTS, TOP_K = 8, 64, 8
SIZES = {"layers": LAYERS, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ff": 256, "init_std": 0.1}
PROMPT, NEW, SEQUENCES, AT_ONCE = 32, 112, 192, 64
TARGET = 0.1  # of the mismatch without replay


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    moe, dense = (in_a_process(architecture) for architecture in ("qwen3_moe", "qwen3"))
    ratio = moe["replayed"] / moe["own choice"]
    print(f"{moe['tokens']} sampled tokens in bfloat16, mean k3 between engine and trainer, same weights:")
    for name in ("own choice", "replayed", "shifted", "of another sequence"):
        print(f"  {name:<22}{moe[name]:.2e}")
    print(f"  {'dense model':<22}{dense['own choice']:.2e}")
    print(f"replayed over own choice: {ratio:.3f} ({'met' if ratio <= TARGET else 'MISSED'}: target {TARGET})")
    print(f"choices that the trainer would have made otherwise: {moe['flipped']:.2%}")
    print(f"bytes per token: {moe['bytes_per_token']:g} (= layers × top_k × {moe['itemsize']:g})")
    return finish({"moe": moe, "dense": dense, "ratio": ratio}, json_path)


def in_a_process(architecture: str) -> dict[str, float]:
    """The figures of one model."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "tools.bench_parts.replay", architecture, folder]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise RuntimeError(f"{architecture} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        figures: dict[str, float] = json.loads((Path(folder) / "figures.json").read_text())
        return figures


def measure(architecture: str, folder: str) -> dict[str, float]:
    """Mean k3 by where the choice of experts comes from; the rest only for a model that has any."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from spmd_rl.config.tree import Config, InferenceConfig, ModelConfig, TrainerConfig, TrainerModelConfig
    from spmd_rl.inference.build import build_engine
    from spmd_rl.inference.engine import Engine
    from spmd_rl.models.build import ModelOptions, build_and_load
    from spmd_rl.models.moe import Routing
    from spmd_rl.models.packed import Documents
    from spmd_rl.models.tiny import make_tiny
    from spmd_rl.world.messages import Generate, Generated

    moe = architecture == "qwen3_moe"
    experts = {"experts": EXPERTS, "top_k": TOP_K, "expert_ff": 128} if moe else {}
    make_tiny(f"{folder}/model", seed=0, vocab_size=512, architecture=architecture, **SIZES, **experts)
    trainer = TrainerConfig(model=TrainerModelConfig(dtype="bfloat16"), router_replay=moe)
    vllm = {"max_num_seqs": AT_ONCE, "num_gpu_blocks_override": 512}
    config = Config(ModelConfig(f"{folder}/model"), seq_len=256, trainer=trainer, inference=InferenceConfig(vllm=vllm))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    cpu, blocks, answers = torch.device("cpu"), {}, {}
    llm = build_engine(config, f"{folder}/model", dist.new_group([0]), 0, 0, cpu)
    engine = Engine(llm, 0, 0, keep=lambda id, first, block: blocks.__setitem__(id, block))
    prompts = np.random.default_rng(0).integers(0, 512, (SEQUENCES, PROMPT)).astype(np.int32)
    for id, prompt in enumerate(prompts):
        engine.add(Generate(id, prompt, NEW, 1.0, 1000 + id, [], routes_from=0 if moe else -1))
    while engine.busy:
        answers |= {event.id: event for event in engine.step() if isinstance(event, Generated)}
    model = build_and_load(f"{folder}/model", ModelOptions("custom", dtype=torch.bfloat16)).requires_grad_(False)

    def k3(of: dict[int, np.ndarray] | None) -> float:
        """Mean over all sampled tokens, with routed experts by request."""
        total = 0.0
        for start in range(0, SEQUENCES, 16):
            ids = range(start, start + 16)
            rows = [np.concatenate([prompts[i], answers[i].tokens])[:-1] for i in ids]
            targets = np.concatenate([np.concatenate([prompts[i], answers[i].tokens])[1:] for i in ids])
            tokens_T = torch.from_numpy(np.concatenate(rows)).long()
            documents = Documents.build(np.cumsum([0, *map(len, rows)]))
            about = (
                ()
                if of is None
                else (Routing(torch.from_numpy(np.concatenate([of[i] for i in ids]).astype(np.int16))),)
            )
            logprobs_T, _ = model(
                tokens_T, documents, torch.from_numpy(targets).long(), torch.ones(len(tokens_T)), *about
            )
            ours = np.concatenate([part[-NEW:] for part in np.split(logprobs_T.detach().numpy(), 16)])
            theirs = np.concatenate([answers[i].logprobs for i in ids])
            log_ratio = (ours - theirs).astype(np.float64)
            total += float((np.exp(log_ratio) - 1 - log_ratio).sum())
        return total / (SEQUENCES * NEW)

    figures = {"tokens": float(SEQUENCES * NEW), "own choice": k3(None)}
    if moe:
        figures["replayed"] = k3(blocks)
        replayed, agreed = sum(layer.gate.take_counts()[-2:] for layer in model.moe_layers).tolist()
        figures["flipped"] = 1 - agreed / replayed
        figures["shifted"] = k3({id: np.roll(block, 1, axis=0) for id, block in blocks.items()})
        figures["of another sequence"] = k3({id: blocks[(id + 1) % SEQUENCES] for id in blocks})
        sizes = [block.nbytes / len(block) for block in blocks.values()]
        figures |= {"bytes_per_token": sizes[0], "itemsize": float(blocks[0].itemsize)}
    return figures


if __name__ == "__main__":
    found = measure(sys.argv[1], sys.argv[2])
    (Path(sys.argv[2]) / "figures.json").write_text(json.dumps(found))
    os._exit(0)  # vLLM's groups have nothing to say to each other any more
