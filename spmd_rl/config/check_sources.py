"""What can be known to be wrong about sources, sampling and evaluation: a part of `check.py`, with the same rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from spmd_rl.config.tasks import SourceConfig
from spmd_rl.config.tree import Config

# Keys of a source that mean something beside `data` only.
OF_DATASETS = (
    "split",
    "heldout",
    "heldout_share",
    "prompt",
    "chat",
    "system",
    "messages",
    "answer",
    "hint",
    "reward",
    "reward_args",
    "weights",
    "reward_s",
    "reward_workers",
)


def check_sampling(c: Config) -> Iterator[str]:
    sampling = c.orchestrator.sampling
    why = (
        "training needs the probability of every token under the full distribution, and a truncated one differs from "
        "what the trainer computes"
    )
    if sampling.top_p != 1:
        yield f"orchestrator.sampling.top_p = {sampling.top_p}: {why}; set it to 1 and sharpen with temperature instead"
    if sampling.top_k != 0:
        yield f"orchestrator.sampling.top_k = {sampling.top_k}: {why}; set it to 0 and sharpen with temperature instead"
    if sampling.max_tokens >= c.seq_len:
        yield (
            f"orchestrator.sampling.max_tokens = {sampling.max_tokens} leaves no room for a prompt in "
            f"seq_len = {c.seq_len}: lower the first or raise the second"
        )


def check_sources(c: Config) -> Iterator[str]:
    if not c.orchestrator.source:
        yield "orchestrator.source is empty: add a [[orchestrator.source]] with an env or data"
    for i, source in enumerate(c.orchestrator.source):
        here = f"orchestrator.source.{i}"
        yield from _source(here, source)
        yield from _groups(here, source, c)
        if not source.ratio > 0:
            yield (
                f"orchestrator.source.{i}.ratio = {source.ratio}: must be greater than 0; take a source out by "
                "deleting its table"
            )


def _source(here: str, source: SourceConfig) -> Iterator[str]:
    if bool(source.env) == bool(source.data):
        both = "both env and data are" if source.env else "neither env nor data is"
        yield f"{here}: {both} set; name an environment (pkg.mod:Class, file.py:Class) or a dataset with a reward"
    if source.env and not source.data:
        changed = [f.name for f in fields(source) if f.name in OF_DATASETS and _changed(source, f)]
        if changed:
            yield f"{here}.{changed[0]} belongs to a dataset, and env = {source.env}: set data instead, or remove it"
    if source.data and not source.reward:
        yield (
            f"{here}.reward is empty: say what a good answer to a row of {source.data} is: exact, regex, json_schema, "
            "math, file.py:function or pkg.mod:function"
        )
    if source.data and source.args:
        yield f"{here}.args belong to an environment; those of a built-in reward are reward_args"
    if not 0 <= source.heldout_share < 1:
        yield f"{here}.heldout_share = {source.heldout_share}: is a share of the rows; must be 0 or more and below 1"
    if source.system and not source.chat:
        yield f"{here}.system is a chat message, and {here}.chat is off: set chat = true, or write it into prompt"
    if source.reward_workers < 1:
        yield f"{here}.reward_workers = {source.reward_workers}: must be 1 or more"
    if not source.reward_s > 0:
        yield f"{here}.reward_s = {source.reward_s}: must be greater than 0"
    for name, weight in source.weights.items():
        if type(weight) not in (int, float):
            yield f"{here}.weights.{name} = {weight!r}: must be a number"


def _changed(source: SourceConfig, key: Field[Any]) -> bool:
    default = key.default_factory() if key.default is MISSING and key.default_factory is not MISSING else key.default
    return bool(getattr(source, key.name) != default)


def _groups(here: str, source: SourceConfig, c: Config) -> Iterator[str]:
    """What a source may have of its own."""
    for name in ("group_size", "temperature", "max_tokens", "rollout_s", "workers", "memory_mb"):
        if getattr(source, name) < 0:
            yield f"{here}.{name} = {getattr(source, name)}: must be 0 or more"
    if not source.hang_s > 0:
        yield f"{here}.hang_s = {source.hang_s}: must be greater than 0"
    if source.memory_mb and not source.workers:
        yield f"{here}.memory_mb = {source.memory_mb} bounds worker processes, and workers = 0: set workers too"
    if source.max_tokens >= c.seq_len:
        yield (
            f"{here}.max_tokens = {source.max_tokens} leaves no room for a prompt in seq_len = {c.seq_len}: lower the "
            "first or raise the second"
        )
    if source.group_size not in (0, c.orchestrator.group_size) and c.orchestrator.batch_unit == "rollouts":
        yield (
            f"{here}.group_size = {source.group_size} with orchestrator.batch_unit = rollouts: a batch of so many "
            "rollouts may not come out even; set batch_unit to groups or tokens"
        )
    pool = source.pool
    if pool.tasks < 1:
        yield f"{here}.pool.tasks = {pool.tasks}: must be 1 or more"
    if not pool.hard < pool.easy:
        yield f"{here}.pool.hard = {pool.hard} is not below {here}.pool.easy = {pool.easy}: nothing would be medium"
    if min(pool.easy_share, pool.hard_share) < 0 or pool.easy_share + pool.hard_share > 1:
        yield (
            f"{here}.pool.easy_share = {pool.easy_share} and hard_share = {pool.hard_share} are shares of the groups; "
            "together they may be 1 at most"
        )


def check_evaluation(c: Config) -> Iterator[str]:
    """How a model is evaluated."""
    e, gate = c.orchestrator.eval, c.orchestrator.reward_gate
    if e.tasks and not e.greedy and not e.samples:
        yield "orchestrator.eval.greedy is off with eval.samples = 0: nothing would be sampled; set either"
    if not 0 < e.top_p <= 1:
        yield f"orchestrator.eval.top_p = {e.top_p}: must be greater than 0 and at most 1"
    if e.max_tokens >= c.seq_len:
        yield f"orchestrator.eval.max_tokens = {e.max_tokens} leaves no room for a prompt in seq_len = {c.seq_len}"
    if gate[0] > gate[1]:
        yield f"orchestrator.reward_gate = {list(gate)}: write the lower bound first"
