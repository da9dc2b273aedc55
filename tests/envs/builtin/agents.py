"""Agent programs as the environment: how tests make them, run them, and see that nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import replace
from typing import Any

from spmd_rl.config.tree import Config
from spmd_rl.envs.builtin.command import Command
from spmd_rl.orchestrator.rollouts import Rollouts
from spmd_rl.rollouts.types import Episode, RewardError
from tests.envs.fakes import ScriptedPolicy, byte_tokenizer

# What every program below begins with: `ask(messages)` is the reply's message, or the error's code.
ASK = """
import http.client, json, os, sys, time
from urllib.parse import urlsplit
url, key = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
def ask(messages, **more):
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages, **more})
    connection.request("POST", url.path + "/chat/completions", body, {"Authorization": "Bearer " + key})
    answer = json.loads(connection.getresponse().read())
    return answer["choices"][0]["message"] if "choices" in answer else answer["error"]["code"]
def user(text):
    return {"role": "user", "content": text}
"""


def agent(tasks: str, program: str, **args: Any) -> Command:
    return Command(byte_tokenizer(), 0, **{"command": ["{python}", "-c", escaped(program)], "tasks": tasks} | args)


def escaped(program: str) -> str:
    """As a word of a command, in which braces name places."""
    return (ASK + program).replace("{", "{{").replace("}", "}}")


def attempt(env: Command, lines: Any = (), policy: Any = None, deadline_s: float = 60.0, **options: Any) -> Episode:
    """One rollout, as a run does it; whatever comes of it, nothing is left."""
    policy = policy or ScriptedPolicy(byte_tokenizer(), lines, **options)
    before = folders()
    rollouts = Rollouts(replace(Config(), seq_len=4096))

    async def main() -> Episode:
        episode = await rollouts.run(env, env.task(0, "train"), policy, deadline_s)
        assert len(asyncio.all_tasks()) == 1
        return episode

    episode = asyncio.run(main())
    assert folders() == before
    return episode


def folders() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("spmd_rl-agent-")}


def why(episode: Episode) -> str:
    assert isinstance(episode.reward, RewardError) and not episode.valid
    return episode.reward.why
