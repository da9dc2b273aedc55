"""What a client asks becomes samples: each sampled token once, behind what the engine saw, in whatever order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.endpoint.errors import ApiError
from spmd_rl.envs.endpoint.history import cut_at_stop
from spmd_rl.envs.endpoint.messages import Message
from spmd_rl.envs.endpoint.replies import as_message
from spmd_rl.envs.endpoint.requests import ChatRequest, CompletionRequest, Wishes
from spmd_rl.envs.endpoint.session import Session
from spmd_rl.envs.protocol import Generation, PromptTooLong, StopReason
from spmd_rl.models.byte_tokenizer import CHAT_TEMPLATE
from spmd_rl.rollouts.types import Sample
from tests.envs.chat_templates import make_tokenizer, tokenizer_with
from tests.envs.endpoint.talking import ADD
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

END = 258
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def run(main: Coroutine[Any, Any, Any]) -> Any:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def asked(*texts: str, after: tuple[Message, ...] = (), **changes: Any) -> ChatRequest:
    return ChatRequest((*after, *(Message("user", text) for text in texts)), **changes)


async def heard(session: Session, request: ChatRequest) -> Message:
    return (await session.chat(request)).answers[0].said


async def refusal(work: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await work
    return raised.value


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


def talk(lines: list[Any], work: Callable[[Session], Coroutine[Any, Any, Any]], **options: Any) -> tuple[Any, Any, Any]:
    """(what `work` comes to, the session, the policy)."""
    policy = ScriptedPolicy(byte_tokenizer(), lines, **options)
    session = Session(byte_tokenizer(), policy)
    return run(work(session)), session, policy


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


# --- limits and stops -------------------------------------------------------------------------------------------------


def test_a_client_may_lower_the_limit_and_nothing_else() -> None:
    sampling = SamplingConfig(temperature=0.7, max_tokens=9)
    wishes = [Wishes(), Wishes(max_tokens=3), Wishes(max_tokens=99, temperature=0.1, top_p=0.2, top_k=4, seed=5)]

    async def work(session: Session) -> list[str]:
        answers = [(await session.chat(asked("a", wishes=w))) for w in wishes]
        assert {a.sampling.temperature for a in answers} == {0.7}
        return [a.answers[0].finish for a in answers]

    finishes, session, policy = talk(["x" * 20] * 3, work, sampling=sampling)
    assert finishes == ["length"] * 3 and session.status == "truncated"
    assert [s.max_tokens for _, s in policy.asked] == [9, 3, 9]
    assert {(s.temperature, s.top_p, s.top_k) for _, s in policy.asked} == {(0.7, 1.0, 0)}


def test_a_stop_string_ends_the_reply_where_an_engine_would() -> None:
    async def work(session: Session) -> Message:
        answer = (await session.chat(asked("a", wishes=Wishes(stop=("Obs", "zzz"))))).answers[0]
        assert answer.finish == "stop" and len(answer.tokens) == len("Act: x Obs") == len(answer.logprobs)
        await heard(session, asked("b", after=(Message("user", "a"), answer.said)))
        return answer.said

    message, session, policy = talk(["Act: x Observation: made up", "two"], work)
    assert message.content == "Act: x "
    assert policy.prompts[1].endswith(
        "assistant\nAct: x Obs<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    (sample,) = session.samples()
    assert byte_tokenizer().decode(sample.tokens[sample.mask == 1].tolist()) == "Act: x Obstwo<|im_end|>"
    assert session.status == "ok"


@given(text=st.text("ab²", max_size=12), stops=st.lists(st.text("ab²", min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_cut_is_the_shortest_beginning_with_a_stop_string(text: str, stops: list[str]) -> None:
    tokenizer = byte_tokenizer()
    ids = np.asarray([*tokenizer.encode(text), END], np.int32)
    made = Generation(ids, np.arange(len(ids), dtype=np.float32), ids, "length")
    cut = cut_at_stop(made, stops, tokenizer.decode)
    lengths = [n for n in range(len(ids) + 1) if any(stop in tokenizer.decode(ids[:n].tolist()) for stop in stops)]
    if lengths:
        assert (len(cut.tokens), len(cut.logprobs), len(cut.versions)) == (lengths[0],) * 3
        assert cut.stop_reason == "stop"
    else:
        assert cut is made


def test_several_answers_are_several_samples() -> None:
    answers, session, policy = talk(["1", "2", "3"], lambda s: s.chat(asked("a", wishes=Wishes(n=3))))
    assert sorted(answer.said.content for answer in answers.answers) == ["1", "2", "3"]
    assert len(session.samples()) == 3 and len(set(policy.prompts)) == 1


def test_plain_prompts_are_samples_of_their_own() -> None:
    async def work(session: Session) -> Any:
        await refusal(session.complete(CompletionRequest(("",))))
        await refusal(session.complete(CompletionRequest(((265,),))))
        return await session.complete(CompletionRequest(("ab", (99, 100)), Wishes(n=2, stop=("!!",))))

    answered, session, policy = talk(["1", "2!!3", "3", "4"], work)
    assert [answer.said.content for answer in answered.answers] == ["1", "2", "3", "4"]
    assert policy.prompts == ["ab", "ab", "cd", "cd"]
    assert [len(sample.tokens) for sample in session.samples()] == [4, 5, 4, 4]


def test_no_room_is_an_error_of_the_client_and_truncates() -> None:
    async def work(session: Session) -> list[str]:
        said = await heard(session, asked("a"))
        before = (Message("user", "a"), said)
        long = await refusal(session.chat(asked("x" * 200, after=before)))
        assert (long.status, long.code, session.ran_out) == (400, "context_length_exceeded", True)
        shorter = await heard(session, asked("b", after=before))  # what was refused was never said
        fresh = await refusal(session.chat(asked("y" * 200)))
        assert fresh.code == "context_length_exceeded"
        assert (await refusal(session.complete(CompletionRequest(("z" * 200,))))).code == "context_length_exceeded"
        return [said.content, shorter.content]

    contents, session, _ = talk(["one", "two"], work, seq_len=120)
    assert contents == ["one", "two"]
    assert session.status == "truncated" and session.error is None
    assert [int(sample.mask.sum()) for sample in session.samples()] == [8]


def test_messages_that_the_template_refuses_are_the_clients_error() -> None:
    tokenizer = tokenizer_with("instructs")
    session = Session(tokenizer, ScriptedPolicy(tokenizer, ["one"], end=tokenizer.eos_token))

    async def work() -> None:
        error = await refusal(session.chat(asked("a", "b")))
        assert error.status == 400 and "chat template" in error.message
        said = await heard(session, asked("a"))
        error = await refusal(session.chat(asked("b", "c", after=(Message("user", "a"), said))))
        assert error.status == 400

    run(work())
    assert session.error is None and len(session.samples()) == 1 and session.status == "ok"


def test_a_rollout_may_have_so_many_replies() -> None:
    policy = ScriptedPolicy(byte_tokenizer(), lambda prompt: "x")
    session = Session(byte_tokenizer(), policy, max_replies=3)

    async def work() -> None:
        await session.chat(asked("a", wishes=Wishes(n=2)))
        error = await refusal(session.chat(asked("a", wishes=Wishes(n=2))))
        assert (error.status, error.code, error.again) == (429, "insufficient_quota", False)
        await session.chat(asked("a"))

    run(work())
    assert session.status == "truncated" and session.ran_out and len(session.samples()) == 3


# --- ends -------------------------------------------------------------------------------------------------------------


class Waiting(ScriptedPolicy):
    """Answers when it is let."""

    def __init__(self, lines: Any) -> None:
        super().__init__(byte_tokenizer(), lines)
        self.let, self.begun, self.given_up = asyncio.Event(), asyncio.Event(), 0

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        self.begun.set()
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return await super().generate(tokens, sampling)


def test_a_request_that_is_given_up_leaves_no_trace() -> None:
    async def main() -> None:
        policy = Waiting(["one", "two"])
        session = Session(byte_tokenizer(), policy)
        policy.let.set()
        said = await heard(session, asked("a"))
        policy.let.clear(), policy.begun.clear()
        going_on = asked("b", after=(Message("user", "a"), said))
        gone = asyncio.create_task(session.chat(going_on))
        await policy.begun.wait()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        policy.let.set()
        await heard(session, asked("c", after=(Message("user", "a"), said)))
        (sample,) = session.samples()
        assert policy.given_up == 1 and "user\nb" not in policy.prompts[-1]
        assert int(sample.mask.sum()) == 8 and session.status == "ok"

    run(main())


def test_a_history_that_is_busy_is_left_alone() -> None:
    async def main() -> None:
        policy = Waiting(["one", "two", "two"])
        session = Session(byte_tokenizer(), policy)
        policy.let.set()
        said = await heard(session, asked("a"))
        policy.let.clear()
        going_on = asked("b", after=(Message("user", "a"), said))
        both = [asyncio.create_task(session.chat(going_on)) for _ in range(2)]
        await policy.begun.wait()
        await asyncio.sleep(0)
        policy.let.set()
        await asyncio.gather(*both)
        assert [int(sample.mask.sum()) for sample in session.samples()] == [8, 4]

    run(main())


def test_nothing_is_asked_in_the_name_of_a_session_that_is_over() -> None:
    async def main() -> None:
        policy = Waiting(["one"])
        session = Session(byte_tokenizer(), policy)
        waiting = asyncio.create_task(session.chat(asked("a", wishes=Wishes(n=2))))
        await policy.begun.wait()
        await asyncio.sleep(0)
        await session.close()
        assert (await refusal(waiting)).code == "rollout_over" and policy.given_up == 2
        assert (await refusal(session.chat(asked("a")))).status == 503
        assert session.samples() == () and session.error is None

    run(main())


@pytest.mark.parametrize("error", [RuntimeError("the engine is gone"), ValueError("odd")])
def test_what_the_policy_raises_is_kept_for_the_rollout(error: Exception) -> None:
    class Broken(ScriptedPolicy):
        async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
            raise error

    async def main() -> None:
        session = Session(byte_tokenizer(), Broken(byte_tokenizer(), []))
        failing = asyncio.create_task(session.failed())
        told = await refusal(session.chat(asked("a")))
        assert told.status == 500 and str(error) not in told.message
        with pytest.raises(type(error)) as raised:
            await failing
        assert raised.value is error is session.error

    run(main())


def test_an_aborted_reply_fails_the_episode() -> None:
    aborted = Said("", "aborted")
    error, session, _ = talk([aborted], lambda s: refusal(s.chat(asked("a"))))
    assert (error.status, error.again, session.status) == (503, True, "failed")


def test_the_error_of_one_answer_gives_the_others_up() -> None:
    class Half(Waiting):
        async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
            if self.begun.is_set():
                raise PromptTooLong("full")
            return await super().generate(tokens, sampling)

    async def main() -> None:
        policy = Half(["one"])
        session = Session(byte_tokenizer(), policy)
        error = await refusal(session.chat(asked("a", wishes=Wishes(n=2))))
        assert error.code == "context_length_exceeded" and policy.given_up == 1
        policy.begun.clear(), policy.let.set()
        await session.chat(asked("a"))
        assert len(session.samples()) == 1

    run(main())
