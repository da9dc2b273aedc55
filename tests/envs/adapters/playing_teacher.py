"""A teacher for the offline game: one letter of the reversed word a turn."""

from __future__ import annotations

import numpy as np

from spmd_rl.rollouts.types import Task


def reverse(task: Task, heard: list[str], rng: np.random.Generator) -> str:
    return task.data["row"]["answer"][len(heard) - 1]
