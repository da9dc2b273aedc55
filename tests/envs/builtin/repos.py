"""Attempts at a repository with a bug."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from spmd_rl.envs.builtin.repo_fix import RepoFix, call_of
from spmd_rl.rollouts.types import Episode, Task
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

BUGGY, FIXED = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
PAIRS = [[5, 2], [9, 4], [1, 7], [3, 8]]
TASK = Task(
    "repo_fix",
    0,
    {
        "files": {"lib.py": BUGGY, "check.py": "from lib import add\nassert add(5, 2) == 7\n", "README.md": "# lib\n"},
        "sources": ["lib.py"],
        "command": "python3 check.py",
        "where": "lib.py",
        "trail": ["lib.py"],
        "bug": {"path": "lib.py", "old": "a - b", "new": "a + b", "mistakes": ["a * b"]},
        "calls": [["lib.add", pair] for pair in PAIRS],
        "right": [sum(pair) for pair in PAIRS],
        "passing": 0,
    },
)
EDIT = call_of("edit", path="lib.py", old="a - b", new="a + b")


def made(**knobs: Any) -> RepoFix:
    return RepoFix(byte_tokenizer(), 0, **{"show_tools": False, "max_tokens": 2000, **knobs})


def attempt(*said: str | Said, task: Task = TASK, **knobs: Any) -> tuple[Episode, list[str]]:
    """The episode, and what each call was answered."""
    policy = ScriptedPolicy(byte_tokenizer(), said)
    episode = asyncio.run(made(**knobs).rollout(task, policy))
    text = byte_tokenizer().decode(episode.samples[0].tokens.tolist())
    return episode, re.findall("<tool_response>(.*?)</tool_response>", text, re.DOTALL)


def bash(command: str) -> str:
    return call_of("bash", command=command)
