"""Toolsets of verifiers, called in process: no server, no port, no subprocess.

A toolset registers its methods with an MCP server; here it registers them with `_Registry`, which takes the same calls
and keeps mcp's own `Tool` of each: the schema that the model sees and the validation of arguments are the stock ones.
A tool's `self.state` is the trace's own state.

It refuses to know about conversations and policies. Invariants: whatever the model asks for, the answer is a text;
the calls of one agent run one after the other.

Checked with verifiers 0.4.0 and mcp 2.0.0. Names of theirs that are not public and stand in this file alone:
`Toolset._pull_state` and `_push_state`, which are overridden on the instance because they reach for a server, and
`Toolset._exit_stack`, which is closed at the end as their server does.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import verifiers.v1 as vf
from mcp.server.mcpserver.tools import Tool
from verifiers.v1.harnesses.utils.compaction import truncate_tool_output

from spmd_rl.envs.adapters.verifiers_rendering import Call

Key = tuple[Any, ...]


class Workshop:
    """Opens toolsets for agents. One per environment and event loop: it holds what all of its agents share.

    Args:
        shared: the taskset's own toolsets, one instance of each for all tasks.
    """

    def __init__(self, shared: list[vf.Toolset]) -> None:
        self._shared = [_Registry(toolset, self) for toolset in shared]
        self._opening = asyncio.Lock()
        self._open = not shared
        self._state: ContextVar[Any] = ContextVar("the state of the agent that calls a tool")
        self.known: dict[Key, Tool] = {}  # made once: a schema takes about a millisecond

    async def toolbox(self, task: vf.Task, state: Any, shared: bool = True) -> Toolbox:
        """The task's tools, and the taskset's with `shared`. vf.ToolsetError for what can't be had in process."""
        async with self._opening:
            if not self._open:
                for registry in self._shared:
                    await registry.open(None)
                self._open = True
        own = [_Registry(toolset, self) for toolset in task.toolsets(task.config)]
        try:
            for registry in own:
                await registry.open(task.data)
        except BaseException:
            await _close(own)
            raise
        return Toolbox(own, self._shared if shared else [], state, self._state)

    async def close(self) -> None:
        """Close the taskset's own toolsets."""
        await _close(self._shared)


class Toolbox:
    """The tools of one agent."""

    def __init__(self, own: list[_Registry], shared: list[_Registry], state: Any, holder: ContextVar[Any]) -> None:
        self._own, self._state, self._holder = own, state, holder
        self._tools: dict[str, Tool] = {}
        for registry in [*shared, *own]:
            for name, tool in registry.tools.items():
                if name in self._tools:
                    raise vf.ToolsetError(f"two tools have the name {name!r}: give their toolsets other TOOL_PREFIXes")
                self._tools[name] = tool
        self.specs = [
            vf.Tool(name=name, description=tool.description, parameters=tool.parameters)
            for name, tool in self._tools.items()
        ]

    def problem(self, call: Call) -> str:
        """What is wrong with a call, for the model to read; empty when it can be made."""
        if call.error:
            return call.error
        if call.name not in self._tools:
            return f"unknown tool {call.name[:60]!r}; the tools are {', '.join(self._tools) or 'none'}"
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"the arguments are no JSON ({error}); write the call again"
        return "" if isinstance(arguments, dict) else "the arguments must be a JSON object; write the call again"

    async def call(self, call: Call, timeout_s: float) -> str:
        """What the tool says to a call without a problem; what it raises is told, too."""
        token = self._holder.set(self._state)
        try:
            async with asyncio.timeout(timeout_s):
                result = await self._tools[call.name].run(json.loads(call.arguments or "{}"), None, convert_result=True)
            text = "\n".join(_text(block) for block in result.content)
        except Exception as error:  # mcp tells a model of exceptions as of results
            text = str(error) or type(error).__name__
        finally:
            self._holder.reset(token)
        return truncate_tool_output(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    async def close(self) -> None:
        """Close the toolsets that are this agent's own."""
        await _close(self._own)


class _Registry:
    """What a toolset takes for an MCP server."""

    def __init__(self, toolset: vf.Toolset, workshop: Workshop) -> None:
        self.toolset, self.tools = toolset, dict[str, Tool]()
        self._workshop = workshop
        name, config = toolset.server_name, toolset.config
        self._prefix = f"{name}_" if name else ""
        if config.url:
            raise vf.ToolsetError(
                f"toolset {name!r} is a server at {config.url}; tools are only called in process here"
            )
        if config.runtime.type != "subprocess":
            raise vf.ToolsetError(
                f"toolset {name!r} asks for a {config.runtime.type} container, and there is none here"
            )

    async def open(self, task: vf.TaskData | None) -> None:
        """Set the toolset up as its server would."""

        async def pull() -> Any:
            return self._workshop._state.get()

        async def push(before: bytes) -> None:
            """The state was the agent's own: there is nothing to send."""

        self.toolset._pull_state, self.toolset._push_state = pull, push
        await self.toolset.setup()
        if task is not None:
            await self.toolset.setup_task(task)
        self.toolset.register(self)

    def add_tool(self, fn: Callable[..., Any], name: str | None = None, **options: Any) -> None:
        """As `MCPServer.add_tool`."""
        name = name or fn.__name__
        key = (type(self.toolset), name, fn.__qualname__, str(inspect.signature(fn)), str(options))
        known = self._workshop.known.get(key)
        if known is None:
            options.pop("title", None)
            known = self._workshop.known[key] = Tool.from_function(fn, name=name, **options)
            if known.context_kwarg is not None:
                raise vf.ToolsetError(f"tool {name!r} asks for a context of MCP, and there is no server here")
        self.tools[self._prefix + name] = known.model_copy(update={"fn": fn})


async def _close(registries: list[_Registry]) -> None:
    for registry in registries:
        await registry.toolset._exit_stack.aclose()


def _text(block: Any) -> str:
    return block.text if block.type == "text" else f"({block.type} left out: this model reads text)"
