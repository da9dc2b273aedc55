"""Ranges of single keys and relations between keys, as far as no cluster, model or engine is needed to judge them.

Every problem names the keys, their values and the way out; all of them are reported at once. What must divide the
number of ranks is `spmd_rl.world.mesh`; what vLLM may be told is `check_engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import reduce
from typing import Any

from spmd_rl.config.bench import check_bench
from spmd_rl.config.check_engine import engine_problems
from spmd_rl.config.check_replay import NOT_OURS, check_replay
from spmd_rl.config.check_sources import check_evaluation, check_sampling, check_sources
from spmd_rl.config.errors import ConfigError
from spmd_rl.config.slurm import check_slurm
from spmd_rl.config.tree import Config, OptimConfig, SchedulerConfig

POSITIVE = (
    "trainer.optim.eps",
    "warmup.optim.eps",
    "orchestrator.sampling.temperature",
    "orchestrator.algorithm.critic.gamma",
    "orchestrator.algorithm.critic.lr",
    "weights.bucket_mb",
    "guard.reward_drop",
    "guard.entropy_factor",
    "guard.norm_factor",
    "clock.period_ms",
    "deadlines.heartbeat_s",
    "deadlines.start_s",
    "deadlines.step_s",
    "deadlines.stall_s",
    "deadlines.env_s",
    "deadlines.collective_s",
)

AT_LEAST = {
    "max_steps": 0,
    "seq_len": 2,
    "seed": 0,
    "trainer.model.lm_head_chunk": 1,
    "trainer.threads": 1,
    "trainer.parallel.dp_replicate": 1,
    "trainer.parallel.nodes_per_fsdp_group": 0,
    "trainer.parallel.cp": 1,
    "trainer.parallel.ep": 0,
    "trainer.parallel.deepep_num_sms": 0,
    "trainer.parallel.deepep_token_chunk_size": 0,
    "trainer.moe.bias_rate": 0,
    "trainer.moe.sequence_coef": 0,
    "trainer.optim.lr": 0,
    "trainer.optim.weight_decay": 0,
    "trainer.optim.max_norm": 0,
    "trainer.scheduler.warmup_steps": 0,
    "trainer.scheduler.decay_steps": 0,
    "trainer.scheduler.min_lr": 0,
    "warmup.steps": 0,
    "warmup.batch_size": 1,
    "warmup.lessons": 0,
    "warmup.optim.lr": 0,
    "warmup.optim.weight_decay": 0,
    "warmup.optim.max_norm": 0,
    "warmup.scheduler.warmup_steps": 0,
    "warmup.scheduler.decay_steps": 0,
    "warmup.scheduler.min_lr": 0,
    "orchestrator.batch_size": 1,
    "orchestrator.group_size": 1,
    "orchestrator.max_batch_groups": 1,
    "orchestrator.max_lag": 0,
    "orchestrator.sampling.max_tokens": 1,
    "orchestrator.max_error_rate": 0,
    "orchestrator.max_retries": 0,
    "orchestrator.algorithm.max_refill": 0,
    "orchestrator.algorithm.minibatches": 1,
    "orchestrator.algorithm.overlong_buffer": -1,
    "orchestrator.algorithm.overlong_penalty": 0,
    "orchestrator.algorithm.length_penalty": 0,
    "orchestrator.algorithm.entropy_bonus": 0,
    "orchestrator.algorithm.observation_weight": 0,
    "orchestrator.algorithm.kl.coef": 0,
    "orchestrator.algorithm.critic.lam": 0,
    "orchestrator.algorithm.critic.warmup_steps": 0,
    "orchestrator.eval.tasks": 0,
    "orchestrator.eval.interval": 0,
    "orchestrator.eval.samples": 0,
    "orchestrator.eval.temperature": 0,
    "orchestrator.eval.top_k": 0,
    "orchestrator.eval.max_tokens": 0,
    "inference.tp": 1,
    "inference.threads": 1,
    "deployment.train_ranks": 0,
    "deployment.infer_ranks": 0,
    "deployment.teacher_ranks": 0,
    "orchestrator.max_token_lag": 0,
    "orchestrator.max_off_policy_steps": 0,
    "clock.steps_per_tick": 1,
    "clock.train_ticks": 1,
    "weights.probe_sequences": 0,
    "weights.probe_length": 2,
    "weights.max_k3": 0,
    "ckpt.export_interval": 0,
    "ckpt.interval": 0,
    "ckpt.keep": 0,
    "ckpt.keep_every": 0,
    "serve.port": 0,
    "generate.samples": 1,
    "generate.at_once": 1,
    "data.batch_size": 1,
    "data.eval_interval": 0,
    "data.fake_length": 2,
    "data.fake_min_length": 0,
    "data.validation_share": 0,
    "log.rollouts_per_step": 0,
    "guard.window": 1,
    "guard.max_rollbacks": 0,
    "bench.steps": 1,
    "bench.warmup": 0,
    "bench.median_length": 0,
    "bench.rows": 0,
    "bench.peak_tflops": 0,
    "slurm.nodes": 0,
    "slurm.processes": 0,
    "slurm.gpus": 0,
    "slurm.cpus": 0,
    "slurm.signal_s": 0,
}

DEEPEP_RUNS = (("bfloat16", "auto"), ("bfloat16", "cuda"))  # trainer.model.dtype and deployment.device


def check(config: Config, command: str = "rl") -> None:
    """Raise a ConfigError that lists all that can't work about `main.py COMMAND`. Starts and imports nothing."""
    everywhere = (_ranges, _run, engine_problems, _deadlines)
    parts: dict[str, tuple[Callable[[Config], Iterator[str]], ...]] = {
        "rl": (
            *everywhere,
            _steps,
            _batches,
            check_sampling,
            check_sources,
            check_evaluation,
            _optimizers,
            _precision,
            _parallel,
            check_replay,
            _weights,
            _guard,
        ),
        "sft": (*everywhere, _optimizers, _precision, _parallel, _sft),
        "rl --bench": (*everywhere, _batches, _optimizers, _precision, _parallel, check_bench),
        "sft --bench": (*everywhere, _optimizers, _precision, _parallel, check_bench),
        "eval": (*everywhere, check_sources, check_evaluation, _evaluates),
        "generate": (*everywhere, _room, _generate),
        "serve": (*everywhere, _room, _serve),
    }
    problems = [problem for part in parts[command] for problem in part(config)]
    problems += check_slurm(config.slurm, config.ckpt.interval, saves=command in ("rl", "sft"))
    if problems:
        raise ConfigError(problems, "config")


def _at(config: Config, path: str) -> Any:
    return reduce(getattr, path.split("."), config)


def _ranges(c: Config) -> Iterator[str]:
    for path in POSITIVE:
        if not _at(c, path) > 0:
            yield f"{path} = {_at(c, path)}: must be greater than 0"
    for path, low in AT_LEAST.items():
        if not _at(c, path) >= low:
            yield f"{path} = {_at(c, path)}: must be {low} or more"
    if c.seed >= 2**32:
        yield f"seed = {c.seed}: must be below 2**32, the largest seed that numpy takes"
    if c.orchestrator.max_error_rate > 1:
        yield f"orchestrator.max_error_rate = {c.orchestrator.max_error_rate}: is a share; 1 or less (1 = never stop)"
    if not 0 < c.orchestrator.window_fraction <= 1:
        yield (
            f"orchestrator.window_fraction = {c.orchestrator.window_fraction}: is a share of the open groups; must be "
            "greater than 0 and at most 1 (1 = any open group may fill a batch)"
        )


def _run(c: Config) -> Iterator[str]:
    if not c.model.name:
        yield "model.name is empty: name a folder in Hugging Face format or a Hub id, such as Qwen/Qwen3-0.6B"
    if not c.output_dir:
        yield "output_dir is empty: name the folder that the run writes to"
    if any(rank < 0 for rank in c.log.console_ranks):
        yield f"log.console_ranks = {list(c.log.console_ranks)}: ranks are counted from 0"
    if c.log.wandb and not c.log.wandb_project:
        yield "log.wandb is on and log.wandb_project is empty: name the project, or turn log.wandb off"


def _steps(c: Config) -> Iterator[str]:
    if c.max_steps == 0 and c.warmup.steps == 0:
        yield "max_steps = 0 and warmup.steps = 0: nothing to do; set either to 1 or more"


def _evaluates(c: Config) -> Iterator[str]:
    if not c.orchestrator.eval.tasks:
        yield "orchestrator.eval.tasks = 0: there is nothing to evaluate; set it to 1 or more"


def _generate(c: Config) -> Iterator[str]:
    if not c.generate.input:
        yield "generate.input is empty: name a *.jsonl file, *.parquet files or a Hub dataset id"
    if c.generate.output and not c.generate.output.endswith(".jsonl"):
        yield f"generate.output = {c.generate.output!r}: completions are written as JSON lines; name a *.jsonl file"
    if c.generate.system and not c.generate.chat:
        yield "generate.system is a chat message, and generate.chat is off: set it, or write it into generate.prompt"


def _room(c: Config) -> Iterator[str]:
    if c.orchestrator.sampling.max_tokens >= c.seq_len:
        yield (
            f"orchestrator.sampling.max_tokens = {c.orchestrator.sampling.max_tokens} leaves no room for a prompt in "
            f"seq_len = {c.seq_len}: lower the first or raise the second"
        )


def _serve(c: Config) -> Iterator[str]:
    if not c.serve.host:
        yield "serve.host is empty: 127.0.0.1 serves this machine alone, 0.0.0.0 any that can reach it"
    if not (c.serve.key.isascii() and c.serve.key.isprintable()) or " " in c.serve.key:
        yield "serve.key holds spaces or characters that no header takes: use letters and digits, or leave it empty"
    if c.serve.port > 65535:
        yield f"serve.port = {c.serve.port}: must be 65535 or less"


def _sft(c: Config) -> Iterator[str]:
    data = c.data
    if data.type == "table" and not data.name:
        yield "data.name is empty: name a *.jsonl file, *.parquet files or a Hub dataset id (or data.type = fake)"
    if bool(data.prompt) != bool(data.completion):
        yield (
            f"data.prompt = {data.prompt!r} with data.completion = {data.completion!r}: name both columns, or neither "
            "for chat messages"
        )
    if not data.validation_share < 1:
        yield f"data.validation_share = {data.validation_share}: is a share of the rows; must be below 1"
    if data.eval_interval and not (data.validation or data.validation_share or data.type == "fake"):
        yield (
            f"data.eval_interval = {data.eval_interval} without data.validation or validation_share: there is nothing "
            "to validate on; set one of them"
        )
    if data.type == "fake" and data.fake_length > c.seq_len:
        yield f"data.fake_length = {data.fake_length} is above seq_len = {c.seq_len}: lower it"
    if data.fake_min_length > data.fake_length:
        yield f"data.fake_min_length = {data.fake_min_length} is above fake_length = {data.fake_length}: lower it"
    if c.max_steps == 0:
        yield "max_steps = 0: nothing to do; set it to 1 or more"


def _batches(c: Config) -> Iterator[str]:
    batch, group = c.orchestrator.batch_size, c.orchestrator.group_size
    if c.orchestrator.batch_unit == "rollouts" and group >= 1 and batch % group:
        below, above = batch - batch % group, batch - batch % group + group
        nearest = f"{below} or {above}" if below else f"{above}"
        yield (
            f"orchestrator.batch_size = {batch} is not a multiple of orchestrator.group_size = {group}: a batch holds "
            f"whole groups; set batch_size to {nearest}, or another group_size"
        )


def _optimizers(c: Config) -> Iterator[str]:
    yield from _optimizer("trainer", c.trainer.optim, c.trainer.scheduler, "max_steps", c.max_steps)
    yield from _optimizer("warmup", c.warmup.optim, c.warmup.scheduler, "warmup.steps", c.warmup.steps)


def _optimizer(part: str, optim: OptimConfig, scheduler: SchedulerConfig, key: str, steps: int) -> Iterator[str]:
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield f"{part}.optim.betas = {list(optim.betas)}: both must be at least 0 and below 1, as in [0.9, 0.95]"
    if scheduler.type == "constant":
        return
    if scheduler.min_lr > optim.lr:
        yield (
            f"{part}.scheduler.min_lr = {scheduler.min_lr} is above {part}.optim.lr = {optim.lr}: the learning rate "
            "decays from lr to min_lr; lower min_lr"
        )
    if scheduler.decay_steps == 0 and 0 < steps <= scheduler.warmup_steps:
        yield (
            f"{part}.scheduler.warmup_steps = {scheduler.warmup_steps} with {key} = {steps}: no step is left for the "
            f"{scheduler.type} decay; warm up for fewer steps, or set type = constant"
        )


def _precision(c: Config) -> Iterator[str]:
    attn, dtype = c.trainer.model.attn, c.trainer.model.dtype
    if attn in ("auto", "sdpa"):
        return
    if c.deployment.device == "cpu":
        yield f"trainer.model.attn = {attn} with deployment.device = cpu: has no backward pass there; use sdpa or auto"
    if dtype == "float32":
        yield (
            f"trainer.model.attn = {attn} with trainer.model.dtype = float32: computes in 16 bits only; "
            "set dtype = bfloat16, or attn = sdpa"
        )


def _parallel(c: Config) -> Iterator[str]:
    parallel, impl = c.trainer.parallel, c.trainer.model.impl
    if parallel.cp > 1 and impl in NOT_OURS:
        yield (
            f"trainer.parallel.cp = {parallel.cp} with trainer.model.impl = {impl}: {NOT_OURS[impl]} models can't "
            "cut a row; set impl = custom, or cp = 1"
        )
    if parallel.ep > 1 and impl in NOT_OURS:
        yield (
            f"trainer.parallel.ep = {parallel.ep} with trainer.model.impl = {impl}: the experts of {NOT_OURS[impl]} "
            "models can't be divided; set impl = custom, or ep = 1"
        )
    if parallel.ep_comm_backend == "deepep" and (c.trainer.model.dtype, c.deployment.device) not in DEEPEP_RUNS:
        yield (
            "trainer.parallel.ep_comm_backend = deepep moves bfloat16 between GPUs: set trainer.model.dtype = bfloat16 "
            "and leave deployment.device at auto or cuda, or set ep_comm_backend = torch"
        )
    if parallel.nodes_per_fsdp_group and parallel.dp_replicate > 1:
        yield (
            f"trainer.parallel.nodes_per_fsdp_group = {parallel.nodes_per_fsdp_group} with dp_replicate = "
            f"{parallel.dp_replicate}: the first is another way of saying the second; set one of them to its default"
        )


def _weights(c: Config) -> Iterator[str]:
    if c.weights.strict and c.weights.probe_sequences == 0:
        yield (
            "weights.strict is on with weights.probe_sequences = 0: without a probe nothing is measured that could "
            "stop the run; set probe_sequences to 1 or more, or turn strict off"
        )
    for key, only in (("mode", "in_flight"), ("staging", "whole")):
        if c.deployment.placement == "colocated" and getattr(c.weights, key) != only:
            yield (
                f"weights.{key} = {getattr(c.weights, key)} with deployment.placement = colocated: weights are copied "
                "inside the process there, while the engine sleeps; leave the key out"
            )
    if c.weights.probe_sequences > 0 and c.weights.probe_length > c.seq_len:
        yield (
            f"weights.probe_length = {c.weights.probe_length} is above seq_len = {c.seq_len}, the longest sequence "
            "that the engine serves: lower probe_length"
        )


def _guard(c: Config) -> Iterator[str]:
    if c.guard.on_collapse == "rollback" and c.ckpt.interval == 0:
        yield (
            "guard.on_collapse = rollback with ckpt.interval = 0: there would be no checkpoint to go back to; set "
            "ckpt.interval, for example to 10"
        )
    needed = 1 + -(-(2 * c.guard.window + 2) // max(1, c.ckpt.interval))
    if c.guard.on_collapse == "rollback" and c.ckpt.interval and 0 < c.ckpt.keep < needed:
        yield (
            f"ckpt.keep = {c.ckpt.keep} with guard.on_collapse = rollback: a good checkpoint is one from before the "
            f"2 × {c.guard.window} steps that the guard judges by, and it would be deleted by then; set keep to "
            f"{needed} or more, or 0 to keep all"
        )


def _deadlines(c: Config) -> Iterator[str]:
    others = {f"deadlines.{name}": value for name, value in asdict(c.deadlines).items() if name != "collective_s"}
    longest = max(others, key=lambda path: others[path])
    if c.deadlines.collective_s <= others[longest]:
        yield (
            f"deadlines.collective_s = {c.deadlines.collective_s} is not above {longest} = {others[longest]}: a "
            "collective that times out names nobody, so every other deadline has to strike first; raise collective_s"
        )
