"""Keys that prime-rl had under another name before: the old one is read as the new one.

prime-rl itself keeps no old names. Its memory and deployment guides were written for versions that had these, and so
are many configs; versions 0.4 to 0.6 are covered, as far as a key still means the same. It refuses to know what becomes
of the new name. Invariant: a table with new names alone comes out as it went in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Old path, new path. `*` stands for every element of an array; tables move whole. Outer tables move before inner ones.
RENAMED = (
    ("clean_output_dir", "clean"),
    ("wandb", "monitors.wandb"),
    ("trainer.wandb", "monitors.wandb"),
    ("orchestrator.wandb", "monitors.wandb"),
    ("prime_monitor", "monitors.prime"),
    ("orchestrator.prime_monitor", "monitors.prime"),
    ("monitors.prime.run_name", "monitors.prime.name"),
    ("max_async_level", "orchestrator.max_async_level"),
    ("trainer.max_async_level", "orchestrator.max_async_level"),
    ("trainer.optim.optim_cpu_offload", "trainer.model.optim_cpu_offload"),
    ("orchestrator.env", "orchestrator.train.source"),
    ("orchestrator.train.env", "orchestrator.train.source"),
    ("orchestrator.train.source.*.id", "orchestrator.train.source.*.env.taskset.id"),
    ("orchestrator.train.source.*.args", "orchestrator.train.source.*.env.taskset"),
    ("orchestrator.train.source.*.num_workers", "orchestrator.train.source.*.serve.num_workers"),
    ("orchestrator.train.source.*.address", "orchestrator.train.source.*.serve.address"),
    ("orchestrator.train.source.*.rollouts_per_example", "orchestrator.train.source.*.group_size"),
    ("orchestrator.eval.env", "orchestrator.eval.source"),
    ("orchestrator.eval.source.*.id", "orchestrator.eval.source.*.env.taskset.id"),
    ("orchestrator.eval.source.*.args", "orchestrator.eval.source.*.env.taskset"),
    ("orchestrator.eval.source.*.num_workers", "orchestrator.eval.source.*.serve.num_workers"),
    ("orchestrator.eval.source.*.rollouts_per_example", "orchestrator.eval.source.*.group_size"),
    ("orchestrator.eval.rollouts_per_example", "orchestrator.eval.group_size"),
    ("orchestrator.val.rollouts_per_example", "orchestrator.val.group_size"),
    ("orchestrator.sampling", "orchestrator.train.sampling"),
    ("orchestrator.train.sampling.max_tokens", "orchestrator.train.sampling.max_completion_tokens"),
    ("orchestrator.eval.sampling.max_tokens", "orchestrator.eval.sampling.max_completion_tokens"),
    ("orchestrator.rollouts_per_example", "orchestrator.group_size"),
    ("orchestrator.max_inflight_rollouts", "orchestrator.concurrency.max_inflight"),
    ("ckpt.resume_step", "resume.step"),
    ("trainer.ckpt.resume_step", "resume.step"),
    ("orchestrator.ckpt.resume_step", "resume.step"),
    ("orchestrator.student.model", "orchestrator.model"),
    ("orchestrator.student.client", "orchestrator.model.client"),
    ("inference.deployment.prefill_env_overrides", "inference.deployment.prefill_env_vars"),
    ("inference.deployment.decode_env_overrides", "inference.deployment.decode_env_vars"),
    ("inference.deployment.router", "inference.router"),
    ("inference.model.name", "inference.vllm.model"),
    ("inference.model", "inference.vllm"),
    ("inference.parallel.tp", "inference.vllm.tensor_parallel_size"),
    ("inference.parallel.dp", "inference.vllm.data_parallel_size"),
    ("inference.vllm_extra", "inference.vllm"),
    *(
        (f"inference.{name}", f"inference.vllm.{name}")
        for name in (
            "enable_lora",
            "max_loras",
            "max_cpu_loras",
            "max_lora_rank",
            "enable_prefix_caching",
            "gpu_memory_utilization",
            "api_server_count",
            "data_parallel_size_local",
            "data_parallel_rpc_port",
            "seed",
            "enable_expert_parallel",
            "all2all_backend",
            "enable_eplb",
            "enable_return_routed_experts",
        )
    ),
)
# Tables of one version that are a word in another.
WORDS = {"inference.model": "inference.vllm.model", "inference.deployment.router": "inference.router.type"}


def renamed(table: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Move, in place, what stands under old names. New path → old path of what moved, and contradictions."""
    moved: dict[str, str] = {}
    problems: list[str] = []
    for old, new in RENAMED:
        for places in list(_places(table, old.split("."))):
            here, there = _filled(old, places), _filled(new, places)
            value = _take(table, here.split("."))
            if isinstance(value, str):
                there = WORDS.get(here, there)
            moved[there] = moved.get(here, here)
            problems += [f"{here} and {path} say different things of one key" for path in _put(table, there, value)]
    return moved, problems


def _places(node: Any, parts: list[str]) -> Iterator[tuple[str, ...]]:
    """For every match of the path: what its stars stand for."""
    if not parts:
        yield ()
    elif parts[0] == "*" and isinstance(node, list):
        for i, inner in enumerate(node):
            for rest in _places(inner, parts[1:]):
                yield (str(i), *rest)
    elif isinstance(node, dict) and parts[0] in node:
        yield from _places(node[parts[0]], parts[1:])


def _filled(path: str, stars: tuple[str, ...]) -> str:
    for star in stars:
        path = path.replace("*", star, 1)
    return path


def _take(table: dict[str, Any], parts: list[str]) -> Any:
    """Remove what stands at the path; tables that are empty then go too."""
    nodes: list[Any] = [table]
    for part in parts[:-1]:
        nodes.append(nodes[-1][int(part)] if isinstance(nodes[-1], list) else nodes[-1][part])
    value = nodes[-1].pop(parts[-1])
    for part, node, inner in reversed(list(zip(parts[:-1], nodes[:-1], nodes[1:], strict=True))):
        if isinstance(node, dict) and inner == {}:
            del node[part]
    return value


def _put(table: dict[str, Any], path: str, value: Any) -> list[str]:
    """Set it there, into the table that may be there. The paths that say something else."""
    *parents, leaf = path.split(".")
    node: Any = table
    for part in parents:
        if isinstance(node, list) and not part.isdigit():
            return [path]
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, dict | list):
            return [path]
    if not isinstance(node, dict):
        return [path]
    if isinstance(node.get(leaf), dict) and isinstance(value, dict):
        return [wrong for name, inner in value.items() for wrong in _put(node[leaf], name, inner)]
    if leaf in node and node[leaf] != value:
        return [path]
    node[leaf] = value
    return []
