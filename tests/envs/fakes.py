"""Policies that say what a test wrote, the tokenizer of bytes, chats in a line: what tests of environments share."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.chat import Chat
from spmd_rl.envs.protocol import Generation, PromptTooLong, StopReason
from spmd_rl.models.byte_tokenizer import IM_END, make_byte_tokenizer


@lru_cache(maxsize=1)
def byte_tokenizer() -> Any:
    """256 bytes, ChatML and tool markup, with a chat template."""
    with tempfile.TemporaryDirectory() as folder:
        return make_byte_tokenizer(folder)


@dataclass(frozen=True)
class Said:
    """A scripted answer that does not just end."""

    text: str
    stop_reason: StopReason


Line = str | Said


class ScriptedPolicy:
    """Answers with `texts`, one after the other, or with a function of the decoded prompt; each ends with `end`.

    An answer longer than max_tokens is cut, as an engine does it. `asked` holds (tokens, sampling) of every call,
    `prompts` the tokens as text. With `seq_len`, a prompt that leaves no room is PromptTooLong.
    """

    def __init__(
        self,
        tokenizer: Any,
        texts: Iterable[Line] | Callable[[str], Line],
        *,
        end: str = IM_END,
        sampling: SamplingConfig | None = None,
        seq_len: int = 2**30,
        version: int = 7,
    ) -> None:
        self.tokenizer, self.end, self.seq_len, self.version = tokenizer, end, seq_len, version
        self.sampling = sampling or SamplingConfig(temperature=0.9, max_tokens=100_000)
        self.asked: list[tuple[np.ndarray, SamplingConfig]] = []
        self._answer = texts if callable(texts) else None
        self._texts = iter(()) if callable(texts) else iter(texts)

    @property
    def prompts(self) -> list[str]:
        """What was asked, as text."""
        return [self.tokenizer.decode(tokens.tolist()) for tokens, _ in self.asked]

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        room = self.seq_len - len(tokens)
        if room < 1:
            raise PromptTooLong(f"a prompt of {len(tokens)} tokens leaves no room")
        self.asked.append((tokens, sampling))
        line = self._answer(self.tokenizer.decode(tokens.tolist())) if self._answer else next(self._texts, None)
        assert line is not None, f"the script is over: {len(self.asked)} replies were asked for"
        said = line if isinstance(line, Said) else Said(line + self.end, "stop")
        ids = list(self.tokenizer.encode(said.text))
        limit = min(sampling.max_tokens, room)
        reason = said.stop_reason if len(ids) <= limit else "length"
        kept = np.asarray(ids[:limit], np.int32)
        logprobs = -np.arange(1, len(kept) + 1, dtype=np.float32) / 8
        return Generation(kept, logprobs, np.full(len(kept), self.version, np.int32), reason)


class IdPolicy:
    """Samples the ids it is given, and remembers what it was asked."""

    def __init__(self, answers: list[tuple[list[int], StopReason]]) -> None:
        self.sampling, self.asked, self.given = SamplingConfig(temperature=0.5), [], []
        self._answers = iter(answers)

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        ids, reason = next(self._answers)
        count = len(ids)
        made = Generation(np.asarray(ids, np.int32), np.full(count, -0.5, np.float32), np.full(count, 3), reason)
        self.asked.append(tokens)
        self.given.append(made)
        return made


def say(chat: Chat, role: str, text: str) -> None:
    chat.user(text) if role == "user" else chat.tool(text)


def talk(tokenizer: Any, policy: Any, turns: list[list[tuple[str, str]]], **options: Any) -> Chat:
    """A chat in which each turn's messages were said and answered."""
    chat = Chat(tokenizer, policy, **options)

    async def run() -> None:
        for turn in turns:
            for role, text in turn:
                say(chat, role, text)
            await chat.reply()

    asyncio.run(run())
    return chat


def users(*said: str) -> list[list[tuple[str, str]]]:
    return [[("user", text)] for text in said]


class Plain:
    """Nothing but encode and decode; counts what it encodes."""

    def __init__(self, eos: str = "") -> None:
        self.tokens = 0
        if eos:
            self.eos_token = eos

    def encode(self, text: str) -> list[int]:
        ids = byte_tokenizer().encode(text)
        self.tokens += len(ids)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        return byte_tokenizer().decode(token_ids)
