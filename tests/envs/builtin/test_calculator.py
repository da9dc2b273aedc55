"""The calculator: what is asked, calls and their results, calls that can't be made, and when an attempt is over."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest

from spmd_rl.envs.builtin.calculator import Calculator, call_of, expression_of, value_of
from spmd_rl.envs.chat_template import TemplateError
from spmd_rl.models.byte_tokenizer import make_byte_tokenizer
from spmd_rl.rollouts.types import Episode, Task
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

TASK = Task("calculator", 0, {"first": 347, "steps": [["*", 86]]})
MULTIPLY = '<tool_call>{"name": "multiply", "arguments": {"a": 347, "b": 86}}</tool_call>'
BAD = "<tool_call>{</tool_call>"


def made(**knobs: Any) -> Calculator:
    return Calculator(byte_tokenizer(), 0, **knobs)


def attempt(said: list[str | Said], **knobs: Any) -> tuple[Episode, ScriptedPolicy]:
    policy = ScriptedPolicy(byte_tokenizer(), said)
    return asyncio.run(made(**knobs).rollout(TASK, policy)), policy


def test_a_call_its_result_and_the_answer() -> None:
    episode, policy = attempt([MULTIPLY, "29842"], show_tools=False)
    assert policy.prompts == [
        "<|im_start|>user\ncalculate 347*86<|im_end|>\n<|im_start|>assistant\n",
        f"<|im_start|>user\ncalculate 347*86<|im_end|>\n<|im_start|>assistant\n{MULTIPLY}<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>29842</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ]
    assert (episode.reward.value, episode.status) == (1.0, "ok")
    assert episode.reward.parts == {"turns": 2, "calls": 1, "bad_calls": 0}


def test_the_prompt_shows_the_tools_unless_it_shall_not() -> None:
    for env, shows in ((made(), True), (made(show_tools=False), False)):
        text = byte_tokenizer().decode(env.prompt(TASK).tolist())
        assert all((f'"name": "{name}"' in text) == shows for name in ("add", "subtract", "multiply"))


@pytest.mark.parametrize(
    ("said", "value"), [("29842", 1), (" 29842\n", 1), ("29841", 0), ("It is 29842", 0), ("29,842", 0), ("", 0)]
)
def test_the_answer_alone_counts(said: str, value: float) -> None:
    assert attempt([said])[0].reward.value == value
    assert attempt([BAD, MULTIPLY, said])[0].reward.value == value


def test_calls_that_cannot_be_made_are_answered() -> None:
    unknown = '<tool_call>{"name": "divide", "arguments": {"a": 1, "b": 2}}</tool_call>'
    wrong = '<tool_call>{"name": "add", "arguments": {"a": "1", "b": 2}}</tool_call>'
    episode, policy = attempt([BAD, unknown, MULTIPLY, wrong, "29842"], turns=9)
    answers = re.findall("<tool_response>(.*?)</tool_response>", policy.prompts[-1])
    assert [a.partition(":")[0] for a in answers] == ["error", "error", "29842", "error"]
    assert "the tools are add, subtract, multiply" in answers[1]
    assert episode.reward.parts == {"turns": 5, "calls": 1, "bad_calls": 3}
    assert episode.reward.value == 1


def test_bad_calls_in_a_row_end_the_attempt() -> None:
    episode, policy = attempt([BAD] * 10, bad_calls=2, turns=9)
    assert (len(policy.asked), episode.reward.value, episode.status) == (2, 0.0, "ok")
    episode, policy = attempt([BAD, MULTIPLY, BAD, "29842"], bad_calls=2)
    assert (len(policy.asked), episode.reward.value) == (4, 1.0)


def test_an_attempt_has_so_many_turns() -> None:
    assert len(attempt([MULTIPLY] * 10)[1].asked) == 5
    episode, policy = attempt([MULTIPLY] * 10, turns=3)
    assert (len(policy.asked), episode.reward.value, episode.status) == (3, 0.0, "ok")


def test_an_answer_without_an_end_is_none() -> None:
    episode, _ = attempt([MULTIPLY, Said("29842", "length")])
    assert (episode.reward.value, episode.status) == (0.0, "truncated")


def test_expressions_come_to_what_python_says() -> None:
    for knobs in ({}, {"steps": 4, "digits": 2}, {"digits": 1, "operators": "-"}):
        env = made(**knobs)
        for index in range(100):
            data = env.task(index, "train").data
            assert eval(expression_of(data)) == value_of(data)
            assert {len(n) for n in re.findall("[0-9]+", expression_of(data))} == {knobs.get("digits", 3)}
            assert len(data["steps"]) == knobs.get("steps", 1)
            assert {operator for operator, _ in data["steps"]} <= set(knobs.get("operators", "+-*"))
    assert expression_of({"first": 1, "steps": [["+", 2], ["*", 3], ["-", 4]]}) == "((1+2)*3)-4"


def test_the_teacher_goes_on_with_what_it_was_told() -> None:
    env, rng = made(steps=2), np.random.default_rng(0)
    task = Task("", 0, {"first": 10, "steps": [["+", 5], ["*", 3]]})
    assert env.solve(task, ["prompt"], rng) == call_of("+", 10, 5)
    assert env.solve(task, ["prompt", "15"], rng) == call_of("*", 15, 3)
    assert env.solve(task, ["prompt", "<tool>-16</tool>"], rng) == call_of("*", -16, 3)
    assert env.solve(task, ["prompt", "15", 'result 45, "call_id": "000000000"'], rng) == "45"
    wrong = made(steps=2, wrong=1.0)
    assert wrong.solve(task, ["prompt"], rng) == call_of("+", 10, 6)
    assert wrong.solve(task, ["prompt", "16"], rng) == call_of("*", 16, 5)
    assert wrong.solve(task, ["prompt", "16", "80"], rng) == "84"


def test_a_template_without_tools_is_named_at_once(tmp_path: Any) -> None:
    tokenizer = make_byte_tokenizer(tmp_path)
    tokenizer.chat_template = tokenizer.chat_template.replace("{%- if tools %}", "{%- if false %}")
    with pytest.raises(TemplateError, match="does not show the tool 'add'"):
        Calculator(tokenizer, 0)
    Calculator(tokenizer, 0, show_tools=False)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"digits": 0}, r"calculator: digits = 0 must lie in 1\.\.9"),
        ({"steps": 0}, r"calculator: steps = 0 must lie in 1\.\.20"),
        ({"operators": "/"}, "calculator: operators = '/' must be one or more of"),
        ({"bad_calls": 0}, r"calculator: bad_calls = 0 must lie in 1\.\.1000"),
        ({"turns": -1}, r"calculator: turns = -1 must lie in 0\.\.1000"),
    ],
)
def test_bad_knobs_are_named(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made(**knobs)
