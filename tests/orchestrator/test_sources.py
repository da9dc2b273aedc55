"""What sources have of their own: names, sizes, sampling, deadlines, advantages; and what they share."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from spmd_rl.algorithms.check import check_algorithm
from spmd_rl.config.errors import ConfigError
from spmd_rl.config.tree import Config, EvalConfig, SamplingConfig, SourceConfig
from spmd_rl.orchestrator.sources import for_evaluation, source_names
from tests.orchestrator.fake_run import FakeEnvironment, make_config, train


def config_of(*sources: SourceConfig, **options) -> Config:
    made = make_config(**options)
    return replace(made, orchestrator=replace(made.orchestrator, source=sources))


def test_names() -> None:
    envs = ["guess", "my.pkg:Env", "other.pkg:Env", "own.py:Mine"]
    sources = [SourceConfig(env=env) for env in envs]
    sources += [SourceConfig(data="dir/rows.jsonl"), SourceConfig(data="org/set", name="math")]
    assert source_names(sources) == ["guess", "Env_1", "Env_2", "Mine", "rows", "math"]


def test_groups_sampling_and_metrics_are_each_source_s_own() -> None:
    sources = (SourceConfig(env="a", group_size=2, temperature=0.5), SourceConfig(env="b", group_size=4, max_tokens=2))
    config = config_of(*sources, batch_unit="groups", eval_tasks=2)
    config = replace(config, orchestrator=replace(config.orchestrator, batch_size=4))
    made = train(config, [FakeEnvironment(source="a"), FakeEnvironment(source="b")])
    for batch in made.report.batches.values():
        for group in batch.groups:
            a = group.task.source == "a"
            assert group.source == (0 if a else 1)
            assert len(group.episodes) == (2 if a else 4)
            for episode in group.episodes:
                (sample,) = episode.samples
                sampled = sample.mask == 1
                assert set(sample.temperatures[sampled]) == {0.5 if a else 1.0}
                assert a or sampled.sum() <= 2
    _, metrics, _ = made.report.evaluations[-1]
    assert {"eval/a/reward", "eval/b/reward", "eval/a/pass@2", "eval/reward"} <= set(metrics)


def test_deadlines_are_each_source_s_own() -> None:
    async def slow(number: int, task) -> None:
        await asyncio.sleep(50.0)

    sources = (SourceConfig(env="a", rollout_s=10.0), SourceConfig(env="b"))
    envs = [FakeEnvironment(act=slow, source="a"), FakeEnvironment(act=slow, source="b")]
    made = train(config_of(*sources, max_error_rate=1.0, groups=4), envs)
    assert {group.task.source for batch in made.report.batches.values() for group in batch.groups} == {"b"}
    assert made.services.rollouts.statuses["timeout"] > 0


def test_advantages_are_each_source_s_own() -> None:
    """RLOO compares with the others of the group, GRPO with the group's mean: n / (n − 1) times as much."""
    sources = (SourceConfig(env="a"), SourceConfig(env="b", algorithm="rloo"))
    config = config_of(*sources, groups=4, group_size=4, max_steps=4)
    made = train(config, [FakeEnvironment(source="a"), FakeEnvironment(source="b")])
    checked = set()
    for batch in made.report.batches.values():
        for group in batch.groups:
            rewards = np.array([episode.reward.value for episode in group.episodes])
            factor = 1.0 if group.task.source == "a" else 4 / 3
            advantages = [episode.samples[0].advantages for episode in group.episodes]
            assert advantages == pytest.approx(list(factor * (rewards - rewards.mean())), abs=1e-6)
            if rewards.std() > 0:
                checked.add(group.task.source)
    assert checked == {"a", "b"}


def test_a_source_can_t_have_a_loss_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"source.0.algorithm = 'sft' is none .* choose grpo"):
        check_algorithm(config_of(SourceConfig(env="a", algorithm="sft")))


def test_evaluation_may_sample_otherwise() -> None:
    training = SamplingConfig(temperature=1.0, max_tokens=8)
    assert for_evaluation(training, EvalConfig()) == training
    assert for_evaluation(training, EvalConfig(temperature=0.6, top_p=0.9, top_k=20, max_tokens=16)) == SamplingConfig(
        temperature=0.6, top_p=0.9, top_k=20, max_tokens=16
    )
