"""An agent program as the environment: it asks an OpenAI-compatible endpoint, and the policy is what answers there.

The program is started once for each rollout, in a folder of its own, with a key of its own. It learns what to do from
its environment variables and its standard input, talks to the endpoint as often as it likes, and says how it went: by
the last line that it prints, or by its exit code. What it sent and got becomes the samples of the episode, token for
token (`endpoint/session.py`).

It is your program, with your rights: what keeps a policy from doing harm through it (a sandbox for the commands that a
model wrote) is its own business. It refuses to know what the program does. Invariants: a program that fails gets no
reward, never a zero; when a rollout is over, however that comes, its program and all that share its process group are
gone, and so are its folder and its key; no variable of this process is handed on unless named.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import string
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from spmd_rl.data.tables import open_table
from spmd_rl.envs.builtin.arguments import check_number
from spmd_rl.envs.builtin.splits import Listed
from spmd_rl.envs.builtin.verdict import verdict
from spmd_rl.envs.chat import Chat
from spmd_rl.envs.endpoint.endpoint import Access, Endpoint, check_installed
from spmd_rl.envs.endpoint.session import Session
from spmd_rl.envs.protocol import Policy, Split, Tokenizer
from spmd_rl.envs.sandbox.program import Ended, Program, Start, end_group
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Task

PLACES = ("python", "here", "folder")  # what braces in the command may name
RESERVED = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "MODEL", "TASK")
KEEP = 2**18  # bytes kept of what a program prints
SHOWN = 200  # characters of a task in the prompt that stands for the first one
LONGEST = 2**17 - len("TASK=") - 1  # bytes: Linux takes no longer environment variable


class Command:
    """Rows of a `*.jsonl` file as tasks, and a program that attempts them.

    The program's variables: OPENAI_BASE_URL, OPENAI_API_KEY, MODEL (a name to send along; any other will do, too) and
    TASK (the row as JSON, which is also its standard input); PATH, LANG and HOME (its folder); those that `env` sets
    and `pass_env` names.

    How is sampled says the run: temperature, top_p, top_k and seed of the program's requests are passed over, and
    `max_tokens` may lower the run's. The header X-Sampling of each response says what was used.

    The reward, by default: the program exits with 0, and the last line that it prints is a JSON object with the number
    `reward`; its other numbers are the reward's parts. With `exit_rewards`: what stands there for the exit code.
    Anything else is an error, with one exception: where the policy ran out of room (the program was told
    `context_length_exceeded`, or that it has had all its replies), a program that fails then gets `overflow_reward`.
    """

    SOURCE = "command"

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        command: Sequence[str] = (),
        tasks: str = "",
        heldout: float = 0.1,
        exit_rewards: dict[str, float] | None = None,
        overflow_reward: float = 0.0,
        max_replies: int = 0,
        timeout_s: float = 3600.0,
        env: dict[str, str] | None = None,
        pass_env: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """`command`: the program and its arguments, in which {python}, {here} and {folder} stand for this Python, the
        folder of the run and the program's own one; `tasks`: a *.jsonl file; `heldout`: share of its rows kept from
        training; `exit_rewards`: by exit code; `max_replies`: of one rollout, 0: no limit; `timeout_s`: of one rollout,
        beside the run's own deadline; `env`: variables, and `pass_env`: names of those to hand on; `host`, `port`:
        where the endpoint listens, 0: any port that is free."""
        check_installed()
        check_number(self.SOURCE, "max_replies", max_replies, 0, 2**31)
        check_number(self.SOURCE, "timeout_s", timeout_s, 0.0, 1e9)
        check_number(self.SOURCE, "overflow_reward", overflow_reward, -1e9, 1e9)
        self._tokenizer, self._command = tokenizer, _checked_command(command)
        self._exit_rewards = _checked_rewards(exit_rewards or {})
        self._overflow_reward, self._max_replies, self._timeout_s = overflow_reward, max_replies, timeout_s
        self._env = _checked_variables(env or {}, pass_env)
        self._here, self._endpoint = os.getcwd(), Endpoint(host, port)
        if not tasks:
            raise ValueError(f"{self.SOURCE}: tasks is empty: name a *.jsonl file with a task in each line")
        table = open_table(tasks)
        self._tasks = Listed(self.SOURCE, seed, heldout, [table[row] for row in range(len(table))])

    def task(self, index: int, split: Split) -> Task:
        """Task number `index` ≥ 0. ValueError where no task is on that side."""
        return self._tasks.task(index, split)

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]: what stands for the first prompt, which nobody knows before the program asks: the task's beginning
        as a user's message."""
        chat = Chat(self._tokenizer, None)
        chat.user(json.dumps(task.data)[:SHOWN])
        return chat.prompt()

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """The program from its start to its end."""
        session = Session(self._tokenizer, policy, max_replies=self._max_replies)
        async with _working_folder() as folder, self._endpoint.open(session) as access:
            try:
                ended = await self._run(task, access, folder, session)
            finally:
                await session.close()
        return self._episode(task, session, ended)

    async def _run(self, task: Task, access: Access, folder: str, session: Session) -> Ended:
        """How the program ended. What the policy raised is raised, and the program is ended."""
        said = json.dumps(task.data)
        if len(said) > LONGEST:
            raise ValueError(
                f"{self.SOURCE}: task {task.index} has {len(said)} bytes as JSON, and an environment variable holds "
                f"{LONGEST}: put what is long into a file, and its path into the task"
            )
        places = {"python": sys.executable, "here": self._here, "folder": folder}
        argv = [word.format(**places) for word in self._command]
        start = Start(argv, self._variables(access, folder, said), end_group, cwd=folder)
        program = Program(start, timeout_s=self._timeout_s, stdin=f"{said}\n".encode(), keep=KEEP)
        ending, failing = asyncio.create_task(program.end()), asyncio.create_task(session.failed())
        try:
            await asyncio.wait([ending, failing], return_when=asyncio.FIRST_COMPLETED)
            if session.error is not None:
                raise session.error
            return await ending
        finally:
            ending.cancel()
            failing.cancel()
            await asyncio.gather(ending, failing, return_exceptions=True)  # cancelled, `end` ends the program first

    def _variables(self, access: Access, folder: str, said: str) -> dict[str, str]:
        plain = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "HOME": folder}
        own = dict(zip(RESERVED, (access.url, access.key, access.model, said), strict=True))
        return plain | self._env | own

    def _episode(self, task: Task, session: Session, ended: Ended) -> Episode:
        samples, status = session.samples(), session.status
        if ended.killed == "deadline":
            late = RewardError(f"the program did not end within timeout_s = {self._timeout_s:g} s", "deadline")
            return Episode(task, samples, late, "timeout")
        reward = verdict(ended, self._exit_rewards)
        if isinstance(reward, RewardError) and session.ran_out:
            reward = Reward(self._overflow_reward)
        if status == "failed":
            reward = RewardError("a reply was aborted", "aborted")
        elif isinstance(reward, Reward) and not samples:
            reward = RewardError("the program had no reply from the policy: it asked for none", "no_reply")
        return Episode(task, samples, reward, status if isinstance(reward, Reward) else "failed")


@asynccontextmanager
async def _working_folder() -> AsyncIterator[str]:
    folder = tempfile.mkdtemp(prefix="spmd_rl-agent-")
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)  # it may hold much


def _checked_command(command: Sequence[str]) -> list[str]:
    """ValueError unless it can be started."""
    if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
        raise ValueError(
            f'command: command = {command!r} must be a list: the program and its arguments, as in ["{{python}}", '
            '"{here}/agent.py"]'
        )
    for word in command:
        try:
            named = [field for _, field, _, _ in string.Formatter().parse(word) if field is not None]
        except ValueError as error:
            raise ValueError(
                f"command: {word!r} in command: {error} (a brace itself is written {{{{ or }}}})"
            ) from None
        if wrong := [field for field in named if field not in PLACES]:
            raise ValueError(
                f"command: {word!r} in command names {{{wrong[0]}}}; there are {', '.join(f'{{{p}}}' for p in PLACES)} "
                "(a brace itself is written {{ or }})"
            )
        if "\0" in word:
            raise ValueError(f"command: {word!r} in command holds a NUL character")
    program = command[0].format(python=sys.executable, here=os.getcwd(), folder="")
    if "/" in program and not os.path.isabs(program):
        raise ValueError(
            f"command: {program!r} starts in a folder of its own: write {{here}}/{program} or a whole path"
        )
    if "{folder}" not in command[0] and shutil.which(program) is None:
        raise ValueError(f"command: there is no program {program!r} that can be run: name one, or its whole path")
    return list(command)


def _checked_rewards(rewards: dict[str, float]) -> dict[int, float]:
    """By exit code. ValueError for what is no code or no number."""
    checked: dict[int, float] = {}
    for code, reward in rewards.items():
        if not (str(code).isascii() and str(code).isdigit() and int(code) < 256):
            raise ValueError(f"command: exit_rewards has the key {code!r}: an exit code is a number from 0 to 255")
        check_number("command", f"exit_rewards.{code}", reward, -1e9, 1e9)
        checked[int(code)] = float(reward)
    return checked


def _checked_variables(env: dict[str, str], pass_env: Sequence[str]) -> dict[str, str]:
    """The variables to set and to hand on. ValueError for those that can't be."""
    if isinstance(pass_env, str):
        raise ValueError(f"command: pass_env = {pass_env!r} must be a list of names")
    if missing := [name for name in pass_env if name not in os.environ]:
        raise ValueError(f"command: pass_env names {missing[0]!r}, and there is no such variable here")
    variables = {name: os.environ[name] for name in pass_env} | env
    for name, value in variables.items():
        if name in RESERVED:
            raise ValueError(f"command: the variable {name} is the environment's own to set")
        if not name or "=" in name or not isinstance(value, str) or "\0" in name + value:
            raise ValueError(f"command: the variable {name!r} = {value!r} must be a name and a text")
    return variables
