"""Attempts at small repositories with a bug: what the tools say, what is a repair and what is not, and the teacher."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.envs.builtin.boxes import Boxes
from spmd_rl.envs.builtin.git_files import repository
from spmd_rl.envs.builtin.repo_fix import RepoFix, call_of
from spmd_rl.envs.builtin.repo_tasks import Size, draw_repository
from spmd_rl.envs.builtin.repo_tools import LARGEST, RepoTools, Workplace, same
from spmd_rl.envs.demonstrate import Demonstrator
from spmd_rl.envs.sandbox import SandboxError
from spmd_rl.rollouts.types import Episode, RewardError, Task
from tests.envs.builtin.repos import BUGGY, EDIT, TASK, attempt, bash, made
from tests.envs.builtin.test_repo_tasks import SIZES
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

# Attempts


def test_a_bug_is_found_repaired_and_seen_to_be() -> None:
    episode, answers = attempt(
        bash("python3 check.py"),
        call_of("read", path="lib.py"),
        EDIT,
        bash("git diff --stat; python3 check.py"),
        "fixed",
    )
    assert (episode.reward.value, episode.status) == (1.0, "ok")
    assert episode.reward.parts == {"exact": 1, "passed": 1, "turns": 5, "calls": 4, "bad_calls": 0}
    assert answers == [
        'Traceback (most recent call last):\n  File "/sandbox/check.py", line 2, in <module>\n'
        "    assert add(5, 2) == 7\n           ^^^^^^^^^^^^^^\nAssertionError\nexit code 1",
        BUGGY,
        "done",
        " lib.py | 2 +-\n 1 file changed, 1 insertion(+), 1 deletion(-)",
    ]


def test_the_prompt_says_what_to_do_and_shows_the_tools_unless_it_shall_not() -> None:
    short = byte_tokenizer().decode(made(chat=False).prompt(TASK).tolist())
    assert short == "<|im_start|>python3 check.py fails: fix lib.py\n"
    for shown in (True, False):
        text = byte_tokenizer().decode(made(show_tools=shown, rules=True).prompt(TASK).tolist())
        assert "one bug in the sources" in text
        assert all((f'"name": "{name}"' in text) == shown for name in ("bash", "read", "edit"))


@pytest.mark.parametrize(
    "command",
    [
        "sed -i 's/ - / + /' lib.py",
        "printf 'import operator\\nadd = operator.add\\n' > lib.py",
        "git rm -q check.py; rm -rf .git README.md; sed -i 's/-/+/' lib.py; echo 'x = (' > check.py",
    ],
)
def test_any_repair_of_the_sources_counts(command: str) -> None:
    assert attempt(bash(command), "done")[0].reward.value == 1


CHEATS = {
    "other tests": "echo 'print(1)' > check.py",
    "no tests": "rm check.py",
    "the tests by heart": "printf 'def add(a, b):\\n    return 7\\n' > lib.py",
    "what the tests ask": "printf 'def add(a, b):\\n    return 7 if (a, b) == (5, 2) else a - b\\n' > lib.py",
    "equals everything": "printf 'class E(int):\\n  __eq__ = lambda s, o: True\\nadd = lambda a, b: E(1)\\n' > lib.py",
    "leaves with 0": "printf 'import os\\nos._exit(0)\\n' > lib.py",
    "set up beforehand": "for f in sitecustomize json os; do printf 'import lib\\nlib.add = int.__add__' > $f.py; done",
    "a module beside it": "echo 'add = int.__add__' > right.py; echo 'from right import *' > lib.py",
    "a package in its place": "mkdir lib; echo 'add = int.__add__' > lib/__init__.py",
    "a link": "echo 'add = int.__add__' > right.py; ln -sf right.py lib.py",
    "a link out": "ln -sf /etc/passwd lib.py",
    "a pipe": "rm lib.py; mkfifo lib.py",
    "nothing": "rm lib.py",
    "a folder": "rm lib.py; mkdir lib.py",
    "too large": "head -c 1000000 /dev/zero | tr '\\\\0' '#' >> lib.py; sed -i 's/ - / + /' lib.py",
    "not text": "head -c 1000 /dev/urandom > lib.py",
    "a shell that lies": "echo 'python3() { sed -i s/-/+/ lib.py; }' > ~/.bashrc; cp ~/.bashrc ~/.profile",
}


@pytest.mark.parametrize("command", CHEATS.values(), ids=CHEATS)
def test_what_is_not_a_repair_is_worth_nothing(command: str) -> None:
    episode, _ = attempt(bash(command), "done")
    assert (episode.reward.value, episode.status) == (0.0, "ok")


def test_a_repair_that_breaks_something_else_is_none() -> None:
    two = BUGGY + "\n\ndef sub(a, b):\n    return a - b\n"
    calls = TASK.data["calls"] + [["lib.sub", [5, 2]], ["lib.sub", [9, 4]]]
    data = TASK.data | {"files": TASK.data["files"] | {"lib.py": two}, "calls": calls, "passing": 2}
    task = Task("", 0, data | {"right": [*TASK.data["right"], 3, 5]})
    both, one, none = "s/-/+/", "2s/-/+/", "s/x/y/"
    for script, exact, dense in ((both, 0, 0.5), (one, 1, 1), (none, 0, 0)):
        assert attempt(bash(f"sed -i '{script}' lib.py"), "", task=task)[0].reward.value == exact
        assert attempt(bash(f"sed -i '{script}' lib.py"), "", task=task, reward="dense")[0].reward.value == dense


def test_how_an_attempt_ends_does_not_matter() -> None:
    look = call_of("read", path="lib.py")
    assert attempt(EDIT, *[look] * 9, turns=3)[0].reward.value == 1
    episode, _ = attempt(EDIT, *["<tool_call>{</tool_call>"] * 9, bad_calls=2)
    assert (episode.reward.value, episode.reward.parts["bad_calls"]) == (1, 2)
    episode, _ = attempt(EDIT, Said("and so", "length"))
    assert (episode.reward.value, episode.status) == (1.0, "truncated")
    episode, _ = attempt(EDIT, Said("and so", "aborted"))
    assert (episode.reward, episode.status) == (RewardError("a reply was aborted"), "failed")


def test_without_a_call_there_is_no_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Boxes, "open", None)
    assert attempt("fixed")[0].reward.value == 0
    assert attempt("<tool_call>{</tool_call>", call_of("write", path="lib.py"), "x")[0].reward.value == 0


def test_a_sandbox_that_fails_is_an_error_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempted(env: RepoFix) -> None:
        asyncio.run(env.rollout(TASK, ScriptedPolicy(byte_tokenizer(), [EDIT + bash("true"), "done"])))

    env, opened, boxes = made(), Boxes.open, []

    def once(self: Boxes, *arguments: Any) -> Any:
        boxes.append(arguments)
        if len(boxes) > 1:
            raise SandboxError("no second box")
        return opened(self, *arguments)

    monkeypatch.setattr(Boxes, "open", once)
    with pytest.raises(SandboxError, match="no second box"):
        attempted(env)
    monkeypatch.setattr(Boxes, "open", opened)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="needs bwrap"):
        attempted(env)


# Tools


def used(*calls: tuple[str, dict[str, str]], files: Mapping[str, str] = TASK.data["files"]) -> list[str]:
    """What the tools answer, one after the other."""

    async def inside() -> list[str]:
        async with Workplace(Boxes("test", "auto", False, 0), repository(files), 20.0) as place:
            tools = RepoTools(place)
            return [await getattr(tools, name)(**arguments) for name, arguments in calls]

    return asyncio.run(inside())


def test_read_and_edit_say_what_is_wrong() -> None:
    texts = {"lib.py": BUGGY, "twice.py": "a a", "large": "x" * (LARGEST + 1)}
    calls: dict[tuple[str, ...], str] = {
        ("read", "lib.py"): BUGGY,
        ("read", "/sandbox/./lib.py"): BUGGY,
        ("read", "none.py"): "error: 'none.py': No such file or directory",
        ("read", "../etc/passwd"): "error: '../etc/passwd' has a '..': paths stay in the working folder",
        ("read", "\ud800"): "error: '\\ud800' is no path: it holds a character that no file name has",
        ("read", "large"): f"error: 'large' has more than {LARGEST} bytes",
        ("edit", "twice.py", "b", "c"): "error: old stands in the file 0 times; it must be there once",
        ("edit", "twice.py", "a", "c"): "error: old stands in the file 2 times; it must be there once",
        ("edit", "twice.py", "", "c"): "error: old is empty; to make a new file use bash",
        ("edit", "none.py", "a", "c"): "error: 'none.py': No such file or directory",
        ("edit", "/sandbox/twice.py", "a a", "é\ud800\n"): "done",
        ("read", "twice.py"): "é?\n",
    }
    names = {"read": ("path",), "edit": ("path", "old", "new")}
    asked = [(name, dict(zip(names[name], values, strict=True))) for name, *values in calls]
    assert used(*asked, files=texts) == list(calls.values())


def test_bash_says_what_came_out_in_order_and_how_it_ended() -> None:
    commands = {
        "echo a; echo b >&2; echo c": "a\nb\nc",
        "true": "exit code 0",
        "echo no; exit 3": "no\nexit code 3",
        "kill -9 $$": "exit code 137",
        "cd tests || pwd": "bash: line 3: cd: tests: No such file or directory\n/sandbox",
        "echo 1 > new; cat new lib.py": "1\n" + BUGGY.rstrip(),
        "head -c 100000000 /dev/zero": "stopped: output",
        "echo \0": "exit code 126",
    }
    answers = used(*(("bash", {"command": command}) for command in commands))
    for answer, wanted in zip(answers, commands.values(), strict=True):
        assert answer == wanted or (wanted.startswith("stopped") and answer.endswith(wanted))


def test_a_command_that_hangs_is_stopped() -> None:
    (answer,) = attempt(bash("echo a; sleep 99"), "x", seconds=0.5)[1]
    assert answer == "a\nstopped: deadline"


def test_answers_are_as_long_as_they_may_be() -> None:
    (answer,) = attempt(bash("seq 10000"), "x", output=200)[1]
    assert len(answer) < 300 and answer.startswith("1\n2\n") and answer.endswith("\n10000")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Ran 3 tests in 0.012s", "Ran 3 tests in 0.000s"),
        ("real\t0m1.234s", "real\t0m0.000s"),
        ("<function f at 0x7f12ab34cd56>", "<function f at 0x0>"),
        ("-rw-r--r-- 1 box box 31 Nov 21 10:45 lib.py", "-rw-r--r-- 1 box box 31 Jan  1 00:00 lib.py"),
        ("Sat Nov  1 10:45:02 UTC 2026", "Sat Jan  1 00:00 UTC 2026"),
        ("2026-11-21 10:45:02.123456 INFO", "2025-01-01 00:00 INFO"),
        ("in 5 steps, 0x1f, 12:30, May 5", "in 5 steps, 0x1f, 12:30, May 5"),
    ],
)
def test_what_differs_from_run_to_run_is_written_over(said: str, shown: str) -> None:
    assert same(said) == shown


def test_the_same_calls_have_the_same_answers() -> None:
    commands = [
        "ls -la --time-style=full-iso; ls -l",
        "python3 -c 'print({*\"abcdefgh\"}, object(), len)'",
        "python3 check.py; python3 -m unittest check",
        "git checkout -q -b new; git commit -q --allow-empty -m x; git log; time true",
        "find . -type f; echo $$",
        "pwd; ls -d ~ /tmp /sandbox; env | sort; id; hostname",
    ]
    first, second = (used(*(("bash", {"command": command}) for command in commands)) for _ in range(2))
    assert first == second
    assert "2025" in first[3] and "lib.py" in first[0]


# The teacher


def taught(env: RepoFix, index: int) -> Episode:
    task = env.task(index, "heldout")
    return asyncio.run(env.rollout(task, Demonstrator(byte_tokenizer(), env, task, np.random.default_rng(index))))


@pytest.mark.parametrize("size", SIZES)
def test_the_teacher_is_right_or_wrong_as_it_should_be(size: Size) -> None:
    knobs = {
        "level": size.level,
        "files": size.files,
        "functions": size.functions,
        "depth": size.depth,
        "max_tokens": 0,
    }
    for wrong, chat in ((0.0, True), (1.0, False)):
        episode = taught(made(**knobs, wrong=wrong, chat=chat), 0)
        assert (episode.reward.value, episode.status) == (1 - wrong, "ok")
        text = byte_tokenizer().decode(episode.samples[0].tokens.tolist())
        assert text.endswith("not fixed<|im_end|>") == bool(wrong) and text.endswith("fixed<|im_end|>")


def test_an_easy_attempt_is_short() -> None:
    for index in range(2):
        (sample,) = taught(made(max_tokens=0), index).samples
        assert len(sample.tokens) < 400
        assert sample.mask[-1] == 1


@given(size=st.sampled_from(SIZES), seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_no_turn_of_the_teacher_is_longer_than_a_reply(size: Size, seed: int) -> None:
    data = draw_repository(size, np.random.default_rng(seed))
    bug, limit = data["bug"], made(level=size.level, max_tokens=0)._style.max_tokens
    for new in [bug["new"], *bug["mistakes"]]:
        assert len(call_of("edit", path=bug["path"], old=bug["old"], new=new)) < limit
    assert limit < 200 or size.level == 2


def test_the_teacher_is_wrong_and_lazy_as_often_as_it_says() -> None:
    env = made(wrong=0.3, lazy=0.2)
    turns = [env.solve(TASK, ["", BUGGY], np.random.default_rng(seed)) for seed in range(600)]
    assert set(turns) == {EDIT, EDIT.replace("a + b", "a * b"), "fixed"}
    assert np.mean([turn == "fixed" for turn in turns]) == pytest.approx(0.2, abs=0.06)
    assert np.mean([turn == EDIT for turn in turns]) == pytest.approx(0.8 * 0.7, abs=0.07)


def test_who_says_that_it_is_fixed_without_an_edit_gets_nothing() -> None:
    episode = taught(made(lazy=1.0, max_tokens=0), 0)
    assert (episode.reward.value, episode.status, episode.reward.parts["turns"]) == (0.0, "ok", 2.0)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"level": 3}, r"repo_fix: level = 3 must lie in 1\.\.2"),
        ({"files": 7}, r"repo_fix: files = 7 must lie in 1\.\.6"),
        ({"files": 6, "functions": 5}, r"repo_fix: functions = 5 must lie in 1\.\.4: there are no more"),
        ({"depth": 6}, r"repo_fix: depth = 6 must lie in 0\.\.5"),
        ({"turns": -1}, "repo_fix: turns = -1"),
        ({"bad_calls": 0}, "repo_fix: bad_calls = 0"),
        ({"seconds": 0}, "repo_fix: seconds = 0"),
        ({"output": 0}, "repo_fix: output = 0"),
        ({"wrong": 2}, "repo_fix: wrong = 2"),
        ({"lazy": -1}, "repo_fix: lazy = -1"),
        ({"reward": "half"}, "repo_fix: reward = 'half' must be one of exact, dense"),
        ({"sandbox": "subprocess"}, "repo_fix: sandbox = 'subprocess' confines nothing"),
    ],
)
def test_bad_knobs_are_named(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made(**knobs)
