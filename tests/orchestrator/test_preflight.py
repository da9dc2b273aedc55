"""What can be known to be wrong before the first rollout is found then, and says what to change."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_rl.config.tree import Config, EvalConfig, ModelConfig, OrchestratorConfig, SourceConfig, WarmupConfig
from spmd_rl.orchestrator.preflight import (
    LOOKED_AT,
    PreflightError,
    check_disk,
    check_vocabulary,
    load_environments,
    load_tokenizer,
    stop_tokens,
)

ENVIRONMENT = '''
import numpy as np
from spmd_rl.rollouts.types import Task

class Plain:
    """A prompt of `length` tokens; task `broken_at` of `split` raises."""
    def __init__(self, tokenizer, seed, length=3, long_at=-1, broken_at=-1, split="train"):
        self.length, self.long_at, self.broken_at, self.split = length, long_at, broken_at, split
    def task(self, index, split):
        if (index, split) == (self.broken_at, self.split):
            raise KeyError(f"row {index}")
        return Task("plain", index, {"split": split})
    def prompt(self, task):
        long = task.index == self.long_at and task.data["split"] == self.split
        return np.zeros(64 if long else self.length, np.int32)

class Taught(Plain):
    def teacher(self, task, rng):
        return self.prompt(task), self.prompt(task)
'''


def tokenizer(largest: int = 99, eos: int | None = 2) -> Any:
    return SimpleNamespace(get_vocab=lambda: {"a": 0, "b": largest}, eos_token_id=eos)


def config(*sources: SourceConfig, warmup: int = 0, eval_tasks: int = 0, **changes: Any) -> Config:
    orchestrator = OrchestratorConfig(source=sources, eval=EvalConfig(tasks=eval_tasks))
    return Config(seq_len=64, warmup=WarmupConfig(steps=warmup), orchestrator=orchestrator, **changes)


@pytest.fixture
def source(tmp_path: Path):
    """A function that makes a source of the environments above."""
    file = tmp_path / "environments.py"
    file.write_text(ENVIRONMENT)
    return lambda name="Plain", **args: SourceConfig(env=f"{file}:{name}", args=args)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])  # of the second, transformers makes one that knows nothing
def test_a_folder_without_a_tokenizer(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(PreflightError, match=r"no tokenizer in .*: set model.tokenizer to a folder or Hub id"):
        load_tokenizer(Config(model=ModelConfig(name=str(tmp_path))))
    with pytest.raises(PreflightError, match="elsewhere"):  # the one that was asked for, not the model's
        load_tokenizer(Config(model=ModelConfig(name=str(tmp_path), tokenizer=str(tmp_path / "elsewhere"))))


def test_a_tokenizer_of_another_model() -> None:
    asked = Config(model=ModelConfig(name="some/model", tokenizer="other/tokenizer"))
    with pytest.raises(
        PreflightError, match=r"'other/tokenizer' makes token ids up to 99, but .*'some/model' .* of 99"
    ):
        check_vocabulary(tokenizer(99), {"vocab_size": 99}, asked)
    check_vocabulary(tokenizer(99), {"vocab_size": 100}, asked)  # more rows than ids is normal: they are padded


def test_the_vocabulary_of_a_model_with_a_text_part() -> None:
    with pytest.raises(PreflightError, match="vocabulary of 50"):
        check_vocabulary(tokenizer(), {"text_config": {"vocab_size": 50}}, Config())
    check_vocabulary(tokenizer(), {}, Config())  # unknown: nothing to say


def test_a_tokenizer_without_an_end_token() -> None:
    with pytest.raises(PreflightError, match="no end-of-sequence token, so no rollout would ever end"):
        check_vocabulary(tokenizer(eos=None), {"vocab_size": 100}, Config())


@pytest.mark.parametrize(
    ("generation_config", "ids"),
    [(None, [2]), ({}, [2]), ({"eos_token_id": 5}, [2, 5]), ({"eos_token_id": [7, 2, 5]}, [2, 5, 7])],
)
def test_generations_end_where_tokenizer_and_model_say(tmp_path: Path, generation_config, ids: list[int]) -> None:
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert stop_tokens(tokenizer(), str(tmp_path)) == ids


def test_environments_come_in_the_order_of_their_sources(source) -> None:
    envs = load_environments(config(source(length=1), source("Taught", length=63)), tokenizer())
    assert [(type(env).__name__, env.length) for env in envs] == [("Plain", 1), ("Taught", 63)]


@pytest.mark.parametrize("length", [0, 64, 65])
def test_a_prompt_that_leaves_no_room(source, length: int) -> None:
    wrong = rf"source\[1\] .*: the prompt of train task 0 has {length} tokens; with seq_len = 64 there is no room"
    with pytest.raises(PreflightError, match=wrong):
        load_environments(config(source(), source(length=length)), tokenizer())


def test_every_prompt_that_is_looked_at_counts(source) -> None:
    last = LOOKED_AT - 1
    with pytest.raises(PreflightError, match=f"train task {last} has 64 tokens"):
        load_environments(config(source(long_at=last)), tokenizer())
    load_environments(config(source(long_at=LOOKED_AT)), tokenizer())


def test_a_task_that_raises_is_named_with_its_source(source) -> None:
    with pytest.raises(
        PreflightError, match=r"orchestrator.source\[0\] \(.*:Plain\): train task 4 raised KeyError: "
    ) as e:
        load_environments(config(source(broken_at=4)), tokenizer())
    assert isinstance(e.value.__cause__, KeyError)


def test_held_out_tasks_are_tried_when_they_will_be_used(source) -> None:
    broken = source(broken_at=0, split="heldout")
    load_environments(config(broken), tokenizer())
    with pytest.raises(PreflightError, match="heldout task 0 raised KeyError"):
        load_environments(config(broken, eval_tasks=1), tokenizer())


def test_a_warm_up_wants_a_teacher_in_every_source(source) -> None:
    load_environments(config(source("Taught"), warmup=1), tokenizer())
    load_environments(config(source("Plain"), warmup=0), tokenizer())
    with pytest.raises(PreflightError, match=r"source\[1\] .*:Plain.* has no teacher, which warmup.steps = 5 needs"):
        load_environments(config(source("Taught"), source("Plain"), warmup=5), tokenizer())


def test_an_unknown_environment_says_what_there_is() -> None:
    with pytest.raises(ValueError, match="unknown environment 'revers'; did you mean 'reverse'"):
        load_environments(config(SourceConfig(env="revers")), tokenizer())


def test_a_disk_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(Config(), output_dir=str(tmp_path))
    check_disk(asked)
    blocks = SimpleNamespace(f_bavail=63 * 256, f_frsize=4096, f_bfree=10**9)
    monkeypatch.setattr(os, "statvfs", lambda folder: blocks)
    with pytest.raises(PreflightError, match=rf"{tmp_path}' has 63 MiB free; a run needs 64 MiB .*another disk"):
        check_disk(asked)
    blocks.f_bavail = 64 * 256
    check_disk(asked)
