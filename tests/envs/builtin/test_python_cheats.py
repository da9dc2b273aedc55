"""Small functions that cheat: no answer gets more than its code is worth."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from spmd_rl.envs.builtin.boxes import Boxes
from spmd_rl.envs.builtin.code_calls import Code, correct_calls


def verdicts(text: str, arguments: list[list[Any]], right: list[Any], form: str = "function") -> list[bool]:
    """Of calls of f, or of an expression of x."""
    boxes = Boxes("test", "auto", False, 0)
    return asyncio.run(correct_calls(boxes, Code(form, text, ["x"]), [("f", each) for each in arguments], right))


EVERY_DESCRIPTOR = """
import os
for n in range(3, 30):
    try: os.write(n, b"[7]\\n" * 50)
    except OSError: pass
"""


CHEATS = {
    "leaves with 0": "import os\nos._exit(0)",
    "leaves when called": "def f(x): raise SystemExit(0)",
    "equals everything": "class E:\n  def __eq__(s, o): return True\n  __hash__ = None\ndef f(x): return E()",
    "a number that equals everything": "class E(int):\n  def __eq__(s, o): return True\ndef f(x): return E(x)",
    "a text that equals everything": "class E(str):\n  def __eq__(s, o): return True\ndef f(x): return E('7')",
    "says it for all": "def f(x): return 7\n" + EVERY_DESCRIPTOR + "os._exit(0)",
    "says it beforehand": EVERY_DESCRIPTOR + "def f(x): return x*3+1",
    "another encoder": "import __main__\n__main__.in_json = lambda v: '7'\ndef f(x): return 0",
    "another len": "import builtins\nbuiltins.len = lambda v: 0\ndef f(x): return 'x' * 10**6",
    "not a number": "def f(x): return float('nan')",
    "hangs": "def f(x):\n  while True: pass",
    "too deep": "def f(x):\n  v = []\n  for _ in range(10**5): v = [v]\n  return v",
    "a circle": "def f(x):\n  v = []\n  v.append(v)\n  return v",
    "too long": "def f(x): return 10 ** 10**5",
    "too large": "v = ['x' * 10**9 for _ in range(99)]",
    "a second process": "import os\npid = os.fork()\ndef f(x): return x*3+1",
    "a thread": "import _thread\n_thread.start_new_thread(print, ())\ndef f(x): return x*3+1",
    "no encoder at all": "import sys\nsys.modules['__main__'].__dict__.clear()\ndef f(x): return x*3+1",
}


@pytest.mark.parametrize("text", CHEATS.values(), ids=CHEATS)
def test_cheats_are_worth_nothing(text: str) -> None:
    assert not all(verdicts(text, [[5], [2], [9]], [16, 7, 28]))


def test_what_is_right_cannot_be_found_in_the_box() -> None:
    search = """
import gc, os, re, sys
def texts():
    frame = sys._getframe()
    while frame:
        yield repr(frame.f_locals) + repr(frame.f_globals)
        frame = frame.f_back
    yield from map(repr, filter(lambda o: type(o) in (str, list, dict, tuple), gc.get_objects()))
    for folder in (".", "/tmp", "/proc/self", "/proc/1", os.path.expanduser("~")):
        for name in os.listdir(folder):
            try: yield open(f"{folder}/{name}", errors="replace").read(10**5)
            except (OSError, ValueError): pass
def f(x):
    for text in texts():
        if found := re.search("SECRET-[0-9]+", text): return found[0]
"""
    secret = f"SECRET-{np.random.default_rng().integers(10**12)}"
    assert verdicts(search, [["nothing"]], [secret]) == [False]
    assert verdicts(search, [[secret]], [secret]) == [True]  # it would have found it


YES, NO = True, False


@pytest.mark.parametrize(
    ("text", "right", "wanted"),
    [
        ("def f(x): return [1, 'a', None, {'k': 2.5}] if x else 1/0", [0, [1, "a", None, {"k": 2.5}]], [NO, YES]),
        ("def f(x): return 'é\\u2028\\n\\ud800'", ["é\u2028\n\ud800", "é"], [YES, NO]),
        ("def f(x): return (x, x)", [[0, 0], [5, 5]], [NO, NO]),
        ("def f(x): return {x: x}", [{"0": 0}, {"5": 5}], [NO, NO]),
        ("def f(x): return x or __import__('sys').exit(0)", [0, 5], [NO, YES]),
        ("def f(x): return x or [][1]", [0, 5], [NO, YES]),
        ("def f(x):\n  print(7, flush=True)\n  return x", [0, 5], [YES, YES]),
        ("def f(x): return 'a' * (5000 - 999 * x)", ["a" * 5000, "aaaaa"], [NO, YES]),
        ("n = 0\ndef f(x):\n  global n\n  n += 1\n  return n", [1, 2], [YES, YES]),
        ("def f(x): return x", [5, 0], [NO, NO]),
    ],
)
def test_a_value_counts_for_its_own_call_and_only_as_json(text: str, right: list[Any], wanted: list[bool]) -> None:
    assert verdicts(text, [[0], [5]], right) == wanted
