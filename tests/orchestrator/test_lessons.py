"""What the warm-up learns: by number, each in its place, few or many different ones, from both kinds of teachers."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from spmd_rl.config.tree import Config, SourceConfig, WarmupConfig
from spmd_rl.envs.chat import Chat
from spmd_rl.models.byte_tokenizer import make_byte_tokenizer
from spmd_rl.orchestrator.lessons import Lessons, can_teach
from spmd_rl.orchestrator.sources import make_sources
from spmd_rl.rollouts.types import Episode, Reward, Task
from tests.orchestrator.fake_run import FakeEnvironment, make_config


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Counting:
    """Two turns, in which the teacher counts on."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.rolled = tokenizer, Counter()

    def task(self, index, split) -> Task:
        return Task("counting", index, {})

    async def rollout(self, task, policy) -> Episode:
        self.rolled[task.index] += 1
        chat = Chat(self.tokenizer, policy)
        for word in ("one", "two"):
            chat.user(word)
            await chat.reply()
        return Episode(task, chat.samples(), Reward(1.0))

    def solve(self, task, heard, rng) -> str:
        assert ("one" if len(heard) == 1 else "two") in heard[-1]
        return f"{task.index}.{len(heard)}.{int(rng.integers(10))}"


def config_of(sources: int, **warmup) -> Config:
    config = make_config(seq_len=256, sources=sources)
    return replace(config, warmup=WarmupConfig(**warmup))


def steps(config: Config, envs, tokenizer, count: int = 2) -> list:
    async def main():
        lessons = Lessons(config, make_sources(config, envs), tokenizer)
        return [await lessons.step(step) for step in range(1, count + 1)]

    return asyncio.run(main())


def said(lesson, tokenizer) -> str:
    tokens, mask = lesson
    return tokenizer.decode(tokens[mask == 1].tolist())


def test_demonstrations_are_whole_rollouts_in_order(tokenizer) -> None:
    first, second = steps(config_of(1, batch_size=3), [env := Counting(tokenizer)], tokenizer)
    assert [said(lesson, tokenizer)[:2] for lesson in first] == ["0.", "1.", "2."]
    assert [said(lesson, tokenizer)[:2] for lesson in second] == ["3.", "4.", "5."]
    assert said(first[1], tokenizer).count("<|im_end|>") == 2 and ".2." in said(first[1], tokenizer)
    assert env.rolled == dict.fromkeys(range(6), 1)


def test_few_lessons_are_made_once_each_and_come_again(tokenizer) -> None:
    made = steps(config_of(1, batch_size=3, lessons=4), [env := Counting(tokenizer)], tokenizer, count=4)
    assert [said(lesson, tokenizer)[0] for step in made for lesson in step] == list("012301230123")
    assert set(env.rolled) == set(range(4)) and set(env.rolled.values()) == {1}


def test_teachers_of_both_kinds_take_turns(tokenizer) -> None:
    (step,) = steps(config_of(2, batch_size=4), [Counting(tokenizer), FakeEnvironment()], tokenizer, count=1)
    assert [len(tokens) > 10 for tokens, _ in step] == [True, False, True, False]
    for tokens, mask in step:
        assert len(tokens) == len(mask) and mask[-1] == 1 and mask[0] == 0
        assert (tokens.dtype, mask.dtype) == (np.int32, np.uint8)


def test_a_lesson_that_fits_no_row_is_an_error(tokenizer) -> None:
    config = replace(config_of(1, batch_size=1), seq_len=8)
    with pytest.raises(ValueError, match=r"the lesson of mine task 0 has \d+ tokens, and seq_len = 8: raise that"):
        o = replace(config.orchestrator, source=(SourceConfig(name="mine"),))
        steps(replace(config, orchestrator=o), [Counting(tokenizer)], tokenizer)


def test_who_can_teach(tokenizer) -> None:
    assert can_teach(Counting(tokenizer)) and can_teach(FakeEnvironment()) and not can_teach(object())
