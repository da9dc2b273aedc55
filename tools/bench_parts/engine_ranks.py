"""The ranks of `bench engine`: rank 0 asks, rank 1 only ticks, rank 2 serves. Arguments: model folder, result file."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.config.tree import Config, DeploymentConfig, InferenceConfig, ModelConfig
from spmd_rl.world.clock import Conductor, Leader
from spmd_rl.world.groups import init_world, make_groups
from spmd_rl.world.mesh import Mesh
from spmd_rl.world.messages import Event, Generate, Generated
from spmd_rl.world.watchdog import Watchdog
from spmd_rl.world.world import World

REQUESTS, PROMPT, NEW, ROUNDS = 64, 16, 64, 7


def requests(round_number: int) -> list[Generate]:
    """The same for both sides."""
    rng = np.random.default_rng(round_number)
    prompts = rng.integers(0, 256, (REQUESTS, PROMPT)).astype(np.int32)
    return [
        Generate(i, prompt, NEW, 1.0, seed=round_number * REQUESTS + i, stop_token_ids=[])
        for i, prompt in enumerate(prompts)
    ]


async def ask(world: World, out: str) -> None:
    """Rank 0: a round through the full path whenever the engine's rank has finished a raw one."""
    from spmd_rl.orchestrator.link import Link

    link = Link(1, 1)
    names = ["trainer", "engine"]
    clock = Conductor(world.groups["ctl"], names, world.config.clock.period_ms / 1e3, link.deliver, print)
    link.connect(clock, None)
    clock.start()
    full = []
    for number in range(ROUNDS + 1):
        await asyncio.to_thread(dist.barrier)  # raw round done
        started = time.perf_counter()
        jobs = [r for r in requests(number)]
        done = await asyncio.gather(
            *(
                link.generate(
                    0, **{f: getattr(r, f) for f in ("tokens", "max_tokens", "temperature", "seed", "stop_token_ids")}
                )
                for r in jobs
            )
        )
        full.append(sum(len(d.tokens) for d in done) / (time.perf_counter() - started))
        await asyncio.to_thread(dist.barrier)
    clock.stop()
    clock.join()
    raw = json.loads(dist.distributed_c10d._get_default_store().get("raw"))
    full, raw = full[1:], raw[1:]  # the first round warms up
    ratios = [round(f / r, 3) for f, r in zip(full, raw, strict=True)]
    figures = {"full": statistics.median(full), "raw": statistics.median(raw), "ratio": statistics.median(ratios)}
    Path(out).write_text(json.dumps({**figures, "ratios": ratios, "requests": REQUESTS, "new_tokens": NEW}))


class CountingLeader(Leader):
    """Knows how many generations it has reported."""

    generated = 0

    def tell(self, event: Event) -> None:
        self.generated += isinstance(event, Generated)
        super().tell(event)


def serve(world: World, folder: str) -> None:
    """Rank 2: raw rounds by hand, the others through the role's own loop."""
    from spmd_rl.inference.build import build_engine, model_runner
    from spmd_rl.inference.engine import Engine
    from spmd_rl.inference.role import ReplicaRank

    clock = CountingLeader(world.groups["ctl"], print)
    clock.start()
    llm = build_engine(world.config, folder, world.groups["replica/0"], 0, 0, world.device)
    sampler = model_runner(llm).sampler.topk_topp_sampler
    ours, plain = sampler.forward, sampler.forward_cpu
    served = ReplicaRank(world, Engine(llm, world.rank, version=0), clock)
    raw = []
    for number in range(ROUNDS + 1):
        sampler.forward = plain
        raw.append(raw_round(llm, number))
        sampler.forward = ours
        dist.barrier()
        while clock.generated < REQUESTS * (number + 1):
            served.turn()
        dist.barrier()
    dist.distributed_c10d._get_default_store().set("raw", json.dumps(raw))
    clock.join()


def raw_round(llm, number: int) -> float:
    """New tokens per second of vLLM alone."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    started = time.perf_counter()
    for r in requests(number):
        params = SamplingParams(
            temperature=1.0,
            max_tokens=NEW,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        llm.add_request(f"raw{number}-{r.id}", {"prompt_token_ids": r.tokens.tolist()}, params)
    tokens = 0
    while llm.has_unfinished_requests():
        tokens += sum(len(output.outputs[0].token_ids) for output in llm.step())
    return tokens / (time.perf_counter() - started)


def main() -> None:
    folder, out = sys.argv[1:]
    config = Config(
        model=ModelConfig(name=folder),
        seq_len=512,
        deployment=DeploymentConfig(train_ranks=1, infer_ranks=1),
        inference=InferenceConfig(vllm={"max_num_seqs": REQUESTS}),
    )
    rank, mesh, device = int(os.environ["RANK"]), Mesh.build(config, 3), torch.device("cpu")
    torch.set_num_threads(1)
    init_world(600)
    groups = make_groups(mesh, rank, device, 600)
    world = World(config, mesh, rank, mesh.role(rank), device, 0, groups, Watchdog(rank, 3, "bench", 60))
    if rank == 0:
        asyncio.run(ask(world, out))
    elif rank == 1:
        clock = Leader(groups["ctl"], print)
        clock.start()
        for _ in range(2 * (ROUNDS + 1)):
            dist.barrier()
        clock.join()
    else:
        serve(world, folder)
    os._exit(0)


if __name__ == "__main__":
    main()
