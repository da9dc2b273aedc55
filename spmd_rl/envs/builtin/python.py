"""Write a small Python function that is described in words, by examples, or by both; hidden tests decide.

What the model writes runs in a sandbox (`code_calls.py`), one program per attempt. The tests are inputs that no example
shows; what is right for them never leaves this process.

Invariants: whatever the model wrote gets a reward; only a sandbox that fails raises.
"""

from __future__ import annotations

import re
from typing import ClassVar

import numpy as np

from spmd_rl.envs.builtin.answers import answer_in
from spmd_rl.envs.builtin.arguments import check_choice, check_number, check_share
from spmd_rl.envs.builtin.boxes import Boxes
from spmd_rl.envs.builtin.code_calls import Code, correct_calls
from spmd_rl.envs.builtin.conversation import ShortForm, Style, ended
from spmd_rl.envs.builtin.python_functions import (
    Function,
    behaviour,
    draw_arguments,
    draw_function,
    mistakes,
    outputs_of,
)
from spmd_rl.envs.builtin.splits import Content, Drawn
from spmd_rl.envs.chat_template import template_of
from spmd_rl.envs.protocol import Policy, Split, Tokenizer
from spmd_rl.envs.sandbox import Kind
from spmd_rl.rollouts.types import Episode, Reward, Task

TESTS = 16
LONGEST = {1: 26, 2: 58, 3: 104}  # characters of a teacher's expression, by level
FUNCTION = "def f({}): return {}"
_FENCED = re.compile(r"```[a-zA-Z]*\n(.*?)```", re.DOTALL)


class Python:
    """`x times 3 plus 1` → `x*3+1`, or with `form = "function"`: `f(x): x times 3 plus 1` → `def f(x): return x*3+1`.

    The reward is 1 where all hidden tests pass, else 0; with `reward = "dense"` it is the share that passes. An answer
    without its end token passes none. A lambda is as good as an expression, and a fenced block as what is in it.
    """

    SOURCE = "python"
    RULES = (
        "Write Python. x and y are whole numbers, s is a string, v is a list of whole numbers that is not empty. "
        "Answer with {}, and nothing else."
    )
    ANSWERS: ClassVar = {
        "expression": "one expression of the parameters",
        "function": "the definition of the function f",
    }

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        level: int = 1,
        form: str = "expression",
        words: bool = True,
        examples: int = 0,
        wrong: float = 0.0,
        heldout: float = 0.1,
        reward: str = "exact",
        sandbox: Kind = "auto",
        allow_unsafe: bool = False,
        at_once: int = 0,
        chat: bool = True,
        rules: bool = False,
        max_tokens: int = 0,
    ) -> None:
        """Functions of a `level`: 1 (one step, or `times … plus …`), 2 (two steps) or 3 (with a condition or a loop).

        `form`: answers are an expression or a function; `words`: say what it does; `examples`: how many are shown;
        `wrong`: share of the teacher's answers that are wrong; `heldout`: share of what functions do that is kept from
        training; `sandbox`, `allow_unsafe`, `at_once`: `boxes.py`; `chat`, `rules`, `max_tokens`: `single_turn.py`.
        """
        check_number(self.SOURCE, "level", level, 1, 3)
        check_choice(self.SOURCE, "form", form, tuple(self.ANSWERS))
        check_number(self.SOURCE, "examples", examples, 0, 20)
        check_share(self.SOURCE, "wrong", wrong)
        check_choice(self.SOURCE, "reward", reward, ("exact", "dense"))
        if not words and not examples:
            raise ValueError("python: without words it takes examples: set examples to 1 or more")
        self._level, self._form, self._words, self._examples = level, form, words, examples
        self._wrong, self._dense = wrong, reward == "dense"
        self._boxes = Boxes(self.SOURCE, sandbox, allow_unsafe, at_once)
        longest = LONGEST[level] + (len(FUNCTION) if form == "function" else 0)
        said = self.RULES.format(self.ANSWERS[form]) if rules else ""
        self._template = template_of(tokenizer if chat else ShortForm(tokenizer))
        self._style = Style(tokenizer, chat, said, max_tokens or longest + 2)
        self._tasks = Drawn(self.SOURCE, seed, heldout, self.draw, lambda content: behaviour(_function(content)))

    def draw(self, rng: np.random.Generator) -> Content:
        """A function, the arguments it is tested with, and those of the examples."""
        while True:
            function = draw_function(self._level, rng)
            arguments = draw_arguments(function, TESTS + self._examples, rng)
            outputs = outputs_of(function, arguments)
            if outputs and any(value != outputs[0] for value in outputs[:TESTS]):  # no constant may pass
                break
        return {
            "words": function.words,
            "kinds": list(function.kinds),
            "names": list(function.names),
            "expression": function.expression,
            "arguments": arguments,
            "outputs": outputs,
        }

    def task(self, index: int, split: Split) -> Task:
        """Task number `index` ≥ 0. ValueError where no task is on that side."""
        return self._tasks.task(index, split)

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]."""
        chat = self._style.begin()
        chat.user(self.question(task.data))
        return chat.prompt()

    def question(self, data: Content) -> str:
        """What it does, what it is called where that matters, and examples."""
        head = f"f({', '.join(data['names'])})"
        if self._words:
            head = f"{head}: {data['words']}" if self._form == "function" else data["words"]
        shown = zip(data["arguments"][TESTS:], data["outputs"][TESTS:], strict=True)
        return "\n".join([head, *(f"f({', '.join(map(repr, arguments))}) = {value!r}" for arguments, value in shown)])

    def teacher(self, task: Task, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(prompt int32[T], the teacher's answer int32[n] with its end token). Runs no program, unlike a rollout."""
        answer = [*self._template.said(self.solve(task, [], rng)), self._template.end_id]
        return self.prompt(task), np.asarray(answer, np.int32)

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """One question, one answer, one program. SandboxError when that can't be run."""
        chat = self._style.begin(policy)
        chat.user(self.question(task.data))
        reply = await chat.reply()
        passed = await self._passed(task.data, reply.text) if reply.stop_reason == "stop" else 0.0
        exact = float(passed == 1)
        return ended(task, chat, Reward(passed if self._dense else exact, {"exact": exact, "passed": passed}))

    async def _passed(self, data: Content, text: str) -> float:
        """Share of the hidden tests that pass."""
        code = code_in(text)
        if not code:
            return 0.0
        calls = [("f", arguments) for arguments in data["arguments"][:TESTS]]
        right = data["outputs"][:TESTS]
        passed = await correct_calls(self._boxes, Code(self._form, code, data["names"]), calls, right)
        return sum(passed) / TESTS

    def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
        """The teacher's answer: nearly right with probability `wrong`. It needs nothing of what was `heard`."""
        function = _function(task.data)
        expression = function.expression
        if rng.random() < self._wrong:
            slips = mistakes(function, task.data["arguments"][:TESTS])
            expression = slips[rng.integers(len(slips))]
        return FUNCTION.format(", ".join(function.names), expression) if self._form == "function" else expression


def code_in(text: str) -> str:
    """The code that an answer is: the last fenced block where there is one, else all of it."""
    answer = answer_in(text)
    fenced = _FENCED.findall(answer)
    return answer_in(fenced[-1]) if fenced else answer


def _function(data: Content) -> Function:
    return Function(data["words"], tuple(data["kinds"]), tuple(data["names"]), data["expression"])
