"""How an environment talks to the policy: in the tokenizer's chat template, or in a short form for tiny models.

The short form writes what is said as `<|im_start|>text` and a newline, and the policy's answer and its end token
behind it: no roles, no headers, three tokens a turn beside the texts. It is a chat template like any other, so
`Chat` grows both in the same way.

It refuses to know what is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spmd_rl.envs.chat import Chat
from spmd_rl.envs.protocol import Policy
from spmd_rl.models.byte_tokenizer import IM_END, IM_START
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Task


@dataclass(frozen=True)
class ShortForm:
    """A tokenizer as it is, but for its chat template."""

    tokenizer: Any

    chat_template = "short form"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def get_chat_template(self, tools: Sequence[dict[str, Any]] | None = None) -> str:
        """There is one, which shows no tools."""
        return self.chat_template

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **how: Any) -> str:
        """The messages as text; there is no header to add before a reply."""
        end = getattr(self.tokenizer, "eos_token", None) or IM_END
        return "".join(
            f"{m['content']}{end}" if m["role"] == "assistant" else f"{IM_START}{m['content']}\n" for m in messages
        )


@dataclass(frozen=True)
class Style:
    """What all conversations of one environment have in common."""

    tokenizer: Any
    chat: bool  # the tokenizer's chat template; else the short form
    rules: str  # what a system message says first; "" for none
    max_tokens: int  # new tokens per reply at most

    def __post_init__(self) -> None:
        chat = self.begin()  # a template that won't do is known before anything starts
        chat.user("?")
        chat.prompt()

    def begin(self, policy: Policy | None = None, *, tools: Sequence[dict[str, Any]] = (), agent: str = "") -> Chat:
        """A new conversation; without a policy it only has prompts."""
        tokenizer = self.tokenizer if self.chat else ShortForm(self.tokenizer)
        chat = Chat(tokenizer, policy, tools=tools, max_tokens=self.max_tokens, agent=agent)
        if self.rules:
            chat.system(self.rules)
        return chat


def ended(task: Task, chat: Chat, reward: Reward) -> Episode:
    """The episode of one conversation. Where a reply was aborted nothing can be said about the policy."""
    if chat.status == "failed":
        return Episode(task, chat.samples(), RewardError("a reply was aborted"), "failed")
    return Episode(task, chat.samples(), reward, chat.status)
