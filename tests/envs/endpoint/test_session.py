"""What a client asks becomes samples: each sampled token once, behind what the engine saw, in whatever order."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.endpoint.errors import ApiError
from spmd_rl.envs.endpoint.messages import Message
from spmd_rl.envs.endpoint.replies import as_message
from spmd_rl.envs.endpoint.requests import ChatRequest, CompletionRequest, Wishes
from spmd_rl.envs.endpoint.session import Session
from spmd_rl.envs.protocol import Generation, StopReason
from spmd_rl.models.byte_tokenizer import CHAT_TEMPLATE
from spmd_rl.rollouts.types import Sample
from tests.envs.chat_templates import make_tokenizer
from tests.envs.endpoint.sessions import CALL, END, asked, heard, run, talk
from tests.envs.endpoint.talking import ADD
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer


class Recorder:
    """A policy that says what was drawn for it, late, and remembers (prompt, what was sampled).

    The version of a token is the number of the call that sampled it, and its logprob the place in that.
    """

    def __init__(self, seed: int) -> None:
        self.sampling = SamplingConfig(temperature=0.5, max_tokens=40)
        self.made: list[tuple[list[int], list[int]]] = []
        self._rng = random.Random(seed)

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        given = tokens.tolist()
        for _ in range(self._rng.randrange(6)):
            await asyncio.sleep(0)
        lines = ["yes", "no", "\xff²", "a STOP b", f"<think>so</think>{CALL}", f"{CALL}{CALL[:-3]}", ""]
        text = self._rng.choice(lines)
        ids = [*byte_tokenizer().encode(text), *self._rng.choices(range(256), k=self._rng.randrange(3))]
        reason: StopReason = self._rng.choice(["stop", "stop", "length"])
        ids = [*ids, END] if reason == "stop" else [*ids, 65]
        if len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], "length"
        assert given == tokens.tolist(), "what an engine works on must not change"
        self.made.append((given, ids))
        places, versions = np.arange(len(ids), dtype=np.float32), np.full(len(ids), len(self.made) - 1)
        return Generation(np.asarray(ids, np.int32), -places, versions, reason)


def turns_of(sample: Sample) -> list[tuple[list[int], list[int], int]]:
    """(all tokens before it, what was sampled, the call that sampled it) of each run of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.mask, [0]])))
    turns = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        (call,) = set(sample.versions[start:end].tolist())
        assert sample.logprobs[start:end].tolist() == [-place for place in range(end - start)]
        turns.append((sample.tokens[:start].tolist(), sample.tokens[start:end].tolist(), call))
    return turns


class Client:
    """Goes on with conversations, forks them, rewrites them, and forgets details of what it heard."""

    def __init__(self, session: Session, seed: int) -> None:
        self.refused: list[ApiError] = []
        self._session, self._rng = session, random.Random(seed)
        self._known: list[tuple[Message, ...]] = [()]

    async def turn(self) -> None:
        rng = self._rng
        before = rng.choice(self._known[-3:] if rng.random() < 0.7 else self._known)
        if rng.random() < 0.2:
            before = tuple(m for m in before if rng.random() < 0.7)
        if rng.random() < 0.2:
            before = tuple(Message(m.role, m.content + "!", m.thought, m.calls, m.call_id) for m in before)
        before = tuple(self._undressed(m) for m in before)
        new = rng.choice([[Message("user", "a")], [Message("user", "b")], [Message("tool", "3", call_id="1")]])
        tools = (ADD,) if rng.random() < 0.5 else ()
        wishes = Wishes(
            n=rng.choice([1, 1, 3]), max_tokens=rng.choice([0, 0, 5]), stop=("STOP",) * (rng.random() < 0.5)
        )
        request = ChatRequest((*before, *new), tools, bool(tools), rng.random() < 0.2, wishes)
        asking = asyncio.create_task(self._session.chat(request))
        if rng.random() < 0.2:
            for _ in range(rng.randrange(9)):
                await asyncio.sleep(0)
            asking.cancel()
        try:
            answered = await asking
        except asyncio.CancelledError:
            return
        except ApiError as error:
            self.refused.append(error)
            return
        self._known += [(*request.messages, answer.said) for answer in answered.answers]

    def _undressed(self, message: Message) -> Message:
        """An assistant's message without its thought."""
        return Message(message.role, message.content, "", message.calls, message.call_id)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), rounds=st.integers(1, 14), at_once=st.integers(1, 4))
def test_each_sampled_token_is_in_one_sample_behind_what_the_engine_saw(seed: int, rounds: int, at_once: int) -> None:
    policy, tokenizer = Recorder(seed), byte_tokenizer()
    completions = [("plain",), (tuple(b"ids"),)]

    async def main() -> Session:
        session = Session(tokenizer, policy)
        client = Client(session, seed)
        for _ in range(rounds):
            works = [client.turn() for _ in range(at_once)]
            if seed % 3 == 0:
                works.append(session.complete(CompletionRequest(completions[seed % 2], Wishes(n=2))))
            await asyncio.gather(*works)
        await session.close()
        assert session.error is None and not client.refused
        return session

    samples = run(main()).samples()
    turns = [turn for sample in samples for turn in turns_of(sample)]
    assert sorted(call for _, _, call in turns) == list(range(len(policy.made)))
    for before, sampled, call in turns:
        prompt, whole = policy.made[call]
        assert before == prompt and sampled == whole[: len(sampled)]
        # A stop string cuts what the engine sampled; nothing else does.
        assert len(sampled) == len(whole) or tokenizer.decode(sampled).endswith("STOP")
    for sample in samples:
        assert sample.mask[-1] == 1 and sample.mask[0] == 0
        assert (sample.temperatures == np.where(sample.mask, 0.5, 1)).all()
        assert not sample.logprobs[sample.mask == 0].any() and (sample.versions[sample.mask == 0] == -1).all()


def test_a_conversation_that_goes_on_is_one_sample() -> None:
    async def work(session: Session) -> None:
        first = await heard(session, asked("a"))
        second = await heard(session, asked("b", after=(Message("user", "a"), first)))
        await heard(session, asked("c", after=(Message("user", "a"), first, Message("user", "b"), second)))

    _, session, policy = talk(["one", "two", "three"], work)
    (sample,) = session.samples()
    assert byte_tokenizer().decode(sample.tokens[sample.mask == 1].tolist()) == (
        "one<|im_end|>two<|im_end|>three<|im_end|>"
    )
    assert sample.tokens.tolist() == [*policy.asked[-1][0].tolist(), *byte_tokenizer().encode("three<|im_end|>")]


def test_what_does_not_extend_begins_a_sample_of_its_own() -> None:
    async def work(session: Session) -> list[int]:
        counts = []

        async def count(request: ChatRequest) -> Message:
            message = await heard(session, request)
            counts.append(len(session.samples()))
            return message

        first = await count(asked("a"))
        await count(asked("a"))  # the same once more
        await count(asked("b", after=(Message("user", "A"), first)))  # rewritten
        await count(asked("b", after=(Message("user", "a"), Message("assistant", "ONE"))))  # rewritten, too
        await count(asked("b", after=(Message("user", "a"), first), tools=(ADD,)))  # other tools
        second = await count(asked("b", after=(Message("user", "a"), first)))  # the first one goes on
        await count(asked("c", after=(Message("user", "a"), first)))  # a branch of it; its end is elsewhere
        await count(asked("d", after=(Message("user", "a"), first, Message("user", "b"), second)))
        await count(asked(after=(Message("user", "a"), Message("assistant", "one"))))  # nothing new is said
        return counts

    counts, session, policy = talk(["one", "1", "2", "3", "4", "two", "5", "three", "6"], work)
    assert counts == [1, 2, 3, 4, 5, 5, 6, 6, 7]
    assert policy.prompts[5].endswith("one<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
    assert policy.prompts[6] == policy.prompts[5].replace("\nb<", "\nc<")  # the same words, as a prompt
    assert int(session.samples()[5].mask.sum()) == len("5") + 1


def test_the_longest_history_that_fits_goes_on() -> None:
    async def work(session: Session) -> None:
        first = await heard(session, asked("a"))
        same = await heard(session, asked("a"))
        assert first == same
        rest = (Message("user", "a"), first, Message("user", "b"))
        second = await heard(session, asked("b", after=rest[:2]))
        await heard(session, asked("c", after=(*rest, second)))

    _, session, _ = talk(["one", "one", "two", "three"], work)
    assert [int(sample.mask.sum()) for sample in session.samples()] == [14, 4]


def test_turns_of_the_assistant_that_were_not_sampled_here_are_given() -> None:
    message = Message("assistant", "seen", "thought", ())

    async def work(session: Session) -> None:
        await heard(session, ChatRequest((Message("system", "s"), Message("user", "a"), message, Message("user", "b"))))

    _, session, policy = talk(["one"], work)
    assert policy.prompts == [
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>thought</think>"
        "seen<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    ]
    assert int(session.samples()[0].mask.sum()) == 4


def test_calls_are_told_apart_and_results_go_back() -> None:
    async def work(session: Session) -> list[Message]:
        said = []
        for one in (False, True):
            request = asked("a", tools=(ADD,), calls=True, one_call=one)
            said.append(await heard(session, request))
        message = said[0]
        results = (Message("tool", "3", call_id=message.calls[0].id), Message("tool", "4", call_id="other"))
        said.append(await heard(session, ChatRequest((*request.messages, message, *results), (ADD,), True)))
        return said

    lines = [f"<think>{CALL}</think>well {CALL} then {CALL}<tool_call>junk</tool_call>", CALL * 2, "7"]
    (both, one, last), session, policy = talk(lines, work)
    assert both.thought == CALL and both.content == "well <tool_call>junk</tool_call>"
    assert [call.name for call in both.calls] == ["add", "add"] and len({call.id for call in both.calls}) == 2
    assert one.content == "" and len(one.calls) == 1
    assert last.content == "7" and not last.calls
    assert "<tool_response>3</tool_response>" in policy.prompts[2]
    assert len(session.samples()) == 2


def test_a_conversation_that_ends_with_the_reply_is_gone_on_with_in_a_sample_of_its_own() -> None:
    async def work(session: Session) -> None:
        first = await heard(session, asked("a"))
        await heard(session, asked(after=(Message("user", "a"), first)))

    _, session, policy = talk(["one", "two"], work)
    assert len(session.samples()) == 2 and policy.prompts[1].endswith("one<|im_end|>\n<|im_start|>assistant\n")


def test_a_reply_that_was_cut_says_so_whatever_it_called() -> None:
    cut = Said(f"{CALL}{CALL[:-20]}", "length")
    answered, session, _ = talk([cut], lambda s: s.chat(asked("a", tools=(ADD,), calls=True)))
    assert answered.answers[0].finish == "length" and len(answered.answers[0].said.calls) == 1
    assert session.status == "truncated"


def test_without_tools_markup_is_text() -> None:
    message, _, _ = talk([CALL], lambda session: heard(session, asked("a")))
    assert message.content == CALL and not message.calls


def test_a_malformed_call_alone_stays_in_the_text() -> None:
    message, _, _ = talk([f"x{CALL[:-2]}"], lambda s: heard(s, asked("a", tools=(ADD,), calls=True)))
    assert message.content == f"x{CALL[:-2]}" and not message.calls


@pytest.mark.parametrize(("before", "behind"), [("[", "]"), ('{"a":', "}")])
def test_a_call_nested_almost_too_deeply_is_no_exception(before: str, behind: str) -> None:
    read = []
    for depth in range(300, 1000):  # what can only just be read must be written again
        deep = f'<tool_call>{{"name": "f", "arguments": {{"a": {before * depth}1{behind * depth}}}}}</tool_call>'
        message = as_message(deep, in_thought=False, calls=True, one_call=False)
        assert bool(message.calls) != ("<tool_call>" in message.content)
        read.append(bool(message.calls))
    assert read == sorted(read, reverse=True) and read[0] and not read[-1]


def test_a_template_that_opens_a_thought() -> None:
    tokenizer = make_tokenizer(CHAT_TEMPLATE.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}"))
    policy = ScriptedPolicy(tokenizer, [f"so {CALL}</think>x{CALL}", "no end"])
    session = Session(tokenizer, policy)

    async def work() -> Message:
        request = asked("a", tools=(ADD,), calls=True)
        first = await heard(session, request)
        assert (first.thought, first.content, len(first.calls)) == (f"so {CALL}", "x", 1)
        return await heard(session, ChatRequest((*request.messages, first, Message("user", "b")), (ADD,), True))

    last = run(work())
    assert (last.thought, last.content) == ("no end", "") and len(session.samples()) == 1
