"""From finished groups to weighted samples: the one path that every algorithm takes on rank 0.

    rewards → shaped by length → the algorithm's advantages → over a standard deviation → × share of the batch

A token's *share* is the aggregation: what part of the mean over the batch it is. With N sampled tokens in the batch:

    token      1 / N                                    every token alike
    sequence   1 / (sequences · tokens of the sequence) every sequence alike
    prompt     1 / (groups · tokens of the group)       every task alike
    constant   1 / (sequences · max_tokens)             as `token`, but a batch of short rollouts weighs less (Dr. GRPO)

It refuses to know about ratios, clipping and masks of the trainer; those never change a denominator.

Invariants: denominators count the sampled tokens of all valid episodes, before anything is masked; an episode without
a reward never counts as one with reward 0; the order of groups changes no weight (but for `per_agent`, whose baselines
move with the order); no weight is NaN or infinite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spmd_rl.algorithms.lengths import overlong, relative, rewards_of
from spmd_rl.algorithms.types import Algorithm, GroupAdvantages, Memory
from spmd_rl.config.tree import AlgorithmConfig, OrchestratorConfig
from spmd_rl.rollouts.types import Episode, Group, Reward, Sample, TrainSample, Weight

EPSILON = 1e-6  # beside a standard deviation, which may be 0


@dataclass(frozen=True)
class Weighed:
    """A batch that is ready to be packed."""

    groups: list[Group]  # with advantages filled in
    minibatches: list[list[TrainSample]]  # the samples of the valid episodes, made of exactly these
    stats: dict[str, float]


@dataclass(frozen=True)
class _Members:
    """The valid episodes of one group, and how many tokens of each sample were sampled."""

    episodes: list[Episode]
    tokens: list[list[int]]  # [episode][sample]

    @classmethod
    def of(cls, group: Group) -> _Members:
        valid = [episode for episode in group.episodes if episode.valid]
        return cls(valid, [[int(np.count_nonzero(s.mask)) for s in e.samples] for e in valid])


def weigh(
    groups: Sequence[Group],
    algorithm: Algorithm,
    config: OrchestratorConfig,
    memory: Memory,
    oldest: int = 0,
    of_sources: Mapping[int, Algorithm] | None = None,
) -> Weighed:
    """Weigh a batch; `algorithm` is resolved already. ValueError for rewards or advantages that are not finite.

    Tokens that a policy version below `oldest` sampled get no weight; they count in baselines and denominators. Sources
    in `of_sources` (by their number) have advantages by a rule of their own; all else is the batch's.

    Advantages speak of the whole batch, shares of the minibatch (one optimizer step) that a group falls into.
    """
    members = [_Members.of(group) for group in groups]
    rewards = [_shaped(rewards_of(g), m, algorithm, config) for g, m in zip(groups, members, strict=True)]
    advantages: list[GroupAdvantages] = [[] for _ in groups]
    for rule, own in _by_rule(groups, algorithm, of_sources or {}):
        parts = [groups[i] for i in own], [members[i] for i in own], [rewards[i] for i in own]
        for i, values in zip(own, _advantages(*parts, rule, config.algorithm, memory), strict=True):
            advantages[i] = values
    episodes = [
        [_filled(episode, values) for episode, values in zip(m.episodes, a, strict=True)]
        for m, a in zip(members, advantages, strict=True)
    ]
    minibatches: list[list[TrainSample]] = []
    for part in np.array_split(np.arange(len(groups)), config.algorithm.minibatches):
        shares = _shares([members[i] for i in part], algorithm.aggregation, config.sampling.max_tokens)
        minibatches.append([])
        for i, group_shares in zip(part, shares, strict=True):
            for episode, reward, shares_S in zip(episodes[i], rewards[i].tolist(), group_shares, strict=True):
                weighted = _weighted(episode, reward, shares_S, algorithm, config.algorithm)
                minibatches[-1] += map(_without_old, weighted, episode.samples, [oldest] * len(weighted))
    stats = {**episode_counts(groups), "batch/samples": float(sum(map(len, minibatches)))}
    stats["batch/sampled_tokens"] = float(sum(n for m in members for tokens in m.tokens for n in tokens))
    return Weighed([_with_episodes(g, e) for g, e in zip(groups, episodes, strict=True)], minibatches, stats)


def _by_rule(
    groups: Sequence[Group], algorithm: Algorithm, of_sources: Mapping[int, Algorithm]
) -> list[tuple[Algorithm, list[int]]]:
    """Places of the groups that share a rule for advantages: sources of one rule are one batch to it."""
    shared: list[tuple[Algorithm, list[int]]] = []
    for i, group in enumerate(groups):
        rule = of_sources.get(group.source, algorithm)
        own = next((places for other, places in shared if other is rule), None)
        if own is None:
            shared.append((rule, own := []))
        own.append(i)
    return shared


def _shaped(rewards_E: np.ndarray, members: _Members, algorithm: Algorithm, config: OrchestratorConfig) -> np.ndarray:
    """Rewards less the penalties for length that are on."""
    settings, limit = config.algorithm, config.sampling.max_tokens
    if not len(rewards_E):
        return rewards_E
    lengths_E = np.array([sum(tokens) for tokens in members.tokens])
    buffer = settings.overlong_buffer if settings.overlong_buffer >= 0 else int(algorithm.overlong_share * limit)
    off_E = np.zeros_like(rewards_E)
    if buffer:
        off_E = off_E + overlong(lengths_E, limit, buffer, settings.overlong_penalty)
    if settings.length_penalty:
        off_E = off_E + relative(rewards_E, lengths_E, settings.length_penalty)
    return rewards_E - off_E


def _advantages(
    groups: Sequence[Group],
    members: Sequence[_Members],
    rewards: Sequence[np.ndarray],
    algorithm: Algorithm,
    settings: AlgorithmConfig,
    memory: Memory,
) -> list[GroupAdvantages]:
    """[group][episode][sample], float32's range. A critic's algorithm and a teacher's have none: all 0."""
    if algorithm.advantages is None:
        return [[[0.0] * len(episode.samples) for episode in m.episodes] for m in members]
    some = [i for i, r in enumerate(rewards) if len(r)]  # a group may have no valid episode; then it has no mean
    ruled = algorithm.advantages([groups[i] for i in some], [rewards[i] for i in some], settings, memory)
    advantages: list[GroupAdvantages] = [[] for _ in groups]
    for i, values in zip(some, ruled, strict=True):
        advantages[i] = values
    if algorithm.std == "group":
        advantages = [_scaled(a, 0.0, _std([a])) for a in advantages]
    elif algorithm.std == "batch":
        flat = [value for a in advantages for values in a for value in values]
        # Where the baseline is the group's, the mean is 0 already, and equal rewards must stay at exactly 0.
        mean = float(np.mean(flat)) if algorithm.baseline == "batch" and flat else 0.0
        std = _std(advantages)
        advantages = [_scaled(a, mean, std) for a in advantages]
    return advantages


def _std(advantages: Sequence[GroupAdvantages]) -> float:
    """Population standard deviation over all samples, and a little: it is divided by."""
    flat = [value for group in advantages for values in group for value in values]
    return (float(np.std(flat)) if flat else 0.0) + EPSILON


def _scaled(advantages: GroupAdvantages, mean: float, std: float) -> GroupAdvantages:
    return [[(value - mean) / std for value in values] for values in advantages]


def _shares(members: Sequence[_Members], aggregation: str, max_tokens: int) -> list[list[list[float]]]:
    """The share of each sampled token of each sample in the mean over the batch, [group][episode][sample]."""
    in_group = [sum(n for tokens in m.tokens for n in tokens) for m in members]
    in_batch, sequences = sum(in_group), sum(len(tokens) for m in members for tokens in m.tokens)

    def share(own: int, group: int) -> float:
        match aggregation:
            case "token":
                return 1 / max(1, in_batch)
            case "sequence":
                return 1 / (sequences * max(1, own))
            case "prompt":
                return 1 / (sum(n > 0 for n in in_group) * max(1, group))
            case "constant":
                return 1 / (sequences * max_tokens)
        raise ValueError(f"unknown aggregation {aggregation!r}; choose token, sequence, prompt or constant")

    return [
        [[share(own, group) for own in tokens] for tokens in m.tokens]
        for m, group in zip(members, in_group, strict=True)
    ]


def _filled(episode: Episode, advantages: Sequence[float]) -> Episode:
    samples = [replace(s, advantages=a) for s, a in zip(episode.samples, advantages, strict=True)]
    return replace(episode, samples=tuple(samples))


def _with_episodes(group: Group, valid: Sequence[Episode]) -> Group:
    """The group with its valid episodes exchanged, in order."""
    exchanged = iter(valid)
    return replace(group, episodes=tuple(next(exchanged) if e.valid else e for e in group.episodes))


def _weighted(
    episode: Episode, reward: float, shares: Sequence[float], algorithm: Algorithm, settings: AlgorithmConfig
) -> list[TrainSample]:
    """The samples of an episode with their weight streams; a masked one has none, but was counted."""
    masked = settings.mask_truncated and episode.status == "truncated"
    return [
        _train_sample(sample, 0.0 if masked else share, reward, algorithm, settings)
        for sample, share in zip(episode.samples, shares, strict=True)
    ]


def _train_sample(
    sample: Sample, share: float, reward: float, algorithm: Algorithm, settings: AlgorithmConfig
) -> TrainSample:
    by_advantage = 1.0 if algorithm.critic else float(sample.advantages or 0.0)  # a critic's come on the trainer
    ce_weight: Weight = share if algorithm.learns == "answers" else 0.0
    if algorithm.observations:
        ce_weight = _observed(sample, share * settings.observation_weight)
    own_reward = reward if sample.reward is None else sample.reward
    return TrainSample(
        tokens=sample.tokens,
        mask=sample.mask,
        logprobs=sample.logprobs,
        temperatures=sample.temperatures,
        pg_weight=share * by_advantage if algorithm.learns == "advantages" else 0.0,
        ce_weight=ce_weight,
        kl_weight=share * (1.0 if algorithm.learns == "teacher" else settings.kl.coef),
        entropy_weight=share * settings.entropy_bonus,
        reward=own_reward if algorithm.critic else 0.0,
        hint=sample.hint if algorithm.teacher == "hint" else None,
        routes=sample.routes,
    )


def _without_old(train: TrainSample, sample: Sample, oldest: int) -> TrainSample:
    """The sample without the weights of tokens that a version below `oldest` sampled (-1 is a teacher, of no age)."""
    old_T = (sample.versions >= 0) & (sample.versions < oldest)
    if not old_T.any():
        return train

    def kept(weight: Weight) -> Weight:
        if not np.any(weight):
            return weight
        weight_T = weight if isinstance(weight, np.ndarray) else weight * (sample.mask == 1)
        return np.where(old_T, 0, weight_T).astype(np.float32)

    return replace(
        train,
        pg_weight=kept(train.pg_weight),
        ce_weight=kept(train.ce_weight),
        kl_weight=kept(train.kl_weight),
        entropy_weight=kept(train.entropy_weight),
    )


def _observed(sample: Sample, weight: float) -> np.ndarray:
    """`weight` on the tokens that came after the first sampled one and were not sampled, float32[T]."""
    after_first_T = np.maximum.accumulate(sample.mask) > 0
    return np.where(after_first_T & (sample.mask == 0), weight, 0.0).astype(np.float32)


def episode_counts(groups: Sequence[Group]) -> dict[str, float]:
    """Episodes by how they ended."""
    episodes = [episode for group in groups for episode in group.episodes]
    counts = {f"episodes/{status}": 0.0 for status in ("ok", "truncated", "timeout", "failed", "no_reward")}
    for episode in episodes:
        has_reward = episode.valid or episode.status in ("timeout", "failed")
        counts[f"episodes/{episode.status if has_reward else 'no_reward'}"] += 1
    return {"episodes/total": float(len(episodes)), **counts}


def reward_stats(groups: Sequence[Group]) -> dict[str, float]:
    """Of the valid episodes' rewards, as they were given; absent when there is none."""
    rewards = [rewards_of(group) for group in groups]
    if not sum(map(len, rewards)):
        return {"groups/zero_variance": 1.0} if groups else {}
    flat = np.concatenate(rewards)
    parts: dict[str, list[float]] = {}
    for group in groups:
        for episode in group.episodes:
            if episode.valid and isinstance(episode.reward, Reward):
                for name, value in episode.reward.parts.items():
                    parts.setdefault(f"reward/{name}", []).append(value)
    return {
        **{name: float(np.mean(values)) for name, values in parts.items()},
        "groups/zero_variance": sum(map(zero_variance, groups)) / len(groups),
        "reward/mean": float(flat.mean()),
        "reward/std": float(flat.std()),
    }


def zero_variance(group: Group) -> bool:
    """True for a group that a comparison inside it teaches nothing."""
    valid = [episode for episode in group.episodes if episode.valid]
    if any(sample.reward is not None for episode in valid for sample in episode.samples):
        return False  # samples of one episode differ, or may
    return len(set(rewards_of(group).tolist())) < 2
