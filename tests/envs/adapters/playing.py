"""What tests of the adapter for verifiers share: environments of offline tasksets, and a policy that remembers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.adapters.verifiers import environment_class
from spmd_rl.envs.protocol import Generation
from spmd_rl.rollouts.types import Episode, Sample, Task
from tests.envs.fakes import ScriptedPolicy, byte_tokenizer


class Remembering(ScriptedPolicy):
    """Every token has a version of its own; `heard` holds (prompt, generation) of every call."""

    def __init__(self, texts: Any, **options: Any) -> None:
        super().__init__(byte_tokenizer(), texts, **options)
        self.heard: list[tuple[np.ndarray, Generation]] = []

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        await asyncio.sleep(0)
        said = await super().generate(tokens, sampling)
        before = sum(len(generation.tokens) for _, generation in self.heard)
        said = replace(said, versions=np.arange(before, before + len(said.tokens), dtype=np.int32))
        self.heard.append((tokens.copy(), said))
        return said


def make(taskset: str = "offline_taskset", seed: int = 0, tokenizer: Any = None, **args: Any) -> Any:
    """The environment `verifiers:<taskset>`."""
    return environment_class(taskset)(tokenizer or byte_tokenizer(), seed, taskset, **args)


def play(env: Any, texts: Any, task: Task | None = None, **options: Any) -> tuple[Episode, Remembering]:
    """One rollout of the first training task, and the policy afterwards."""
    policy = Remembering(texts, **options)
    return asyncio.run(env.rollout(task or env.task(0, "train"), policy)), policy


def check(samples: tuple[Sample, ...], policy: Remembering) -> None:
    """Every sample is what the engine saw and sampled, and everything sampled is in one sample."""
    turns = iter(policy.heard)
    for sample in samples:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.mask, [0]])))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            prompt, said = next(turns)
            assert np.array_equal(sample.tokens[:start], prompt)
            assert np.array_equal(sample.tokens[start:end], said.tokens)
            assert np.array_equal(sample.logprobs[start:end], said.logprobs)
            assert np.array_equal(sample.versions[start:end], said.versions)
            assert (sample.temperatures[start:end] == np.float32(policy.sampling.temperature)).all()
        assert end == len(sample.tokens)
        assert (sample.versions[sample.mask == 0] == -1).all() and not sample.logprobs[sample.mask == 0].any()
    assert next(turns, None) is None


def text(tokens: np.ndarray) -> str:
    """The tokens as text."""
    return byte_tokenizer().decode(tokens.tolist())
