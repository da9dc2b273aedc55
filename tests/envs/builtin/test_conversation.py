"""The two forms of a conversation: any template, and a short one; and what an episode of one conversation is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from spmd_rl.envs.builtin.conversation import ShortForm, Style, ended
from spmd_rl.envs.chat_template import TemplateError
from spmd_rl.rollouts.types import Reward, RewardError, Task
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

TASK = Task("talk", 0, {})


class Bytes:
    """A tokenizer of two methods, as in the protocol: bytes and two special tokens."""

    names = ("<|im_start|>", "<|im_end|>")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            name = next((name for name in self.names if text.startswith(name)), text[0])
            ids.append(256 + self.names.index(name) if name in self.names else ord(name))
            text = text[len(name) :]
        return ids

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self.names[token - 256] if token > 255 else chr(token) for token in token_ids)


def test_the_short_form_turn_by_turn() -> None:
    for tokenizer in (byte_tokenizer(), Bytes()):
        policy = ScriptedPolicy(tokenizer, ["one", Said("two", "length"), "three"])
        chat = Style(tokenizer, False, "rules", 30).begin(policy)
        for text in ("a", "b", "c<|im_end|>"):
            chat.user(text)
            asyncio.run(chat.reply())
        assert policy.prompts[0] == "<|im_start|>rules\n<|im_start|>a\n"
        assert policy.prompts[1] == policy.prompts[0] + "one<|im_end|><|im_start|>b\n"
        # A reply without an end gets one; what is said can't end a turn.
        assert policy.prompts[2] == policy.prompts[1] + "two<|im_end|><|im_start|>c< |im_end|>\n"


def test_both_forms_share_the_tokenizer() -> None:
    short = ShortForm(byte_tokenizer())
    assert short.encode("ab") == byte_tokenizer().encode("ab")
    assert short == ShortForm(byte_tokenizer()) and hash(short) == hash(ShortForm(byte_tokenizer()))
    assert short.eos_token == "<|im_end|>"


def test_a_template_that_refuses_is_known_at_once() -> None:
    class Refuses(ShortForm):
        def apply_chat_template(self, messages: Any, **how: Any) -> str:
            if messages[0]["role"] == "system":
                raise ValueError("no system messages")
            return super().apply_chat_template(messages, **how)

    Style(Refuses(byte_tokenizer()), True, "", 10)
    with pytest.raises(TemplateError, match="no system messages"):
        Style(Refuses(byte_tokenizer()), True, "rules", 10)


@pytest.mark.parametrize(
    ("reason", "status", "reward"),
    [
        ("stop", "ok", Reward(0.5)),
        ("length", "truncated", Reward(0.5)),
        ("aborted", "failed", RewardError("a reply was aborted")),
    ],
)
def test_how_a_conversation_ends(reason: Any, status: str, reward: Any) -> None:
    chat = Style(byte_tokenizer(), True, "", 30).begin(
        ScriptedPolicy(byte_tokenizer(), [Said("x", reason)]), agent="me"
    )
    chat.user("hello")
    asyncio.run(chat.reply())
    episode = ended(TASK, chat, Reward(0.5))
    assert (episode.status, episode.reward, episode.samples[0].agent) == (status, reward, "me")
