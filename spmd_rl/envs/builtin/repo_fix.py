"""Repair a small repository: find the one bug that makes its tests fail, with a shell, over many turns.

A miniature of what engineers do: run the tests, read, edit, run the tests again. The repository lies in a sandbox for
as long as the attempt goes on. What decides is hidden: the source files, and nothing else, are taken over into another
box, and their functions called there (`code_calls.py`) as the tests call them and with other arguments. So neither the
tests as the model left them count, nor anything it put beside them.

Invariants: whatever the model did gets a reward; only a sandbox that fails raises.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from spmd_rl.envs.agent import LastReply, run_tools
from spmd_rl.envs.builtin.arguments import check_choice, check_number, check_share
from spmd_rl.envs.builtin.boxes import Boxes
from spmd_rl.envs.builtin.code_calls import Code, correct_calls
from spmd_rl.envs.builtin.conversation import Style, ended
from spmd_rl.envs.builtin.git_files import repository
from spmd_rl.envs.builtin.repo_tasks import MOST_FILES, MOST_FUNCTIONS, Size, draw_repository, right_sources
from spmd_rl.envs.builtin.repo_tools import RepoTools, Workplace
from spmd_rl.envs.builtin.splits import Content, Drawn
from spmd_rl.envs.chat import Chat
from spmd_rl.envs.protocol import Policy, Split, Tokenizer
from spmd_rl.envs.sandbox import Kind
from spmd_rl.envs.tools import Tools
from spmd_rl.rollouts.types import Episode, Reward, Task

MOST_DEPTH = 5
LONGEST_CALL = {1: 190, 2: 500}  # characters of a teacher's turn, by level


class RepoFix:
    """`python3 check.py fails: fix lib.py` → calls of `bash`, `read`, `edit` → a reply without a call.

    The reward is 1 where all hidden calls return what is right, else 0; with `reward = "dense"`, the share that it got
    of what was wrong before, less what it broke. How the attempt ended does not matter.
    """

    SOURCE = "repo_fix"
    RULES = (
        "You work in a git repository of Python code. Its tests fail because of one bug in the sources. Find it and "
        "repair it with the tools. Only the source files count: changed tests are put back. When the tests pass, "
        "answer without a call."
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        level: int = 1,
        files: int = 1,
        functions: int = 1,
        depth: int = 0,
        turns: int = 0,
        bad_calls: int = 3,
        show_tools: bool = True,
        seconds: float = 30.0,
        output: int = 2000,
        wrong: float = 0.0,
        lazy: float = 0.0,
        heldout: float = 0.1,
        reward: str = "exact",
        sandbox: Kind = "auto",
        allow_unsafe: bool = False,
        at_once: int = 0,
        chat: bool = True,
        rules: bool = False,
        max_tokens: int = 0,
    ) -> None:
        """Repositories of so many source `files` with so many `functions` each: of one line (`level` 1) or longer (2).

        `depth`: callers between what is tested and the function with the bug; `turns`: replies at most, 0: four more
        than the teacher takes; `bad_calls` that can't be made, in a row, end the attempt; `show_tools`: the prompt
        describes them (with `chat` only; a tiny model learns them from its teacher); `seconds` that a command may take;
        `output`: characters of a tool's answer at most; `wrong`: share of the teacher's edits that are wrong; `lazy`:
        share of its attempts that say "fixed" instead of an edit; `heldout`: share of the repositories kept from
        training, with any bug; `sandbox`, `allow_unsafe`, `at_once`: `boxes.py`; `chat`, `rules`, `max_tokens` (of one
        reply): `single_turn.py`.
        """
        check_number(self.SOURCE, "level", level, 1, 2)
        check_number(self.SOURCE, "files", files, 1, MOST_FILES)
        check_number(self.SOURCE, "functions", functions, 1, MOST_FUNCTIONS // files, why="there are no more")
        check_number(self.SOURCE, "depth", depth, 0, MOST_DEPTH)
        check_number(self.SOURCE, "turns", turns, 0, 1000)
        check_number(self.SOURCE, "bad_calls", bad_calls, 1, 1000)
        check_number(self.SOURCE, "seconds", seconds, 0.1, 3600.0)
        check_number(self.SOURCE, "output", output, 100, 10**6)
        check_share(self.SOURCE, "wrong", wrong)
        check_share(self.SOURCE, "lazy", lazy)
        check_choice(self.SOURCE, "reward", reward, ("exact", "dense"))
        self._turns, self._bad_calls, self._seconds, self._output = turns, bad_calls, seconds, output
        self._wrong, self._lazy, self._dense = wrong, lazy, reward == "dense"
        self._boxes = Boxes(self.SOURCE, sandbox, allow_unsafe, at_once)
        self._style = Style(tokenizer, chat, self.RULES if rules else "", max_tokens or LONGEST_CALL[level])
        self._shown = self._tools(self._place({})).schemas if show_tools and chat else []
        size = Size(level, files, functions, depth)
        # A template that can't show the tools is known before anything starts.
        self._asked(None, draw_repository(size, np.random.default_rng(0))).prompt()
        self._tasks = Drawn(self.SOURCE, seed, heldout, lambda rng: draw_repository(size, rng), _key)

    def task(self, index: int, split: Split) -> Task:
        """Task number `index` ≥ 0. ValueError where no task is on that side."""
        return self._tasks.task(index, split)

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]."""
        return self._asked(None, task.data).prompt()

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """Calls and their answers, until a reply without a call; then the hidden calls. SandboxError when one fails."""
        data = task.data
        chat = self._asked(policy, data)
        turns = self._turns or len(steps_of(data)) + 4
        async with self._place(data["files"]) as place:
            tools = self._tools(place)
            last = await run_tools(
                chat, tools, max_turns=turns, max_bad_calls=self._bad_calls, until=lambda: place.failed
            )
            place.check()
            sources = await place.changed(data["sources"])
        if chat.status == "failed":
            return ended(task, chat, Reward(0.0))
        return ended(task, chat, self._reward(data, last, await self._passing(data, sources)))

    async def _passing(self, data: Content, sources: dict[str, bytes] | None) -> int:
        """How many of the hidden calls return what is right."""
        if sources is None or sources == {path: data["files"][path].encode() for path in data["sources"]}:
            return data["passing"]  # nothing has changed
        calls = [(name, arguments) for name, arguments in data["calls"]]
        return sum(await correct_calls(self._boxes, Code("files", files=sources), calls, data["right"]))

    def _reward(self, data: Content, last: LastReply, passing: int) -> Reward:
        count, before = len(data["calls"]), data["passing"]
        exact = float(passing == count)
        parts = {"exact": exact, "passed": passing / count, "turns": float(last.turns), "calls": float(last.made)}
        value = max(0.0, (passing - before) / (count - before)) if self._dense else exact
        return Reward(value, {**parts, "bad_calls": float(last.bad)})

    def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
        """The next step of the teacher's plan; its edit may be a wrong one, or none (`wrong`, `lazy`)."""
        data, bug = task.data, task.data["bug"]
        step, path = steps_of(data)[len(heard) - 1]
        if step == "bash":
            return call_of("bash", command=data["command"])
        if step == "read":
            return call_of("read", path=path)
        if step == "edit" and rng.random() < self._lazy:
            return "fixed"
        if step == "edit":
            mistakes = bug["mistakes"]
            new = mistakes[rng.integers(len(mistakes))] if rng.random() < self._wrong else bug["new"]
            return call_of("edit", path=path, old=bug["old"], new=new)
        return "not fixed" if re.search("exit code [1-9]", heard[-1]) else "fixed"

    def _place(self, files: dict[str, str]) -> Workplace:
        return Workplace(self._boxes, repository(files), self._seconds)

    def _tools(self, place: Workplace) -> Tools:
        return Tools(RepoTools(place), max_chars=self._output)

    def _asked(self, policy: Policy | None, data: Content) -> Chat:
        chat = self._style.begin(policy, tools=self._shown)
        chat.user(f"{data['command']} fails: fix {data['where']}")
        return chat


def steps_of(data: Content) -> list[tuple[str, str]]:
    """The teacher's plan: (what, in which file). It follows the callers from what fails; one file it just reads."""
    trail = data["trail"]
    look = [("bash", "")] if len(data["sources"]) > 1 else []
    return [*look, *(("read", path) for path in trail), ("edit", data["bug"]["path"]), ("bash", ""), ("end", "")]


def call_of(name: str, **arguments: Any) -> str:
    """A tool call."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _key(content: Content) -> str:
    """The sources without the bug."""
    return json.dumps(right_sources(content), sort_keys=True)
