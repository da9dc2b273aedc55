"""A plain Python class as an environment: its public methods with a docstring are the tools of an attempt.

Every attempt makes an instance. `reset(**row)` begins it, and may return what the user says first; the policy calls
methods until a reply calls none; `reward` (a method, an attribute, or a function of your own) says what came of it;
`close` ends it. What a tool raises is read by the model. What `reset` and the reward raise fails the episode.

Rows come from the config, from a table, or from a method `tasks()`. A row's `prompt`, a text or chat messages, is said
first; what `reset` returns follows in the last user message.

It refuses to know what the class does. Invariants: an instance belongs to one attempt; `reset`, `reward`, `tasks` and
`close` are never tools; blocking methods run in threads, with a deadline.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd_rl.config.imports import load_object
from spmd_rl.data.tables import open_table
from spmd_rl.envs.adapters.first_prompt import first_prompt
from spmd_rl.envs.adapters.own_objects import accepted, as_reward, called
from spmd_rl.envs.agent import LastReply, run_tools
from spmd_rl.envs.builtin.arguments import check_number
from spmd_rl.envs.builtin.conversation import Style, ended
from spmd_rl.envs.builtin.splits import Content, Listed, canonical
from spmd_rl.envs.protocol import Policy, Split
from spmd_rl.envs.tools import Tools
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Task

NO_TOOLS = ("reset", "reward", "tasks", "close")


class Methods:
    """One class, given by its import path.

    Args:
        tokenizer: a Hugging Face tokenizer.
        seed: orders the training tasks.
        make: import path of the class, `package.module:Class` or `file.py:Class`.
        options: keyword arguments of its constructor.
        rows: a list of JSON objects, one per task; or
        data: a table of them (`*.jsonl`, `*.parquet`, a dataset on the Hub). Neither: the class has `tasks()`.
        reward: import path of a function; it gets what it names among `environment` (the instance), `row` and
            `completion` (the last reply). Empty: `reward` of the instance. A number, or named numbers, which are added.
        system: what a system message says.
        max_turns: replies at most.
        max_bad_calls: so many in a row that can't be made end the attempt.
        call_s: seconds that one call of the class may take.
        heldout: share of the rows, by their content, kept from training.
        max_tokens: new tokens of a reply at most; 0: the policy's limit, which holds in any case.
        solve: import path of a teacher, a function (task, heard, rng) → text; for the supervised warm-up.

    ValueError, TypeError or ImportError for what can't work.
    """

    def __init__(
        self,
        tokenizer: Any,
        seed: int = 0,
        make: str = "",
        *,
        options: dict[str, Any] | None = None,
        rows: list[dict[str, Any]] | None = None,
        data: str = "",
        reward: str = "",
        system: str = "",
        max_turns: int = 10,
        max_bad_calls: int = 3,
        call_s: float = 30.0,
        heldout: float = 0.1,
        max_tokens: int = 0,
        solve: str = "",
    ) -> None:
        self._source = f"methods:{make}"
        check_number(self._source, "max_turns", max_turns, 1, 10_000)
        check_number(self._source, "max_bad_calls", max_bad_calls, 1, 10_000)
        check_number(self._source, "call_s", call_s, 0.001, 1e6)
        self._max_turns, self._max_bad_calls, self._call_s = max_turns, max_bad_calls, call_s
        self._make, self._options = load_object(make, f"{self._source}: the class"), options or {}
        self._reward: Callable[..., Any] | None = load_object(reward, f"{self._source}: reward") if reward else None
        self._style = Style(tokenizer, True, system, max_tokens)
        instance = self._instance()
        if not reward and not hasattr(instance, "reward"):
            raise ValueError(
                f"{self._source} has no reward: give the class a method or an attribute `reward`, or set `reward` to "
                "a function's import path"
            )
        self._tools(instance)
        contents = [{"row": row} for row in self._rows(instance, rows, data)]
        self._tasks = Listed(self._source, seed, heldout, contents, _key)
        if solve:
            self.solve = load_object(solve, f"{self._source}: solve")

    def task(self, index: int, split: Split) -> Task:
        """A row."""
        return self._tasks.task(index, split)

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]: what the policy is asked first. An attempt is begun to see it."""
        return first_prompt(task, lambda policy: self.rollout(task, policy))

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """One instance: reset, calls, reward. Raises what `reset` and `close` raise."""
        instance = self._instance()
        try:
            tools = self._tools(instance)
            chat = self._style.begin(policy, tools=tools.schemas)
            for role, text in await self._opening(instance, task.data["row"]):
                chat.system(text) if role == "system" else chat.user(text)
            last = await run_tools(chat, tools, max_turns=self._max_turns, max_bad_calls=self._max_bad_calls)
            if chat.status == "failed":
                return ended(task, chat, Reward(0.0))
            reward = await self._rewarded(instance, task.data["row"], last)
            return Episode(task, chat.samples(), reward, chat.status)
        finally:
            if hasattr(instance, "close"):
                await called(instance.close, {}, self._call_s)

    def _instance(self) -> Any:
        try:
            instance = self._make(**self._options)
        except TypeError as error:
            raise TypeError(f"{self._source}: {error}; options hold the constructor's keyword arguments") from error
        if not callable(getattr(instance, "reset", None)):
            raise TypeError(f"{self._source} has no method reset(**row), which begins an attempt")
        return instance

    def _tools(self, instance: Any) -> Tools:
        names: dict[str, None] = {}  # base classes first, in the order of their source
        for cls in reversed(type(instance).__mro__[:-1]):
            names |= dict.fromkeys(name for name in vars(cls) if not name.startswith("_") and name not in NO_TOOLS)
        members = [getattr(instance, name) for name in names if not _is_property(type(instance), name)]
        tools = [member for member in members if inspect.isroutine(member) and (member.__doc__ or "").strip()]
        if not tools:
            raise TypeError(f"{self._source} has no tools: give its public methods docstrings, the model reads them")
        return Tools(tools, deadline_s=self._call_s)

    def _rows(self, instance: Any, rows: list[dict[str, Any]] | None, data: str) -> list[Content]:
        method = getattr(instance, "tasks", None)
        if (rows is not None) + bool(data) > 1 or (rows is None and not data and not callable(method)):
            raise ValueError(
                f"{self._source} needs rows from one place: `rows` (a list), `data` (a table), or a method tasks()"
            )
        if data:
            table = open_table(data)
            rows = [table[i] for i in range(len(table))]
        elif rows is None and method is not None:
            rows = list(method())
        if not rows:
            raise ValueError(f"{self._source} has no rows")
        for place, row in enumerate(rows):
            try:
                if not isinstance(row, dict):
                    raise TypeError(f"a {type(row).__name__}, where an object is needed")
                canonical(row)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self._source}: row {place} is no plain JSON object: {error}") from None
        return rows

    async def _opening(self, instance: Any, row: Content) -> list[tuple[str, str]]:
        """(role, text) of what is said first."""
        try:
            arguments = accepted(instance.reset, row)
        except TypeError as error:
            raise TypeError(f"{self._source}: reset: {error}; the row has {', '.join(row) or 'nothing'}") from None
        said = await called(instance.reset, arguments, self._call_s)
        if said is not None and not isinstance(said, str):
            raise TypeError(f"{self._source}: reset returned a {type(said).__name__}; return a text, or None")
        messages = self._prompt_of(row)
        if said and messages and messages[-1][0] == "user":
            messages[-1] = ("user", f"{messages[-1][1]}\n{said}")
        elif said:
            messages.append(("user", said))
        if not messages or messages[-1][0] != "user":
            raise ValueError(f"{self._source}: reset returned nothing to ask, and the row has no `prompt`")
        return messages

    def _prompt_of(self, row: Content) -> list[tuple[str, str]]:
        prompt = row.get("prompt") or []
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            made = [(str(m["role"]), m["content"]) for m in messages]
        except (TypeError, KeyError):
            made = [("", "")]
        if any(role not in ("system", "user") or not isinstance(text, str) for role, text in made):
            raise ValueError(f"{self._source}: a row's prompt is a text, or messages of the roles system and user")
        return made

    async def _rewarded(self, instance: Any, row: Content, last: LastReply) -> Reward | RewardError:
        what = f"{self._source}: the reward"
        try:
            own = getattr(instance, "reward", None)
            if self._reward is not None:
                given = {"environment": instance, "row": row, "completion": last.text}
                value = await called(self._reward, accepted(self._reward, given), self._call_s)
            else:
                value = await called(own, {}, self._call_s) if callable(own) else own
            reward = as_reward(value, what)
        except Exception as error:
            return RewardError(f"{what}: {type(error).__name__}: {error}", type(error).__name__)
        counts = {"turns": float(last.turns), "calls": float(last.made), "bad_calls": float(last.bad)}
        return Reward(reward.value, counts | reward.parts)


def _is_property(cls: type, name: str) -> bool:
    # Asking an instance for its value would run code of the user's.
    return isinstance(inspect.getattr_static(cls, name), property)


def _key(content: Content) -> str:
    return canonical(content["row"])
