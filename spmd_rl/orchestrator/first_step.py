"""The first batch, looked at before anybody waits for the hundredth: can anything be learned from it, and from what?

It shows a few rollouts as the loss sees them and says what looks wrong; it changes nothing. Invariant: whatever a batch
holds, describing it fails nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from spmd_rl.orchestrator.batch import Batch
from spmd_rl.rollouts.types import Episode, Reward, Sample

SHOWN = 3  # rollouts
MANY = 0.5  # share of truncated rollouts, or of failed ones, that is worth a warning
PROMPT_CHARACTERS, COMPLETION_CHARACTERS = 80, 240


def warnings(batch: Batch) -> Iterator[str]:
    """What looks wrong about a first batch, with what to look at."""
    valid = [episode for episode in batch.episodes if episode.valid]
    rewards = {episode.reward.value for episode in valid if isinstance(episode.reward, Reward)}
    if len(rewards) == 1 and len(valid) > 1:
        yield (
            f"all {len(valid)} rewards of the first batch are {min(rewards):g}, so nothing can be learned from it: is "
            "the task too hard or solved already, or is the reward wrong? rollouts/first_step.txt shows some, "
            "tools/check_reward.py tries a reward on its own"
        )
    samples = [sample for minibatch in batch.minibatches for sample in minibatch]
    weights = [w for s in samples for w in (s.pg_weight, s.ce_weight, s.kl_weight)]
    if rewards and not any(np.any(weight) for weight in weights):
        yield (
            "no token of the first batch has a weight in the loss: every group has equal rewards, or every rollout was "
            "masked (mask_truncated)"
        )
    truncated = sum(episode.status == "truncated" for episode in valid)
    if valid and truncated > MANY * len(valid):
        yield (
            f"{truncated} of {len(valid)} rollouts of the first batch hit a length limit: raise "
            "orchestrator.sampling.max_tokens (or the source's), or check that the model ends its answers"
        )
    failed = len(batch.episodes) - len(valid)
    if failed > MANY * len(batch.episodes):
        yield f"{failed} of {len(batch.episodes)} rollouts of the first batch came to no reward; the log shows why"


def describe(batch: Batch, decode: Callable[[list[int]], str]) -> str:
    """A few rollouts of the batch for people: what was given, what was sampled, what is learned from it."""
    by_reward = sorted((e for e in batch.episodes if e.samples), key=_value)
    shown = by_reward[:: max(1, len(by_reward) // SHOWN)][-SHOWN:]
    lines = ["first batch, some rollouts ([...] was given, everything else was sampled by the policy):"]
    for episode in shown:
        reward = f"{episode.reward.value:g}" if isinstance(episode.reward, Reward) else "none"
        parts = getattr(episode.reward, "parts", {})
        named = "".join(f", {name} {value:g}" for name, value in parts.items())
        lines.append(f"  task {episode.task.source} #{episode.task.index}: reward {reward}{named}, {episode.status}")
        lines += [f"    {_sample(sample, decode)}" for sample in episode.samples]
    return "\n".join(lines) + "\n"


def _value(episode: Episode) -> float:
    return episode.reward.value if isinstance(episode.reward, Reward) else -float("inf")


def _sample(sample: Sample, decode: Callable[[list[int]], str]) -> str:
    """Runs of given and sampled tokens, and what the loss makes of the sampled ones."""
    edges = np.flatnonzero(np.diff(sample.mask.astype(np.int8))) + 1
    runs = np.split(np.arange(len(sample.mask)), edges)
    texts = [(bool(sample.mask[run[0]]), _text(sample.tokens[run], decode)) for run in runs if len(run)]
    shown = "".join(
        text[:COMPLETION_CHARACTERS] if sampled else f"[{text[-PROMPT_CHARACTERS:]}]" for sampled, text in texts
    )
    sampled = int(np.count_nonzero(sample.mask))
    advantage = sample.advantages
    if advantage is None:
        return f"{shown!r}  {sampled} tokens, not trained on"
    mean = float(np.broadcast_to(advantage, len(sample.mask))[sample.mask == 1].mean()) if sampled else 0.0
    return f"{shown!r}  {sampled} tokens, advantage {mean:+.3f}" + ("" if mean else " (nothing is learned)")


def _text(tokens: np.ndarray, decode: Callable[[list[int]], str]) -> str:
    try:
        return decode(tokens.tolist())
    except Exception as error:  # a viewer must not end a run
        return f"<not decodable: {error}>"
