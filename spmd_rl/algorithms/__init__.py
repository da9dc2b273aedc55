"""Algorithms: from groups of episodes to per-token weights. One module each; a dict is the registry.

An algorithm is `weigh(groups, config) -> (groups, samples, stats)`: the same groups with advantages filled in, and the
weighted samples made from exactly these. Pure, on rank 0, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd_rl.algorithms import grpo
from spmd_rl.config.tree import AlgorithmConfig
from spmd_rl.rollouts.types import Group, TrainSample

Algorithm = Callable[[Sequence[Group], AlgorithmConfig], tuple[list[Group], list[TrainSample], dict[str, float]]]

ALGORITHMS: dict[str, Algorithm] = {"grpo": grpo.weigh}
