"""Whether the pieces of an algorithm fit together: everything that can be judged from the config alone.

A key that would be ignored is an error, for whoever set it believes that it does something. It refuses to know about
ranges of single keys that need no algorithm to judge (`config/check.py`). Invariant: all problems are found at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from spmd_rl.algorithms import ALGORITHMS, resolve, resolve_sources
from spmd_rl.algorithms.types import Algorithm
from spmd_rl.config.errors import ConfigError
from spmd_rl.config.imports import load_object
from spmd_rl.config.tree import AlgorithmConfig, Config

HERE = "orchestrator.algorithm"


def check_algorithm(config: Config) -> None:
    """Raise a ConfigError that lists every piece that does not fit."""
    settings = config.orchestrator.algorithm
    problems = list(_numbers(settings))
    if not problems:
        try:
            algorithm = resolve(settings)
            resolve_sources(config.orchestrator)
            if settings.loss:
                load_object(settings.loss, f"{HERE}.loss")
        except (ImportError, ValueError) as error:
            raise ConfigError([str(error)], "config") from error
        for part in (_batches, _surrogates, _own_functions, _references, _lengths):
            problems += part(config, algorithm)
    if problems:
        raise ConfigError(problems, "config")


def _numbers(a: AlgorithmConfig) -> Iterator[str]:
    numbers = {f"clip.{name}": value for name, value in asdict(a.clip).items()}
    numbers |= {f"correction.{name}": value for name, value in asdict(a.correction).items()}
    for name, value in numbers.items():
        if value != -1 and value < 0:
            yield f"{HERE}.{name} = {value}: must be 0 (off) or more, or -1 (as the algorithm has it)"
    for name in ("icepop", "geometric"):
        low, high = numbers[f"correction.{name}_low"], numbers[f"correction.{name}_high"]
        if low > 1 or 0 < high < 1:
            yield f"{HERE}.correction.{name}_low = {low}, {name}_high = {high}: the band must hold the ratio 1"
    if not 0 <= a.baseline_decay < 1:
        yield f"{HERE}.baseline_decay = {a.baseline_decay}: must be at least 0 and below 1"
    for name in ("gamma", "lam"):
        if getattr(a.critic, name) > 1:
            yield f"{HERE}.critic.{name} = {getattr(a.critic, name)}: must be 1 or less"


def _batches(c: Config, algorithm: Algorithm) -> Iterator[str]:
    o, a = c.orchestrator, c.orchestrator.algorithm
    if algorithm.baseline == "group" and algorithm.learns == "advantages" and o.group_size == 1:
        others = ", ".join(name for name, other in ALGORITHMS.items() if other.baseline != "group")
        yield (
            f"orchestrator.group_size = 1 with {HERE}.type = {a.type}: the baseline is the group's mean reward, so "
            f"every advantage would be 0; set group_size to 2 or more, or another type ({others})"
        )
    if algorithm.baseline != "group" and a.zero_variance == "refill":
        yield (
            f"{HERE}.zero_variance = refill with type = {a.type}, whose baseline is not the group's: a group of equal "
            "rewards teaches as much as any other there; set it to auto"
        )
    if o.batch_unit != "tokens" and a.minibatches > o.groups_per_batch:
        yield (
            f"{HERE}.minibatches = {a.minibatches} with {o.groups_per_batch} groups per batch: every minibatch takes "
            "whole groups; lower it, or raise orchestrator.batch_size"
        )


def _surrogates(c: Config, algorithm: Algorithm) -> Iterator[str]:
    a, policy = c.orchestrator.algorithm, algorithm.policy
    clips = [f"{HERE}.clip.{name}" for name, value in asdict(a.clip).items() if value != -1]
    if clips and policy.surrogate != "clip":
        yield f"{', '.join(clips)} with type = {a.type}: it does not clip; choose ppo, dr_grpo, dapo or gspo, or unset"
    if policy.proximal and policy.surrogate != "clip":
        yield f"{HERE}.proximal with type = {a.type}: there is no clip to decouple; choose ppo, or turn it off"
    if policy.surrogate == "clip" and not policy.proximal and (policy.ratio_cap or policy.sequence_cap):
        yield (
            f"{HERE}.correction.ratio_cap or sequence_cap with type = {a.type}: the clipped ratio is the importance "
            "ratio already; set proximal = true (decoupled PPO), or unset the caps"
        )
    if policy.ratio_cap and policy.sequence_cap:
        yield f"{HERE}.correction: ratio_cap and sequence_cap both truncate the same ratio; set one of them to 0"
    if policy.surrogate == "none":
        changed = [name for name, value in asdict(a.correction).items() if value != -1]
        if changed:
            yield f"{HERE}.correction.{changed[0]} with type = {a.type}: it has no policy gradient to correct; unset it"


def _own_functions(c: Config, algorithm: Algorithm) -> Iterator[str]:
    a = c.orchestrator.algorithm
    own = ALGORITHMS[a.type]
    if a.advantage and own.advantages is None:
        yield f"{HERE}.advantage with type = {a.type}, which has no advantages to replace; choose grpo, or unset it"
    if a.loss and own.learns == "answers":
        yield f"{HERE}.loss with type = {a.type}, which has no policy loss to replace; choose grpo, or unset it"
    pieces = {"clip": asdict(a.clip), "correction": asdict(a.correction)}
    ignored = [f"{name}.{key}" for name, table in pieces.items() for key, value in table.items() if value != -1]
    if a.loss and ignored:
        yield f"{HERE}.loss replaces the surrogate and all corrections, so {', '.join(ignored)} would be ignored"


def _references(c: Config, algorithm: Algorithm) -> Iterator[str]:
    a = c.orchestrator.algorithm
    sampling_teacher = algorithm.learns == "answers"
    if not a.reference and (algorithm.teacher == "reference" or sampling_teacher):
        yield f"{HERE}.type = {a.type} needs a teacher: set {HERE}.reference to a model folder or Hub id"
    if sampling_teacher != (c.deployment.teacher_ranks > 0):
        needs = "needs engines for its teacher; set it to a multiple of inference.tp"
        yield (
            f"deployment.teacher_ranks = {c.deployment.teacher_ranks} with {HERE}.type = {a.type}, which "
            f"{needs if sampling_teacher else 'has no teacher that samples; set it to 0'}"
        )
    if a.reference and a.kl.coef == 0 and algorithm.teacher != "reference" and not sampling_teacher:
        yield f"{HERE}.reference = {a.reference} is not used by type = {a.type} with kl.coef = 0; unset it, or set coef"
    if a.kl.coef and algorithm.learns != "advantages":
        yield f"{HERE}.kl.coef = {a.kl.coef} with type = {a.type}, which moves to its teacher already; set it to 0"
    if a.kl.coef and a.kl.place == "reward" and algorithm.critic:
        yield f"{HERE}.kl.place = reward with type = {a.type}: the critic does not see that reward; use place = loss"
    if a.kl.coef and a.kl.place == "loss" and a.kl.estimator == "k1":
        yield f"{HERE}.kl.estimator = k1 with place = loss has no mean gradient; use k2, k3 or place = reward"


def _lengths(c: Config, algorithm: Algorithm) -> Iterator[str]:
    a, limit = c.orchestrator.algorithm, c.orchestrator.sampling.max_tokens
    if a.overlong_buffer > limit:
        yield (
            f"{HERE}.overlong_buffer = {a.overlong_buffer} is above orchestrator.sampling.max_tokens = {limit}: the "
            "penalty would begin before the first token; lower it"
        )
    if algorithm.learns != "advantages" and (a.length_penalty or a.overlong_buffer > 0):
        yield f"{HERE}.length_penalty or overlong_buffer with type = {a.type}, which uses no rewards; set both to 0"
