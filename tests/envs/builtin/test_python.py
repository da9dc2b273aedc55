"""Small functions: what is asked, what answers are worth, what the teacher says, and the boxes that they run in."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.envs.builtin import code_calls
from spmd_rl.envs.builtin.boxes import Boxes
from spmd_rl.envs.builtin.python import TESTS, Python, code_in
from spmd_rl.envs.builtin.python_functions import (
    Function,
    behaviour,
    compact,
    draw_function,
    level_1,
    mistakes,
    outputs,
    outputs_of,
    tried,
)
from spmd_rl.envs.demonstrate import Demonstrator, demonstration
from spmd_rl.envs.sandbox import SandboxError
from spmd_rl.rollouts.types import Episode, RewardError, Task
from tests.envs.builtin.test_python_cheats import verdicts
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

LEVELS = pytest.mark.parametrize("level", [1, 2, 3])
DATA = {"words": "x times 3 plus 1", "kinds": ["int"], "names": ["x"], "expression": "x*3+1"}
TASK = Task(
    "python", 0, {**DATA, "arguments": [[n] for n in range(TESTS)], "outputs": [n * 3 + 1 for n in range(TESTS)]}
)


def made(**knobs: Any) -> Python:
    return Python(byte_tokenizer(), 0, **knobs)


def attempt(said: str | Said, task: Task = TASK, **knobs: Any) -> Episode:
    return asyncio.run(made(**knobs).rollout(task, ScriptedPolicy(byte_tokenizer(), [said])))


# What is asked


def test_a_question_has_words_or_examples_or_both() -> None:
    data = TASK.data | {"arguments": [*TASK.data["arguments"], [20], [-7]], "outputs": [*TASK.data["outputs"], 61, -20]}
    assert made().question(TASK.data) == "x times 3 plus 1"
    assert made(form="function").question(TASK.data) == "f(x): x times 3 plus 1"
    assert made(examples=2).question(data) == "x times 3 plus 1\nf(20) = 61\nf(-7) = -20"
    assert made(examples=2, words=False).question(data) == "f(x)\nf(20) = 61\nf(-7) = -20"
    prompt = byte_tokenizer().decode(made(chat=False).prompt(TASK).tolist())
    assert prompt == "<|im_start|>x times 3 plus 1\n"


@pytest.mark.parametrize(
    ("words", "arguments", "output"),
    [
        ("x times 4 minus 9", [-2], -17),
        ("the rest of x by 7", [-3], 4),
        ("the larger of x and 5", [3], 5),
        ("the smaller of x and 5", [3], 3),
        ("x squared", [-3], 9),
        ("x without its sign", [-3], 3),
        ("minus x", [-3], 3),
        ("y minus x", [3, 10], 7),
        ("the length of s", ["abc"], 3),
        ("how often s has a", ["banana"], 3),
        ("s reversed", ["abc"], "cba"),
        ("s in capitals", ["abc"], "ABC"),
        ("the last letter of s", ["abc"], "c"),
        ("s 3 times", ["ab"], "ababab"),
        ("s and then d", ["ab"], "abd"),
        ("s without any a", ["banana"], "bnn"),
        ("the sum of v", [[1, -5, 3]], -1),
        ("the smallest of v", [[1, -5, 3]], -5),
        ("how often v has 3", [[3, 1, 3]], 2),
        ("v sorted", [[3, 1, 2]], [1, 2, 3]),
        ("v and then 4", [[1]], [1, 4]),
    ],
)
def test_words_say_what_the_expression_does(words: str, arguments: list[Any], output: Any) -> None:
    (function,) = [function for function in level_1() if function.words == words]
    assert outputs(function.expression, function.names, [arguments]) == [output]


def test_no_two_functions_of_level_1_do_the_same() -> None:
    assert len({behaviour(function) for function in level_1()}) == len(level_1()) == 280


@LEVELS
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_functions_are_of_their_level_and_have_mistakes(level: int, seed: int) -> None:
    function = draw_function(level, np.random.default_rng(seed))
    assert (behaviour(function) in {behaviour(f) for f in level_1()}) == (level == 1)
    assert function.expression == compact(function.expression)
    arguments = tried(function.kinds)
    slips = [outputs(slip, function.names, arguments) for slip in mistakes(function, arguments)]
    assert slips and None not in slips and outputs_of(function, arguments) not in slips


@LEVELS
@given(index=st.integers(0, 10**6), split=st.sampled_from(["train", "heldout"]), examples=st.integers(0, 5))
@settings(max_examples=10, deadline=None)
def test_tasks_can_be_solved_and_failed(level: int, index: int, split: Any, examples: int) -> None:
    env, wrong = made(level=level, examples=examples), made(level=level, wrong=1.0)
    task = env.task(index, split)
    assert task == made(level=level, examples=examples).task(index, split)
    assert json.loads(json.dumps(task.data)) == task.data
    arguments, right = task.data["arguments"], task.data["outputs"]
    assert len(arguments) == len(right) == TESTS + examples == len({json.dumps(a) for a in arguments})
    assert outputs(env.solve(task, [], np.random.default_rng(0)), task.data["names"], arguments) == right
    for seed in range(3):
        slip = outputs(wrong.solve(task, [], np.random.default_rng(seed)), task.data["names"], arguments[:TESTS])
        assert slip is not None and slip != right[:TESTS]
    assert any(value != right[0] for value in right[:TESTS])


@LEVELS
def test_what_is_held_out_does_nothing_that_is_trained(level: int) -> None:
    done: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for split, found in done.items():
        env = made(level=level)
        for index in range(50):
            data = env.task(index, split).data
            found.add(behaviour(Function("", tuple(data["kinds"]), tuple(data["names"]), data["expression"])))
    assert min(map(len, done.values())) > 15 and not done["train"] & done["heldout"]


# What answers are worth


@pytest.mark.parametrize(
    ("said", "form", "value"),
    [
        ("x*3+1", "expression", 1),
        (" 1 + x + 2 * x \n", "expression", 1),
        ("lambda n: n * 3 + 1", "expression", 1),
        ("<think>x*4?</think>```python\nx*3+1\n```", "expression", 1),
        ("__import__('math').prod([x, 3]) + 1", "expression", 1),
        ("x*3+2", "expression", 0),
        ("x*3+1 if x<15 else 0", "expression", 0),
        ("y*3+1", "expression", 0),
        ("It is x*3+1", "expression", 0),
        ("def f(x): return x*3+1", "expression", 0),
        ("def f(x): return x*3+1", "function", 1),
        ("import math\nprint('hello')\ndef f(x):\n    print(x)\n    return math.prod([x, 3]) + 1", "function", 1),
        ("f = lambda x: x*3+1", "function", 1),
        ("def g(x): return x*3+1", "function", 0),
        ("def f(x, y): return x*3+1", "function", 0),
        ("def f(x): return str(x*3+1)", "function", 0),
        ("def f(x): return [x*3+1]", "function", 0),
        ("x*3+1", "function", 0),
        ("", "function", 0),
    ],
)
def test_answers(said: str, form: str, value: float) -> None:
    episode = attempt(said, form=form, max_tokens=200)
    assert (episode.reward.value, episode.status) == (value, "ok")


@pytest.mark.parametrize(
    "said", ["²", "x\0", "\ud800", "(" * 5000, "x" * 10**5, "9" * 5000, "```", "[[]] * 10**9", "x\\"]
)
def test_junk_is_worth_nothing(said: str) -> None:
    text = said.encode("utf-8", "replace").decode()
    assert attempt(text, max_tokens=2**21).reward.value == 0
    if said == "\ud800":
        assert verdicts(said, [[1]], [1]) == [False]


def test_the_dense_reward_is_the_share_of_tests_that_pass() -> None:
    episode = attempt("x*3+1 if x<4 else 1/0", reward="dense", max_tokens=99)
    assert episode.reward.value == 4 / TESTS and episode.reward.parts == {"exact": 0.0, "passed": 4 / TESTS}
    assert attempt("x*3+1", reward="dense").reward.value == 1


def test_an_answer_without_an_end_is_none_and_an_aborted_one_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Boxes, "open", None)  # nothing is run
    cut = attempt(Said("x*3+1", "length"))
    assert (cut.reward.value, cut.status) == (0.0, "truncated")
    aborted = attempt(Said("x*3+1", "aborted"))
    assert (aborted.reward, aborted.status) == (RewardError("a reply was aborted"), "failed")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x+1", "x+1"),
        ("\n x+1 ", "x+1"),
        ("<think>no</think>\nx+1", "x+1"),
        ("So:\n```python\nx+1\n```\nThat is it.", "x+1"),
        ("```\nx+1\n```\n```py\nx+2\n```", "x+2"),
        ("```", "```"),
    ],
)
def test_code_is_the_last_block_or_everything(text: str, code: str) -> None:
    assert code_in(text) == code


# The teacher


@LEVELS
@pytest.mark.parametrize("form", ["expression", "function"])
def test_the_teacher_is_right_and_wrong_as_it_should(level: int, form: str) -> None:
    async def taught(env: Python, task: Task) -> Episode:
        return await env.rollout(task, Demonstrator(byte_tokenizer(), env, task, np.random.default_rng(task.index)))

    async def all_of(env: Python) -> list[Episode]:
        return await asyncio.gather(*(taught(env, env.task(index, "heldout")) for index in range(2)))

    for share in (0.0, 1.0):
        episodes = asyncio.run(all_of(made(level=level, form=form, wrong=share, examples=1, rules=True)))
        assert [e.reward.value for e in episodes] == [1 - share] * 2
        assert {e.status for e in episodes} == {"ok"}


def test_the_teacher_is_wrong_as_often_as_it_says() -> None:
    env = made(wrong=0.3)
    answers = [env.solve(TASK, [], np.random.default_rng(seed)) for seed in range(400)]
    assert np.mean([answer != "x*3+1" for answer in answers]) == pytest.approx(0.3, abs=0.07)
    assert {"x*3+2", "x*4+1", "x*3-1", "x+3+1"} <= set(answers)


@pytest.mark.parametrize("knobs", [{}, {"chat": False}, {"form": "function", "rules": True}])
def test_lessons_without_a_box_are_demonstrations(knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    env = made(wrong=0.5, **knobs)
    ((tokens, mask),) = asyncio.run(demonstration(byte_tokenizer(), env, TASK, np.random.default_rng(1)))
    monkeypatch.setattr(Boxes, "open", None)
    prompt, answer = env.teacher(TASK, np.random.default_rng(1))
    assert [*prompt, *answer] == tokens.tolist() and mask.sum() == len(answer)


@LEVELS
def test_no_answer_of_the_teacher_is_longer_than_a_reply(level: int) -> None:
    for form in ("expression", "function"):
        env = made(level=level, form=form)
        for index in range(60):
            data = env.task(index, "train").data
            function = Function(data["words"], tuple(data["kinds"]), tuple(data["names"]), data["expression"])
            slips = mistakes(function, data["arguments"][:TESTS])
            longest = max(map(len, [function.expression, *slips]))
            assert longest + len("def f(x, y): return ") * (form == "function") < env._style.max_tokens


# Boxes


def test_so_many_programs_at_once_in_each_loop() -> None:
    boxes, running, most = Boxes("test", "auto", False, 3), 0, 0

    async def program() -> None:
        nonlocal running, most
        async with boxes.turn():
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1

    async def many() -> None:
        await asyncio.gather(*(program() for _ in range(20)))

    for _ in range(2):
        asyncio.run(many())
        assert (most, running) == (3, 0)
        most = 0


def test_many_attempts_at_once() -> None:
    env = made(at_once=2)

    async def attempts() -> list[Episode]:
        policies = [ScriptedPolicy(byte_tokenizer(), [f"x*3+{n}"]) for n in range(8)]
        return await asyncio.gather(*(env.rollout(TASK, policy) for policy in policies))

    assert [episode.reward.value for episode in asyncio.run(attempts())] == [0, 1, 0, 0, 0, 0, 0, 0]


def test_a_sandbox_that_fails_is_an_error_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(code_calls, "RUNNER", ["python3", "-c", "raise SystemExit('no Python here')"])
        with pytest.raises(SandboxError, match=r"Python did not start in the box \(exit code 1: no Python here\)"):
            attempt("x*3+1")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="needs bwrap"):
        attempt("x*3+1")


def test_code_runs_unconfined_only_where_that_is_asked_for() -> None:
    with pytest.raises(ValueError, match="python: sandbox = 'subprocess' confines nothing"):
        made(sandbox="subprocess")
    assert attempt("x*3+1", sandbox="subprocess", allow_unsafe=True).reward.value == 1


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"level": 4}, r"python: level = 4 must lie in 1\.\.3"),
        ({"form": "program"}, "python: form = 'program' must be one of expression, function"),
        ({"reward": "half"}, "python: reward = 'half' must be one of exact, dense"),
        ({"examples": -1}, r"python: examples = -1 must lie in 0\.\.20"),
        ({"words": False}, "python: without words it takes examples"),
        ({"wrong": 2}, r"python: wrong = 2 must lie in 0\.\.1"),
        ({"sandbox": "jail"}, "python: sandbox = 'jail' must be one of auto, bwrap, docker, subprocess"),
        ({"at_once": -1}, "python: at_once = -1"),
    ],
)
def test_bad_knobs_are_named(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made(**knobs)
