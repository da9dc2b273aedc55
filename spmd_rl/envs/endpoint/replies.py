"""From the text that was sampled to the message that a client gets: thought, content, tool calls.

It refuses to know about tokens. Invariants: any text makes a message; a call that makes no sense stays part of the
content, so that nothing of what the policy called is lost on the client.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from uuid import uuid4

from spmd_rl.envs.endpoint.messages import Call, Message, split_thought
from spmd_rl.envs.tool_calls import CLOSE, OPEN, THINK, parse


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def as_message(text: str, *, in_thought: bool, calls: bool, one_call: bool) -> Message:
    """The assistant's message.

    `in_thought`: the prompt ended inside of a thought; `calls`: tell them apart from the text, and with `one_call` only
    the first of them.
    """
    whole = THINK + text if in_thought else text
    thought, content = split_thought(whole)
    parsed = parse(whole) if calls else []
    made = [Call(f"call_{uuid4().hex[:24]}", c.name, json.dumps(c.arguments)) for c in parsed if not c.error]
    if made:
        malformed = (f"{OPEN}{call.text}{CLOSE}" for call in parsed if call.error)
        content = "".join([content[: content.find(OPEN)], *malformed])
    return Message("assistant", content, thought, tuple(made[:1] if one_call else made))
