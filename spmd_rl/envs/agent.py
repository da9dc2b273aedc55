"""The standard loop of an agent: a reply, the tools it calls, their answers, the next reply.

It refuses to know what the tools do and how the outcome is rewarded. Invariants: every call of a reply is answered,
in order, before the next reply is asked for; a call that can't be made is answered with what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from spmd_rl.envs.chat import Chat, Reply
from spmd_rl.envs.tools import Tools

MOST_CALLS = 16  # of one reply; a policy that repeats itself writes hundreds

# done: a reply without calls, or `until` said so. cut: a reply hit a limit or was aborted.
Ended = Literal["done", "max_turns", "bad_calls", "cut"]


@dataclass(frozen=True)
class LastReply(Reply):
    """The loop's last reply, and why it was the last one."""

    ended: Ended
    turns: int  # replies
    made: int  # calls that were made
    bad: int  # calls that could not be made


async def run_tools(
    chat: Chat,
    tools: Tools,
    *,
    max_turns: int,
    max_bad_calls: int = 3,
    until: Callable[[], bool] = lambda: False,
) -> LastReply:
    """Go on until a reply calls no tool.

    The calls of the last reply that `max_turns` allows are still made: one may hand in the result. `max_bad_calls` in
    a row (malformed, of an unknown tool, with wrong arguments) end the loop: small policies get stuck in them.
    `until` is asked when the calls of a reply were made; true ends the loop.

    The chat must show the tools: `Chat(…, tools=tools.schemas)`. Raises what the policy raises.
    """
    if max_turns < 1 or max_bad_calls < 1:
        raise ValueError(f"max_turns = {max_turns}, max_bad_calls = {max_bad_calls}: both must be at least 1")
    made = bad = in_a_row = 0
    for turn in range(1, max_turns + 1):
        reply = await chat.reply()
        if reply.stop_reason != "stop":
            return _last(reply, "cut", turn, made, bad)
        if not reply.calls:
            return _last(reply, "done", turn, made, bad)
        for call in reply.calls[:MOST_CALLS]:
            if problem := tools.problem(call):
                bad, in_a_row = bad + 1, in_a_row + 1
                if in_a_row == max_bad_calls:
                    return _last(reply, "bad_calls", turn, made, bad)
                chat.tool(f"error: {problem}")
            else:
                made, in_a_row = made + 1, 0
                chat.tool(await tools.call(call), call.name)
        if len(reply.calls) > MOST_CALLS:
            chat.tool(f"error: only the first {MOST_CALLS} calls of a reply are made, of {len(reply.calls)}")
        if until():
            return _last(reply, "done", turn, made, bad)
    return _last(reply, "max_turns", max_turns, made, bad)


def _last(reply: Reply, ended: Ended, turns: int, made: int, bad: int) -> LastReply:
    return LastReply(reply.text, reply.calls, reply.stop_reason, reply.generation, ended, turns, made, bad)
