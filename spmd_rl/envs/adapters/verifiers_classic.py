"""A classic environment of verifiers (up to 0.3.1: a package with `load_environment`) as one of this program.

The environment runs its rollout itself, in process; its client is the policy. Only what is sampled is this program's:
the conversation's tokens (`verifiers_client`).

Classic rubrics log what a reward function raises and count it as zero; here it fails the episode. Environments that
reward whole groups are refused: a rollout here is on its own.

Checked with verifiers 0.3.1, by hand and by `tests/envs/adapters/test_verifiers_classic.py` in a venv of its own; the
tests of this repository run with 0.4, which has no classic environments.
"""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import numpy as np
import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, Tool, ToolCall, Usage

from spmd_rl.config.imports import load_object
from spmd_rl.envs.adapters.first_prompt import first_prompt
from spmd_rl.envs.adapters.verifiers import explained
from spmd_rl.envs.adapters.verifiers_client import Conversation, NoRoom, Turn
from spmd_rl.envs.adapters.verifiers_rendering import Choice, Message, rendering
from spmd_rl.envs.builtin.splits import Listed, canonical
from spmd_rl.envs.protocol import Policy, Split
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Task

MODEL = "policy"


class ClassicEnvironment:
    """One environment.

    Args:
        tokenizer: a Hugging Face tokenizer.
        seed: orders the training tasks.
        taskset: the environment's id, which is the name of its module.
        options: arguments of its `load_environment`.
        tasks: use the first so many rows of its dataset; 0: all.
        heldout: share of the rows, by their content, kept from training.
        max_tokens: new tokens of a reply at most; 0: the policy's limit, which holds in any case.
        renderer: as in `VerifiersEnvironment`.
        solve: import path of a teacher, a function (task, heard, rng) → text; for the supervised warm-up.

    ValueError for what is not there or can't be played here.
    """

    def __init__(
        self,
        tokenizer: Any,
        seed: int = 0,
        taskset: str = "",
        *,
        options: dict[str, Any] | None = None,
        tasks: int = 0,
        heldout: float = 0.1,
        max_tokens: int = 0,
        renderer: Choice = "auto",
        solve: str = "",
    ) -> None:
        source = f"verifiers:{taskset}"
        self._rendering, self._max_tokens = rendering(tokenizer, renderer), max_tokens
        with explained(source, taskset), _handlers_kept():
            try:
                self._env = vf.load_environment(taskset, **(options or {}))
                rows = [dict(row) for row in self._env.get_dataset(tasks or -1)]
            except (RuntimeError, ValueError) as error:
                raise error.__cause__ if isinstance(error.__cause__, ImportError) else ValueError(str(error)) from error
        if self._env.requires_group_rollouts:
            raise ValueError(f"{source}: its rubric rewards whole groups of rollouts; here each one is rewarded alone")
        self._tasks = Listed(source, seed, heldout, [{"row": row} for row in rows], _key)
        self._errors: ContextVar[list[str]] = ContextVar("what reward functions of this rollout raised")
        for rubric in _rubrics(self._env):
            rubric.funcs[:] = [
                self._watched(func) if weight else func
                for func, weight in zip(rubric.funcs, rubric.weights, strict=True)
            ]
        if solve:
            self.solve = load_object(solve, f"{source}: solve")

    def task(self, index: int, split: Split) -> Task:
        """A row of the environment's dataset."""
        return self._tasks.task(index, split)

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]: what the policy is asked first. A rollout is begun to see it."""
        return first_prompt(task, lambda policy: self.rollout(task, policy))

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """One rollout of the environment."""
        client = PolicyClient(Conversation(self._rendering, policy, self._max_tokens))
        errors: list[str] = []
        self._errors.set(errors)
        output = await self._env.run_rollout(task.data["row"], client, MODEL, sampling_args={})
        if error := output["error"]:
            return Episode(task, (), RewardError(str(error), _kind(error)), status="failed")
        if errors:
            return Episode(task, (), RewardError(errors[0]), status="failed")
        samples = client.conversation.samples()
        if not samples:
            why = f"the policy said nothing ({output['stop_condition']})"
            return Episode(task, (), RewardError(why, "NothingSampled"), status="failed")
        cut = output["is_truncated"] or output["stop_condition"] == "timeout_reached"
        status = "truncated" if cut else client.conversation.status
        parts = {name: float(value) for name, value in (output["metrics"] or {}).items()}
        return Episode(task, samples, Reward(float(output["reward"]), parts), status=status)

    def _watched(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """The reward function, whose errors are remembered: the rubric makes zeros of them."""

        @functools.wraps(func)
        async def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                result = func(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result
            except Exception as error:
                self._errors.get().append(f"reward {func.__name__}: {type(error).__name__}: {error}")
                raise

        return watched


class PolicyClient(Client):
    """The policy, for one rollout."""

    def __init__(self, conversation: Conversation) -> None:
        super().__init__(conversation)
        self.conversation = conversation
        self._said: list[Message] = []  # what the last reply was to

    def setup_client(self, config: Any) -> NoReturn:
        raise NotImplementedError("the policy is no endpoint")

    async def to_native_tool(self, tool: Tool) -> dict[str, Any]:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": function}

    async def to_native_prompt(self, messages: list[Any]) -> tuple[list[Message], dict[str, Any]]:
        return [_wire(message) for message in messages], {}

    async def get_native_response(
        self, prompt: list[Message], model: str, sampling_args: Any, tools: list[Any] | None = None, **_: Any
    ) -> Turn:
        if prompt[: len(self._said)] != self._said:
            self.conversation.restart()
        try:
            turn = await self.conversation.turn(prompt, tools or [])
        except NoRoom as error:
            raise vf.OverlongPromptError(str(error)) from error
        self._said = prompt
        return turn

    async def raise_from_native_response(self, response: Turn) -> None:
        """Whatever was sampled is a response."""

    async def from_native_response(self, response: Turn) -> Response:
        heard, generation = response.heard, response.generation
        calls = [
            ToolCall(id=c.id or f"call_{i}", name=c.name, arguments=c.arguments) for i, c in enumerate(heard.calls)
        ]
        cut, count = generation.stop_reason == "length", len(generation.tokens)
        message = ResponseMessage(
            content=heard.text,
            reasoning_content=heard.thought,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls and not cut else generation.stop_reason,
            is_truncated=cut,
        )
        before = response.before
        usage = Usage(prompt_tokens=before, reasoning_tokens=0, completion_tokens=count, total_tokens=before + count)
        return Response(id="", created=0, model=MODEL, usage=usage, message=message)

    async def close(self) -> None:
        """There is nothing to close."""


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Classic environments take SIGINT and SIGTERM for themselves, which are this program's."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:  # one that was not set from Python can't be set again
                signal.signal(number, handler)


def _rubrics(env: Any) -> Iterator[Any]:
    """The environment's rubrics, those inside of groups too."""
    waiting = [env.rubric, *(inner.rubric for inner in getattr(env, "envs", []))]
    while waiting:
        rubric = waiting.pop()
        waiting += getattr(rubric, "rubrics", [])
        yield rubric


def _wire(message: Any) -> Message:
    """The message as the chat format has it. ValueError for what is not text."""
    content = message.content or ""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
        if any(part.get("type") != "text" for part in parts):
            raise ValueError(f"a {message.role} message holds more than text; this model reads text")
        content = "\n".join(part["text"] for part in parts)
    wire: Message = {"role": "user" if message.role == "text" else message.role, "content": content}
    if calls := getattr(message, "tool_calls", None):
        functions = [{"name": c.name, "arguments": c.arguments} for c in calls]
        wire["tool_calls"] = [
            {"id": c.id, "type": "function", "function": f} for c, f in zip(calls, functions, strict=True)
        ]
    return wire | ({"tool_call_id": message.tool_call_id} if message.role == "tool" else {})


def _key(content: dict[str, Any]) -> str:
    return canonical({name: value for name, value in content["row"].items() if name != "example_id"})


def _kind(error: Any) -> str:
    return str(error.get("error", "Error")) if isinstance(error, dict) else type(error).__name__
