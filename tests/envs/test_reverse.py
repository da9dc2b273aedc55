"""The reverse task: stable split, exact reward, a teacher that is wrong as often as it says."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.protocol import Generation
from spmd_rl.envs.reverse import Reverse

START, END = 256, 257


class ByteTokenizer:
    """Bytes and two special tokens."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            for name, token in (("<|im_start|>", START), ("<|im_end|>", END)):
                if text.startswith(name):
                    ids, text = [*ids, token], text[len(name) :]
                    break
            else:
                ids, text = [*ids, ord(text[0])], text[1:]
        return ids

    def decode(self, token_ids: list[int]) -> str:
        return "".join({START: "<|im_start|>", END: "<|im_end|>"}.get(t) or chr(t) for t in token_ids)


class FixedPolicy:
    """Answers every prompt with the same text and remembers what it was asked."""

    def __init__(self, answer: str) -> None:
        self.answer, self.asked = np.asarray(ByteTokenizer().encode(answer), np.int32), []
        self.sampling = SamplingConfig(temperature=0.9, max_tokens=100)

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        self.asked.append((tokens, sampling))
        n = len(self.answer)
        return Generation(self.answer, np.full(n, -1.0, np.float32), np.zeros(n, np.int32), "stop")


@pytest.fixture(scope="module")
def env() -> Reverse:
    return Reverse(ByteTokenizer(), seed=0)


def test_one_word_in_ten_is_held_out_whatever_the_seed(env: Reverse) -> None:
    train, heldout = set(env.words["train"]), set(env.words["heldout"])
    assert not train & heldout
    assert len(train | heldout) == 8 * 7 * 6 * 5
    assert all(len(set(word)) == 4 for word in train | heldout)
    assert len(heldout) / len(train | heldout) == pytest.approx(0.1, abs=0.02)
    assert env.words == Reverse(ByteTokenizer(), seed=5).words
    assert [env.task(i, "heldout").data["word"] for i in range(3)] == env.words["heldout"][:3]


def test_the_split_is_stable_across_processes_and_releases(env: Reverse) -> None:
    assert env.words["heldout"][:4] == ["behc", "fahe", "ehbf", "cafe"]


def test_every_training_word_comes_once_per_epoch(env: Reverse) -> None:
    n = len(env.words["train"])
    small = Reverse(ByteTokenizer(), seed=1, letters="abcd", length=2)
    m = len(small.words["train"])
    epochs = [[small.task(e * m + i, "train").data["word"] for i in range(m)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == small.words["train"]
    assert epochs[0] != epochs[1]
    assert env.task(n + 1, "train") == Reverse(ByteTokenizer(), seed=0).task(n + 1, "train")
    assert env.task(3, "train").data != Reverse(ByteTokenizer(), seed=1).task(3, "train").data


def test_the_prompt_is_short(env: Reverse) -> None:
    task = env.task(0, "train")
    prompt = env.prompt(task)
    assert prompt.dtype == np.int32
    assert ByteTokenizer().decode(prompt.tolist()) == f"<|im_start|>{task.data['word']}\n"
    assert len(prompt) == 6


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("dcba<|im_end|>", 1.0), ("dcba", 0.0), ("dcba<|im_end|>x", 1.0), ("abcd<|im_end|>", 0.0), ("<|im_end|>", 0.0)],
)
def test_exact_reward(env: Reverse, answer: str, reward: float) -> None:
    task = env.task(0, "train")
    word = task.data["word"]
    answer = answer.replace("dcba", word[::-1]).replace("abcd", word)
    assert env.reward(task, np.asarray(ByteTokenizer().encode(answer))).value == reward


def test_a_rollout_asks_for_few_tokens_and_keeps_the_ids(env: Reverse) -> None:
    task = env.task(0, "train")
    policy = FixedPolicy(task.data["word"][::-1] + "<|im_end|>")
    episode = asyncio.run(env.rollout(task, policy))
    ((tokens, sampling),) = policy.asked
    assert (sampling.max_tokens, sampling.temperature) == (6, 0.9)
    assert episode.reward.value == 1.0
    (sample,) = episode.samples
    assert sample.tokens.tolist() == [*tokens.tolist(), *policy.answer.tolist()]
    assert sample.temperatures[-1] == pytest.approx(0.9)


def test_the_teacher_is_mostly_wrong(env: Reverse) -> None:
    rng = np.random.default_rng(0)
    rewards = []
    for index in range(1000):
        task = env.task(index, "train")
        prompt, answer = env.teacher(task, rng)
        assert prompt.tolist() == env.prompt(task).tolist()
        assert answer[-1] == END and len(answer) <= env.max_tokens
        rewards.append(env.reward(task, answer).value)
    assert np.mean(rewards) == pytest.approx(0.2, abs=0.04)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"wrong = 1\.5"):
        Reverse(ByteTokenizer(), wrong=1.5)
    with pytest.raises(ValueError, match="3 tokens of end = 'abc'"):
        Reverse(ByteTokenizer(), end="abc")
    for length in (1, 9):
        with pytest.raises(ValueError, match=rf"length = {length} must lie in 2..8"):
            Reverse(ByteTokenizer(), length=length)
    with pytest.raises(ValueError, match="no heldout words"):
        Reverse(ByteTokenizer(), heldout=0.0).task(0, "heldout")
