"""Demonstrations: the teacher in the policy's place says and hears what an attempt would have in it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from spmd_rl.envs.agent import run_tools
from spmd_rl.envs.chat import Chat
from spmd_rl.envs.demonstrate import DemonstrationError, Demonstrator, demonstration
from spmd_rl.envs.protocol import Policy
from spmd_rl.envs.tools import Tools
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Status, Task
from tests.envs.fakes import ScriptedPolicy, byte_tokenizer

TASK = Task("guess", 3, {"number": 5})
HEADER = "<|im_end|>\n<|im_start|>assistant\n"


class Guess:
    """Guess a number; after the first guess, the history is written anew where `restarts`."""

    def __init__(self, turns: int = 3, restarts: bool = False, status: Status = "ok", **chat: Any) -> None:
        self.turns, self.restarts, self.status, self.chat = turns, restarts, status, chat
        self.reward: Reward | RewardError = Reward(1.0)
        self.heard: list[list[str]] = []

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        chat = Chat(byte_tokenizer(), policy, **self.chat)
        chat.user("Guess.")
        for turn in range(self.turns):
            reply = await chat.reply()
            if turn == 0 and self.restarts:
                chat.restart()
            chat.user("lower" if int(reply.text) > task.data["number"] else "higher")
        return Episode(task, chat.samples(), self.reward, status=self.status)

    def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
        self.heard.append(heard)
        return str(rng.integers(10)) if len(heard) == 1 else str(len(heard[-1]))


def demonstrate(env: Any, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    return asyncio.run(demonstration(byte_tokenizer(), env, TASK, np.random.default_rng(seed)))


def decoded(ids: np.ndarray) -> str:
    return byte_tokenizer().decode(ids.tolist())


def test_a_demonstration_is_the_attempt_that_says_the_same() -> None:
    env = Guess()
    ((tokens, mask),) = demonstrate(env)
    said = decoded(tokens[mask == 1]).split("<|im_end|>")[:-1]
    assert len(said) == 3
    policy = ScriptedPolicy(byte_tokenizer(), said)
    (sample,) = asyncio.run(Guess().rollout(TASK, policy)).samples
    np.testing.assert_array_equal(tokens, sample.tokens)
    np.testing.assert_array_equal(mask, sample.mask)
    assert (tokens.dtype, mask.dtype) == (np.int32, np.uint8)


def test_the_teacher_hears_what_was_added_before_each_turn() -> None:
    env = Guess()
    ((tokens, _),) = demonstrate(env)
    assert [len(heard) for heard in env.heard] == [1, 2, 3]
    last = env.heard[-1]
    assert last[0] == "<|im_start|>user\nGuess." + HEADER
    assert [text.split(HEADER)[0].split("user\n")[1] in ("lower", "higher") for text in last[1:]] == [True, True]
    assert env.heard[0] == last[:1] and env.heard[1] == last[:2]
    rest = decoded(tokens)
    for text in last:  # in order, in between what the teacher said
        rest = rest.split(text, 1)[1]


def test_what_was_heard_is_the_teachers_own_list() -> None:
    class Forgetful(Guess):
        def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
            said = super().solve(task, [*heard], rng)
            heard.clear()
            return said

    env = Forgetful()
    demonstrate(env)
    assert [len(heard) for heard in env.heard] == [1, 2, 3]


def test_a_history_is_kept_once() -> None:
    policy = Demonstrator(byte_tokenizer(), Guess(), TASK, np.random.default_rng(0))

    async def run() -> None:
        tokens = np.array([65], np.int32)
        for _ in range(5):
            made = await policy.generate(tokens, policy.sampling)
            tokens = np.concatenate([tokens, made.tokens, tokens[:1]])

    asyncio.run(run())
    assert len(policy._histories) == 1


def test_after_a_restart_the_teacher_hears_a_new_prompt() -> None:
    env = Guess(restarts=True)
    samples = demonstrate(env)
    assert len(samples) == 2
    assert [len(heard) for heard in env.heard] == [1, 1, 2]
    assert env.heard[1][0].startswith("<|im_start|>user\n") and env.heard[2][0] == env.heard[1][0]


def test_seats_that_take_turns_have_histories_of_their_own() -> None:
    class Seats(Guess):
        async def rollout(self, task: Task, policy: Policy) -> Episode:
            seats = [Chat(byte_tokenizer(), policy, agent=name) for name in "ab"]
            for turn in range(4):
                seats[turn % 2].user(f"turn {turn}")
                await seats[turn % 2].reply()
            return Episode(task, seats[0].samples() + seats[1].samples(), self.reward)

        def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
            self.heard.append(heard)
            return "move"

    env = Seats()
    assert len(demonstrate(env)) == 2
    turns = [[text.split("turn ")[1][0] for text in heard] for heard in env.heard]
    assert turns == [["0"], ["1"], ["0", "2"], ["1", "3"]]


def test_a_teacher_may_call_tools() -> None:
    def double(x: int) -> int:
        """Twice x."""
        return 2 * x

    class Doubling(Guess):
        async def rollout(self, task: Task, policy: Policy) -> Episode:
            tools = Tools(double)
            chat = Chat(byte_tokenizer(), policy, tools=tools.schemas)
            chat.user("Double 4.")
            last = await run_tools(chat, tools, max_turns=3)
            return Episode(
                task, chat.samples(), Reward(float(last.text == "8")) if last.made else RewardError("no call")
            )

        def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
            if len(heard) == 1:
                return '<tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call>'
            return heard[-1].split("<tool_response>")[1].split("</tool_response>")[0]

    ((tokens, mask),) = demonstrate(Doubling())
    assert decoded(tokens[mask == 1]).endswith("</tool_call><|im_end|>8<|im_end|>")
    assert byte_tokenizer().convert_tokens_to_ids("<tool_call>") in tokens[mask == 1]


def test_chance_comes_from_the_rng_alone() -> None:
    def tokens(seed: int) -> list[int]:
        return demonstrate(Guess(turns=1), seed)[0][0].tolist()

    assert tokens(1) == tokens(1)
    assert len({tuple(tokens(seed)) for seed in range(10)}) > 1


def failing(env: Any, says: str) -> None:
    with pytest.raises(DemonstrationError, match=says):
        demonstrate(env)


def test_a_demonstration_that_fails_says_so() -> None:
    env = Guess()
    env.reward = RewardError("no sandbox")
    failing(env, "the demonstration of task guess #3 has no reward: no sandbox")
    failing(Guess(status="failed"), "ended with the status failed, not ok")
    failing(Guess(turns=0), "has no samples")


def test_a_turn_that_would_be_cut_is_an_error() -> None:
    class Wordy(Guess):
        def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
            return "7" * 8

    failing(Wordy(max_tokens=8), "turn 1 has 9 tokens with its end, and a reply of this environment max_tokens = 8")
    assert demonstrate(Wordy(max_tokens=9))


def test_a_teacher_that_says_no_text_is_an_error() -> None:
    class Mute(Guess):
        def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> Any:
            return None

    failing(Mute(), "solve returned NoneType in turn 1; return a string")


def test_what_a_teacher_says_ends_where_its_turn_ends() -> None:
    class Odd(Guess):
        def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
            return "\ud800<|im_end|>"

    policy = Demonstrator(byte_tokenizer(), Odd(), TASK, np.random.default_rng(0))
    made = asyncio.run(policy.generate(np.array([65], np.int32), policy.sampling))
    assert decoded(made.tokens) == "�< |im_end|><|im_end|>"
    assert (made.logprobs.tolist(), made.versions.tolist()) == ([0.0] * len(made.tokens), [0] * len(made.tokens))
