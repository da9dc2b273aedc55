"""Rewards of users and built-in ones: what they get, what they may return, what becomes of the rest."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from spmd_rl.config.tree import SourceConfig
from spmd_rl.envs.deadline import TooSlow
from spmd_rl.envs.rewards import RewardFunction
from spmd_rl.envs.threads import Threads
from spmd_rl.rollouts.types import Reward, RewardError

ROW = {"answer": "42", "schema": '{"type": "object", "required": ["a"]}'}
OWN = """
import asyncio, time
import numpy as np
def number(completion): return len(completion)
def boolean(tokens, row): return tokens == [1] and row["answer"] == "42"
def array_number(): return np.float32(0.5)
def array_boolean(): return np.bool_(True)
class Judge:
    async def __call__(self): await asyncio.sleep(0.01); return 0.75
judge = Judge()
async def slowly(completion): await asyncio.sleep(0.01); return 0.25
def parts(prompt): return {"a": 1, "b": True, "c": 0.5}
def everything(**given): return len(given)
def text(completion): return "good"
def nothing(completion): return None
def nan(completion): return float("nan")
def nan_part(completion): return {"a": 1, "b": float("nan")}
def bad_part(completion): return {"a": "x"}
def no_part(completion): return {}
def fails(completion): raise KeyError("solution")
def hangs(completion): time.sleep(30)
async def blocks(completion): time.sleep(1); return 1
def timed_out(completion): raise TimeoutError("the judge's own")
def empty(completion): return next(iter([]))
def leaves(completion): raise SystemExit(3)
def wants_more(completion, teacher): return 1
constant = 3

import os, threading
def where(): return {"main": threading.current_thread() is threading.main_thread(), "pid": os.getpid()}
def moody(completion): return time.sleep(3600) if completion == "hang" else 1
def dies(completion): os._exit(7)
def wrong(): raise KeyError("solution")
for function in (where, moody, dies, wrong): function.in_process = True
"""


@pytest.fixture
def make(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)

    def make(name: str, **options) -> RewardFunction:
        reward = name if name in ("exact", "regex", "json_schema", "math", "exakt") else f"{tmp_path / 'own.py'}:{name}"
        return RewardFunction(SourceConfig(data="x.jsonl", reward=reward, **options))

    return make


def call(function: RewardFunction, completion: str = "one", tokens=(1,), row=ROW) -> Reward | RewardError:
    return asyncio.run(function(completion=completion, tokens=list(tokens), row=row, prompt="p"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("number", 3.0),
        ("boolean", 1.0),
        ("array_number", 0.5),
        ("array_boolean", 1.0),
        ("slowly", 0.25),
        ("judge", 0.75),
        ("everything", 4.0),
    ],
)
def test_functions_get_what_they_name_and_return_numbers(make, name, value):
    assert call(make(name)) == Reward(value)


def test_named_parts_are_weighted_and_kept(make):
    assert call(make("parts")) == Reward(2.5, {"a": 1.0, "b": 1.0, "c": 0.5})
    assert call(make("parts", weights={"a": 0.5, "c": -2})).value == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text", "must return a number or a dict of numbers; it is 'good' (str)"),
        ("nothing", "it is None (NoneType)"),
        ("nan", "returned nan (it); raise an error"),
        ("nan_part", "returned nan (its part 'b'); raise an error"),
        ("bad_part", "its part 'a' is 'x' (str)"),
        ("no_part", "no part at all"),
        ("fails", "raised KeyError: 'solution'"),
        ("timed_out", "raised TimeoutError: the judge's own"),
        ("empty", "raised RuntimeError: it raised StopIteration()"),
        ("leaves", "raised RuntimeError: it raised SystemExit(3)"),
    ],
)
def test_what_is_no_reward_is_an_error_and_never_a_zero(make, name, message):
    outcome = call(make(name))
    assert isinstance(outcome, RewardError) and message in outcome.why


def test_weights_must_name_parts(make):
    assert "weights name d; the reward" in call(make("parts", weights={"d": 1.0})).why
    assert "weights name a, and the reward" in call(make("number", weights={"a": 1.0})).why


@pytest.mark.parametrize("name", ["hangs", "blocks"])
def test_a_reward_that_hangs_is_an_error_and_holds_up_nobody(make, name):
    function = make(name, reward_s=0.2)

    async def both():
        async def beside():
            await asyncio.sleep(0.05)  # before the deadline, though the function blocks its own thread
            return time.monotonic()

        given = {"completion": "", "tokens": [], "row": ROW, "prompt": ""}
        outcome, woken = await asyncio.gather(function(**given), beside())
        return outcome, woken, time.monotonic()

    outcome, woken, end = asyncio.run(both())
    assert "longer than reward_s = 0.2 s" in outcome.why
    assert woken < end


def test_calls_that_hang_take_no_place_of_others():
    released = threading.Event()

    async def main():
        threads = Threads(lambda hang: released.wait() if hang else 1, at_once=2)
        for _ in range(3):
            with pytest.raises(TooSlow):
                await threads.call({"hang": True}, 0.05)
        return await threads.call({"hang": False}, 20.0)

    try:
        assert asyncio.run(main()) == 1
    finally:
        released.set()


def test_a_call_that_hangs_does_not_keep_the_process(make, tmp_path):
    call = "asyncio.run(Threads(threading.Event().wait).call({}, 0.1))"
    code = f"import asyncio, threading\nfrom spmd_rl.envs.threads import Threads\n{call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.strip().endswith("TooSlow: no result after 0.1 s")


def test_what_an_async_reward_keeps_can_be_used_in_a_later_loop(make):
    """As a client with open connections, which belong to the loop that opened them."""
    loops = []

    async def judge():
        loops.append(asyncio.get_running_loop())

    threads = Threads(judge)
    for _ in range(2):
        asyncio.run(threads.call({}, 20.0))
    assert loops[0] is loops[1] and loops[0].is_running()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exakt", {}, "unknown reward 'exakt'; did you mean exact"),
        ("exact", {}, "name its column in `answer`"),
        ("regex", {"reward_args": {"pattern": "("}}, "not a regular expression"),
        ("regex", {"answer": "answer", "reward_args": {"pattern": "x"}}, "has 0 groups, and group = 1"),
        ("regex", {}, "reward regex: .*pattern.*may hold pattern, group"),
        ("exact", {"answer": "answer", "reward_args": {"trim": True}}, "may hold strip, casefold"),
        ("json_schema", {}, "needs reward_args.schema"),
        ("constant", {}, "is a int, not a function"),
        ("missing", {}, "has no 'missing'"),
        ("number", {"reward_args": {"a": 1}}, "belong to built-in rewards"),
        ("wants_more", {}, "takes teacher; it can be given completion, tokens, row, prompt"),
    ],
)
def test_rewards_that_can_not_work(make, name, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(name, **options)


@pytest.mark.parametrize(
    ("name", "args", "completion", "value"),
    [
        ("exact", {}, " 42\n", 1.0),
        ("exact", {"strip": False}, " 42", 0.0),
        ("exact", {}, "42.", 0.0),
        ("regex", {"pattern": r"answer: (\d+)"}, "answer: 7, no, answer: 42", 1.0),
        ("regex", {"pattern": r"answer: (\d+)"}, "answer: 42, no, answer: 7", 0.0),
        ("regex", {"pattern": r"answer: (\d+)"}, "42", 0.0),
        ("math", {}, r"so it is $\boxed{84/2}$", 1.0),
        ("math", {}, r"\boxed{41}", 0.0),
        ("math", {}, "no idea", 0.0),
    ],
)
def test_built_in_rewards(make, name, args, completion, value):
    assert call(make(name, answer="answer", reward_args=args), completion) == Reward(value)


def test_a_pattern_alone(make):
    function = make("regex", reward_args={"pattern": "<b>.*</b>"})
    assert [call(function, text).value for text in ("<b>x\ny</b>", "<b>")] == [1.0, 0.0]


@pytest.mark.parametrize("where", ["column", "args"])
def test_json_schemas(make, where):
    schema = {"reward_args": {"schema": {"type": "object", "required": ["a"]}, "parses": 0.25}}
    function = make("json_schema", **(schema if where == "args" else {"answer": "schema"}))
    scores = [call(function, text).value for text in ('{"a": 1}', '```json\n{"a": 1}\n```', '{"b": 1}', "a")]
    assert scores == [1.0, 1.0, 0.25 if where == "args" else 0.0, 0.0]


@pytest.mark.parametrize("name", ["exact", "regex", "math"])
def test_null_is_no_answer(make, name):
    function = make(name, answer="answer", reward_args={"pattern": "(.*)"} if name == "regex" else {})
    assert "null in column 'answer'" in call(function, "None", row={"answer": None}).why


def test_a_row_without_the_answer_is_an_error(make):
    assert "KeyError: 'answer'" in call(make("exact", answer="answer"), row={}).why


def test_a_reward_in_a_process_has_a_main_thread(make):
    parts = call(make("where", reward_workers=1)).parts
    assert parts["main"] == 1.0 and parts["pid"] != os.getpid()


def test_a_call_that_hangs_in_a_process_ends_with_it_and_the_next_one_gets_another(make):
    function = make("moody", reward_s=3.0, reward_workers=1)
    assert "longer than reward_s = 3 s" in call(function, "hang").why
    assert call(function, "fine") == Reward(1.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [("dies", "came to no result: .* with code 7"), ("wrong", r"wrong raised KeyError: 'solution'$")],
)
def test_what_goes_wrong_in_a_process_is_said(make, name, message):
    assert re.search(message, call(make(name, reward_workers=1)).why)


def test_numpy_numbers_are_numbers(make):
    assert make("number").as_reward(np.bool_(True) + 0.0).value == 1.0
