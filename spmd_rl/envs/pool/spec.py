"""What a worker needs to make an environment, and what it may be asked beside rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmd_rl.config.tree import SourceConfig

OPTIONAL = ("hint", "teacher", "solve", "check_reward")  # methods that an environment may have or lack


@dataclass(frozen=True)
class EnvironmentSpec:
    """Travels to workers as a pickle, once per worker.

    The tokenizer is this process's own: a worker that loaded one by name could get another one, and a Hugging Face
    tokenizer that is unpickled imports no torch.
    """

    source: SourceConfig
    tokenizer: Any
    seed: int

    @property
    def label(self) -> str:
        """For messages."""
        return self.source.env or self.source.data
