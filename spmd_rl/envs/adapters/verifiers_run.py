"""One agent of verifiers at work on one task: setup, chat and tools, finalize, scoring. All of it in process.

It does what verifiers' own `Rollout` with the harness `null` does, with their hooks, stops, limits and timeouts, and
without what that needs a process, a container or a port for. The result is their `Trace`, so that tasks and
environments judge what they know.

It refuses to know about groups and samples. Invariants: an error ends in the trace, never in the caller (but a
cancellation does); a timeout is a stop, which is scored; what failed is not scored.

Checked with verifiers 0.4.0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.train import tool_to_wire
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import boundary
from verifiers.v1.session import RolloutLimits, RolloutSession, hook_boundary
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated, invoke

from spmd_rl.envs.adapters.verifiers_client import Conversation, NoRoom, Turn
from spmd_rl.envs.adapters.verifiers_rendering import Call
from spmd_rl.envs.adapters.verifiers_tools import Toolbox, Workshop
from spmd_rl.envs.agent import MOST_CALLS

MODEL = "policy"
BAD_REPLIES = 3  # in a row of which no call can be made: small policies get stuck in them
TOO_MANY = f"only the first {MOST_CALLS} calls of a reply are made"
VERSION = vf.VersionInfo(version=version("verifiers"))  # else every process asks git for a commit


@dataclass(frozen=True)
class Seat:
    """An agent's settings, the same for all of its runs."""

    name: str
    config: vf.AgentConfig
    context: vf.ModelContext
    runtime: vf.Runtime
    max_tokens: int

    def timeout(self, stage: str, task: vf.Task) -> float | None:
        """Seconds for a stage of a run: the agent's, else the task's, else None: no limit."""
        own = getattr(self.config.timeout, "rollout" if stage == "agent" else stage)
        return getattr(task.data.timeout, stage) if own is None else own

    @property
    def limits(self) -> RolloutLimits:
        """Of turns and tokens."""
        c = self.config
        return RolloutLimits(c.max_turns, c.max_input_tokens, c.max_output_tokens, c.max_total_tokens)


class AgentRun:
    """A run, open for one turn after the other; what `verifiers.v1.Interaction` drives.

    Args:
        conversation: the agent's tokens; nothing was said in it.
        by_user: the caller opens the conversation, where the task has no prompt.
    """

    def __init__(self, seat: Seat, task: vf.Task, conversation: Conversation, by_user: bool) -> None:
        self.task, self.closed, self.failure = task, False, None
        self.conversation = conversation
        self.trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=seat.config, name=seat.name),
            verifiers=VERSION,
        )
        self._seat, self._by_user = seat, by_user
        self._session = _session(seat, task, self.trace)
        self._hooked = bool(self._session.request_interceptors or self._session.request_stops)
        self._messages: list[vf.Message] = []
        self._path: list[int] = []  # nodes of the trace that are the conversation so far
        self._tools: Toolbox | None = None
        self._agent_s = seat.timeout("agent", task)

    @property
    def ok(self) -> bool:
        """Whether it can go on: nothing failed, nothing stopped it."""
        return self.failure is None and self.trace.stop_condition is None

    async def open(self, workshop: Workshop, shared: bool) -> bool:
        """Set the task up. Whether it can go on."""
        data = self.task.data
        try:
            async with asyncio.timeout(self._seat.timeout("setup", self.task)) as deadline:
                _check_task(self.task, self._by_user)
                if type(self.task).setup is not vf.Task.setup:
                    async with boundary(vf.TaskError, "task setup"):
                        await invoke(self.task.setup, {"trace": self.trace, "runtime": self._seat.runtime})
                async with boundary(vf.ToolsetError, "opening tools"):
                    self._tools = await workshop.toolbox(self.task, self.trace.state, shared)
            prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
            system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
            self._messages = await self._prepared([*system, *prompt])
        except TimeoutError as error:
            self._late("setup", deadline, error)
        except Exception as error:
            self.fail(error)
        return self.ok

    async def step(self, messages: vf.Messages | None = None, *, on_input: Callable[[], None] | None = None) -> bool:
        """The agent's part until it calls no more tools; `messages` are what the user says first.

        Whether it can go on: it said something, and nothing stopped it.
        """
        if self.closed or not self.ok:
            return False
        before, clock = self.trace.num_turns, asyncio.get_running_loop()
        started = clock.time()
        try:
            async with asyncio.timeout(self._agent_s) as deadline:
                self._messages += await self._prepared(messages or [])
                if on_input is not None:
                    on_input()
                async with boundary(vf.HarnessError, f"agent {self._seat.name!r}"):
                    await self._converse()
        except TimeoutError as error:
            self._late("agent", deadline, error)
        except Exception as error:
            self.fail(error)
        if self._agent_s is not None:
            self._agent_s = max(0.0, self._agent_s - (clock.time() - started))
        return self.ok and self.trace.num_turns > before

    async def steer(self, message: str, *, message_id: str | None = None) -> dict[str, str]:
        """Messages in the middle of a turn aren't taken: the caller's wait for the next one."""
        return {"outcome": "promptRequired", "reason": "noRunningTurn"}

    async def close(self) -> vf.Trace:
        """Finalize and score, unless it failed. The trace, at every call the same."""
        if self.closed:
            return self.trace
        self.closed = True
        available = {"trace": self.trace, "runtime": self._seat.runtime}
        try:
            await self._close_tools()
            if self.failure is None:
                if type(self.task).finalize is not vf.Task.finalize:
                    await self._stage("finalize", "task finalize", lambda: invoke(self.task.finalize, available))
                await self._stage("scoring", "scoring", lambda: self.task.score(self.trace, self._seat.runtime))
        except Exception as error:
            self.fail(error)
        self.trace.is_completed, self.trace.ok = True, self.failure is None
        return self.trace

    async def abort(self) -> None:
        """Let go of everything, and score nothing: the caller was cancelled."""
        self.closed = True
        await self._close_tools()

    def fail(self, error: Exception) -> None:
        """The outcome is an error."""
        self.failure = error
        self.trace.record_error(error)

    def _late(self, stage: str, deadline: asyncio.Timeout, error: TimeoutError) -> None:
        """Its own deadline is a stop; any other timeout is an error like others."""
        if deadline.expired():
            self.trace.record_timeout(stage)
        else:
            self.fail(error)

    async def _stage(self, stage: str, what: str, run: Callable[[], Any]) -> None:
        try:
            async with asyncio.timeout(self._seat.timeout(stage, self.task)), boundary(vf.TaskError, what):
                await run()
        except TimeoutError:
            self.trace.record_timeout(stage)

    async def _close_tools(self) -> None:
        if self._tools is not None:
            await self._tools.close()

    async def _prepared(self, messages: vf.Messages) -> vf.Messages:
        """What the user says, as the task's interceptors let it through."""
        if not messages or not self._session.request_interceptors:
            return messages
        prepared, rewrites = await self._session.prepare_users(vf.Request(messages=messages))
        self.trace.request_rewrites.extend(rewrites)
        return prepared.messages

    async def _converse(self) -> None:
        bad = 0
        # A reply that was cut calls nothing: what it meant to do is not there.
        while (turn := await self._turn()) is not None and turn.heard.calls and turn.generation.stop_reason == "stop":
            called = False
            for number, (call, asked) in enumerate(zip(_calls(turn), turn.heard.calls, strict=True)):
                problem = self._tools.problem(asked) if number < MOST_CALLS else TOO_MANY
                answer = _answer(call, f"error: {problem}") if problem else await self._call(call, asked)
                if answer is None:
                    return
                self._messages.append(answer)
                called |= not problem
                if number == MOST_CALLS:
                    break
            bad = 0 if called else bad + 1
            if bad == BAD_REPLIES:
                self.trace.stop("bad_tool_calls")
                return

    async def _call(self, call: vf.ToolCall, asked: Call) -> vf.ToolMessage | None:
        """A tool's answer, or the one that the task's hooks put in its place. None: they stop the run."""
        if self._hooked:
            decision = await self._session.decide_tool(call.id, call.name, call.arguments)
            if decision["action"] == "stop":
                return None
            if decision["action"] == "deny":
                return vf.ToolMessage.model_validate(decision["message"])
        return _answer(call, await self._tools.call(asked, self._seat.config.harness.tool_timeout))

    async def _turn(self) -> Turn | None:
        """One reply, kept in the trace. None when the run is stopped instead."""
        session, trace = self._session, self.trace
        if await session.refused() is not None:
            return None
        tools = self._tools.specs
        request, stopped = vf.Request.model_construct(messages=self._messages, tools=tools or None), None
        if self._hooked:
            request, rewrites, stopped = await session.rewrite_request(request)
            trace.request_rewrites.extend(rewrites)
        if stopped is not None:
            trace.stop(stopped)
            return None
        try:
            turn = await self.conversation.turn([_wire(m) for m in request.messages], [tool_to_wire(t) for t in tools])
        except NoRoom:
            trace.stop("prompt_too_long")
            return None
        response, rewrites, stopped = await session.rewrite_response(_response(turn))
        trace.response_rewrites.extend(rewrites)
        session.consume_prepared(request.messages[len(self._path) :])
        node = self._keep(turn, request.messages, response)
        self._messages.append(response.message)
        stopped = stopped or await session.gate_tool_calls(node)
        if stopped is not None:
            trace.stop(stopped)
            return None
        return turn

    def _keep(self, turn: Turn, messages: vf.Messages, response: vf.Response) -> int:
        """Nodes of the trace for the messages that are new to it and the reply; the reply's number."""
        trace = self.trace
        if turn.afresh:
            self._path = []
        for message in messages[len(self._path) :]:
            self._add(message=message)
        given, said = turn.given.tolist(), turn.generation.tokens.tolist()
        node = self._add(
            message=response.message,
            sampled=True,
            token_ids=given + said,
            mask=[False] * len(given) + [True] * len(said),
            logprobs=turn.generation.logprobs.tolist(),
        )
        if self._tools.specs:
            trace.tools = self._tools.specs
        trace.calls.append(
            vf.ModelCall(
                node=node,
                model=MODEL,
                sampling=self._seat.context.sampling,
                finish_reason=response.finish_reason,
                usage=response.usage,
            )
        )
        return node

    def _add(self, **content: Any) -> int:
        parent = self._path[-1] if self._path else None
        tools = [] if self._path else self._tools.specs
        self.trace.nodes.append(vf.MessageNode(parent=parent, tools=tools, **content))
        self._path.append(len(self.trace.nodes) - 1)
        return self._path[-1]


def _session(seat: Seat, task: vf.Task, trace: vf.Trace) -> RolloutSession:
    """verifiers' keeper of a task's hooks and of an agent's limits."""
    intercept = [(hook_boundary(fn, allow_trace=False), fn) for fn in discover_decorated(task, "intercept")]
    stops = [(hook_boundary(fn, allow_trace=True), fn) for fn in task.hooks("stop")]

    def of(hooks: list[tuple[type, Callable]], kind: type) -> list[Callable]:
        return [fn for boundary, fn in hooks if boundary is kind]

    return RolloutSession(
        ctx=seat.context,
        trace=trace,
        limits=seat.limits,
        trace_stops=of(stops, vf.Trace),
        request_interceptors=of(intercept, vf.Request),
        response_interceptors=of(intercept, vf.Response),
        request_stops=of(stops, vf.Request),
        response_stops=of(stops, vf.Response),
        gates_tools=True,
    )


def _check_task(task: vf.Task, by_user: bool) -> None:
    """vf.TaskError for a task that can't be done in process."""
    data = task.data
    needs = {"image": data.image, "agent_user": data.agent_user, "skills": data.skills}
    if task.NEEDS_CONTAINER or any(needs.values()):
        asked = ", ".join(name for name, value in needs.items() if value) or "NEEDS_CONTAINER"
        raise vf.TaskError(f"the task needs a container ({asked}); this adapter runs none")
    if data.prompt is None and not by_user:
        raise vf.TaskError("the task has no prompt and nobody who opens the conversation")


def _wire(message: vf.Message) -> dict[str, Any]:
    """The message as the chat format has it. vf.TaskError for what is not text."""
    if isinstance(message.content, list):
        if any(part.type != "text" for part in message.content):
            raise vf.TaskError(f"a {message.role} message holds an image; this model reads text")
        message = message.model_copy(update={"content": "\n".join(part.text for part in message.content)})
    return message_to_wire(message)


def _calls(turn: Turn) -> list[vf.ToolCall]:
    calls = enumerate(turn.heard.calls)
    return [vf.ToolCall(id=c.id or f"call_{i}", name=c.name, arguments=c.arguments) for i, c in calls]


def _answer(call: vf.ToolCall, text: str) -> vf.ToolMessage:
    return vf.ToolMessage(tool_call_id=call.id, name=call.name or None, content=text)


def _response(turn: Turn) -> vf.Response:
    heard, generation = turn.heard, turn.generation
    message = vf.AssistantMessage(
        content=heard.text or None, reasoning_content=heard.thought, tool_calls=_calls(turn) or None
    )
    stop = "tool_calls" if heard.calls and generation.stop_reason == "stop" else generation.stop_reason
    usage = vf.Usage(prompt_tokens=turn.before, completion_tokens=len(generation.tokens))
    return vf.Response(id="", created=0, model=MODEL, message=message, finish_reason=stop, usage=usage)
