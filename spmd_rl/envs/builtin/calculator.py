"""Work out an expression with a calculator that has to be called: the smallest task with tools.

The numbers are too large for a tiny model's head, but it can copy them into a call, and the result into its answer.
Calls are in Hermes' form. One that can't be made is answered with what is wrong with it, and several of those in a row
end the attempt.

Invariants: whatever the model wrote gets a reward; the reward looks at the answer alone, not at the calls.
"""

from __future__ import annotations

import json
import re

import numpy as np

from spmd_rl.envs.agent import LastReply, run_tools
from spmd_rl.envs.builtin.answers import answer_in
from spmd_rl.envs.builtin.arguments import check_number, check_operators, check_share
from spmd_rl.envs.builtin.conversation import Style, ended
from spmd_rl.envs.builtin.splits import Content, Drawn
from spmd_rl.envs.chat import Chat
from spmd_rl.envs.protocol import Policy, Split, Tokenizer
from spmd_rl.envs.tools import Tools
from spmd_rl.rollouts.types import Episode, Reward, Task


def add(a: int, b: int) -> int:
    """a + b"""
    return a + b


def subtract(a: int, b: int) -> int:
    """a - b"""
    return a - b


def multiply(a: int, b: int) -> int:
    """a * b"""
    return a * b


class Calculator:
    """`calculate 347*86` → `<tool_call>{"name": "multiply", "arguments": {"a": 347, "b": 86}}</tool_call>` → `29842`.

    The reward is 1 for the right number as the last reply, before its end token, and nothing else in it; else 0.
    """

    SOURCE = "calculator"
    RULES = "Work out the expression with the tools, one operation per call. Then answer with the number alone."

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        digits: int = 3,
        steps: int = 1,
        operators: str = "+-*",
        turns: int = 0,
        bad_calls: int = 3,
        show_tools: bool = True,
        wrong: float = 0.0,
        heldout: float = 0.1,
        rules: bool = False,
        max_tokens: int = 0,
    ) -> None:
        """Expressions of `steps` operations, some of `operators`, on numbers of so many `digits`.

        `turns`: replies at most, 0: three more than needed; `bad_calls` that can't be made, in a row, end the attempt;
        `show_tools`: the prompt describes them (some hundred bytes; a tiny model learns them from its teacher);
        `wrong`: share of the teacher's turns with a wrong number; `heldout`: share of the tasks kept from training;
        `rules`: a system message says what to do; `max_tokens`: new tokens per reply, 0: what the longest call needs.
        """
        check_number(self.SOURCE, "digits", digits, 1, 9)
        check_number(self.SOURCE, "steps", steps, 1, 20)
        check_operators(self.SOURCE, operators, "+-*")
        check_number(self.SOURCE, "turns", turns, 0, 1000)
        check_number(self.SOURCE, "bad_calls", bad_calls, 1, 1000)
        check_share(self.SOURCE, "wrong", wrong)
        self._digits, self._steps, self._operators, self._wrong = digits, steps, sorted(set(operators)), wrong
        self._turns, self._bad_calls = turns or steps + 4, bad_calls
        self._tools = Tools([add, subtract, multiply])
        self._shown = self._tools.schemas if show_tools else []
        longest = call_of("*", -(10 ** (digits * steps)), 10**digits)
        self._style = Style(tokenizer, True, self.RULES if rules else "", max_tokens or len(longest) + 2)
        # A template that can't show them is known before anything starts.
        self._asked(None, {"first": 1, "steps": [["+", 1]]}).prompt()
        self._tasks = Drawn(self.SOURCE, seed, heldout, self.draw)

    def draw(self, rng: np.random.Generator) -> Content:
        """The first number, and what is done to it, from left to right."""
        low, high = 10 ** (self._digits - 1), 10**self._digits
        first, *others = (int(n) for n in rng.integers(low, high, self._steps + 1))
        return {"first": first, "steps": [[self._operators[rng.integers(len(self._operators))], n] for n in others]}

    def task(self, index: int, split: Split) -> Task:
        """Task number `index` ≥ 0. ValueError where no task is on that side."""
        return self._tasks.task(index, split)

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]."""
        return self._asked(None, task.data).prompt()

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """Calls and their results, until a reply without a call."""
        chat = self._asked(policy, task.data)
        last = await run_tools(chat, self._tools, max_turns=self._turns, max_bad_calls=self._bad_calls)
        return ended(task, chat, self.reward(task, last))

    def reward(self, task: Task, last: LastReply) -> Reward:
        """Of the last reply."""
        right = last.ended == "done" and answer_in(last.text) == str(value_of(task.data))
        return Reward(
            float(right), {"turns": float(last.turns), "calls": float(last.made), "bad_calls": float(last.bad)}
        )

    def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
        """The next operation on the last result, then the result; a little too much with probability `wrong`."""
        step = len(heard) - 1
        off = 2**step if rng.random() < self._wrong else 0  # mistakes of several turns don't make up for each other
        value = _result_in(heard[-1], value_of(task.data, step)) if step else task.data["first"]
        if step == len(task.data["steps"]):
            return str(value + off)
        operator, number = task.data["steps"][step]
        return call_of(operator, value, number + off)

    def _asked(self, policy: Policy | None, data: Content) -> Chat:
        chat = self._style.begin(policy, tools=self._shown)
        chat.user(f"calculate {expression_of(data)}")
        return chat


def expression_of(data: Content) -> str:
    """What is to be calculated, with brackets around all but the last operation."""
    text = str(data["first"])
    for place, (operator, number) in enumerate(data["steps"]):
        text = f"({text}){operator}{number}" if place else f"{text}{operator}{number}"
    return text


def value_of(data: Content, steps: int | None = None) -> int:
    """What it comes to, after the first `steps` operations or after all of them."""
    value: int = data["first"]
    for operator, number in data["steps"][:steps]:
        value = {"+": add, "-": subtract, "*": multiply}[operator](value, number)
    return value


def call_of(operator: str, a: int, b: int) -> str:
    """The call of one operation."""
    name = {"+": "add", "-": "subtract", "*": "multiply"}[operator]
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'a': a, 'b': b}})}</tool_call>"


def _result_in(text: str, expected: int) -> int:
    """The result in what a template made of a tool's message: the expected number or, where that is not, the last one.

    Some templates write other numbers too, such as the call's id.
    """
    numbers = [int(number) for number in re.findall("-?[0-9]+", text)]
    return expected if expected in numbers else numbers[-1]
