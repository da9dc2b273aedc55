"""Algorithms by name, and a name with what departs from it.

One module per algorithm holds its formula, source and defaults; `resolve` lays the config's changes over it. Both sides
of a run call it on the same config: rank 0 takes the rule for advantages, trainer ranks the policy loss.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from spmd_rl.algorithms import (
    cispo,
    dapo,
    dr_grpo,
    echo,
    grpo,
    gspo,
    hierarchical,
    max_rl,
    opd,
    opsd,
    per_agent,
    ppo,
    ppo_critic,
    reinforce_pp,
    rloo,
    sft,
)
from spmd_rl.algorithms.baselines import own_rule
from spmd_rl.algorithms.types import Algorithm, PolicyLoss
from spmd_rl.config.tree import AlgorithmConfig, OrchestratorConfig

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": grpo.ALGORITHM,
    "dr_grpo": dr_grpo.ALGORITHM,
    "dapo": dapo.ALGORITHM,
    "rloo": rloo.ALGORITHM,
    "reinforce_pp": reinforce_pp.ALGORITHM,
    "gspo": gspo.ALGORITHM,
    "cispo": cispo.ALGORITHM,
    "ppo": ppo.ALGORITHM,
    "ppo_critic": ppo_critic.ALGORITHM,
    "max_rl": max_rl.ALGORITHM,
    "per_agent": per_agent.ALGORITHM,
    "hierarchical": hierarchical.ALGORITHM,
    "echo": echo.ALGORITHM,
    "opd": opd.ALGORITHM,
    "opsd": opsd.ALGORITHM,
    "sft": sft.ALGORITHM,
}


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The named algorithm with the config's pieces in place of its own.

    Raises ValueError for an own advantage function that does not load.
    """
    algorithm = ALGORITHMS[config.type]
    if config.aggregation != "auto":
        algorithm = replace(algorithm, aggregation=config.aggregation)
    if config.std != "auto":
        algorithm = replace(algorithm, std=config.std)
    if config.advantage:
        algorithm = replace(algorithm, advantages=own_rule(config.advantage))
    return replace(algorithm, policy=policy_loss(config, algorithm.policy))


def resolve_sources(config: OrchestratorConfig) -> dict[int, Algorithm]:
    """The algorithms of the sources that name one of their own, by number; of them only the advantages are used.

    Raises ValueError for one that is more than a rule for advantages.
    """
    found = {}
    for i, source in enumerate(config.source):
        if not source.algorithm:
            continue
        names = [name for name, known in ALGORITHMS.items() if known.advantages is not None and not known.critic]
        if source.algorithm not in names:
            raise ValueError(
                f"orchestrator.source.{i}.algorithm = {source.algorithm!r} is none whose advantages a source can have "
                f"of its own; choose {', '.join(names)}"
            )
        own: Any = source.algorithm
        found[i] = resolve(replace(config.algorithm, type=own, advantage=""))
    return found


def policy_loss(config: AlgorithmConfig, own: PolicyLoss) -> PolicyLoss:
    """`own` with every number that the config sets (-1 leaves it)."""
    clip = {"clip_low": config.clip.low, "clip_high": config.clip.high, "dual_clip": config.clip.dual}
    numbers = clip | asdict(config.correction)
    changes = {name: value for name, value in numbers.items() if value != -1}
    if changes.get("sequence_cap") and "ratio_cap" not in changes:
        changes["ratio_cap"] = 0.0  # both truncate the same ratio
    return replace(own, **changes, proximal=config.proximal)
