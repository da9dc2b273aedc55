"""The metrics that the viewers of a run (progress, picture) look for, by name.

Records may hold any other metric as well; a viewer shows a gap where one of these is missing. A record also holds
`phase` ("warmup", "rl", "sft" or "eval") and `step` (optimizer steps completed in that phase; of RL for "eval").
"""

from __future__ import annotations

from typing import Literal

Phase = Literal["warmup", "rl", "sft", "eval"]

REWARD = "reward/mean"  # over the rollouts of the batch
LOSS = "loss"
ENTROPY = "entropy"  # nats per sampled token
LAG = "lag/mean"  # optimizer steps between sampling a token and training on it
MISMATCH = "mismatch/k3_mean"  # same-version disagreement of trainer and engine, nats per token
TOKENS_PER_S = "perf/engine_tokens_per_s"  # new tokens sampled per second
STEP_S = "time/step_s"  # wall-clock seconds from the end of the previous step to the end of this one
EVAL_LOSS = "eval/loss"  # on validation sequences, in nats per learned token
EVAL_GREEDY = "eval/greedy"  # mean reward on held-out tasks, greedy decoding
EVAL_SAMPLED = "eval/reward"  # mean reward on held-out tasks, sampled as in training

_TIMES = ("time/", "perf/", "cpu/", "memory/")


def is_time(name: str) -> bool:
    """True for what a run takes of time or memory: the only metrics that differ between two equal runs."""
    return name.startswith(_TIMES) or name in ("weights/pull_s", "weights/stall_s", "weights/gather_s")
