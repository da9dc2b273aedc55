"""The sources of a run: each environment with the settings that are its own, or the run's where it has none.

It refuses to know how tasks are chosen (`curriculum.py`) and rollouts are run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spmd_rl.config.tree import Config, EvalConfig, SamplingConfig, SourceConfig
from spmd_rl.envs.protocol import Environment


@dataclass(frozen=True)
class Source:
    """One source of tasks."""

    name: str  # in metrics; no two are equal
    env: Environment
    group_size: int
    sampling: SamplingConfig
    rollout_s: float  # deadline of one rollout


def make_sources(config: Config, envs: Sequence[Environment]) -> list[Source]:
    """One per environment, in the config's order."""
    o, names = config.orchestrator, source_names(config.orchestrator.source)
    return [
        Source(
            name=name,
            env=env,
            group_size=source.group_size or o.group_size,
            sampling=replace(
                o.sampling,
                temperature=source.temperature or o.sampling.temperature,
                max_tokens=source.max_tokens or o.sampling.max_tokens,
            ),
            rollout_s=source.rollout_s or config.deadlines.env_s,
        )
        for name, source, env in zip(names, o.source, envs, strict=True)
    ]


def source_names(sources: Sequence[SourceConfig]) -> list[str]:
    """The name that a source was given, else the class or the file; a number behind it where two are alike."""
    plain = [source.name or _plain_name(source.env or source.data) for source in sources]
    many, seen, names = Counter(plain), Counter[str](), []
    for name in plain:
        seen[name] += 1
        names.append(f"{name}_{seen[name]}" if many[name] > 1 else name)
    return names


def _plain_name(target: str) -> str:
    """`pkg.mod:Class` and `file.py:Class` go by their class, files and Hub ids by their last part."""
    return target.rpartition(":")[2] if ":" in target else Path(target).stem or "source"


def for_evaluation(sampling: SamplingConfig, config: EvalConfig) -> SamplingConfig:
    """How held-out tasks are sampled, where training samples with `sampling`."""
    return replace(
        sampling,
        temperature=config.temperature or sampling.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_tokens or sampling.max_tokens,
    )
