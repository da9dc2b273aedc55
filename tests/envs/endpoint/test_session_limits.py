"""Where a client's request ends: limits, stop strings, no room, errors, a rollout that is over."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.endpoint.history import cut_at_stop
from spmd_rl.envs.endpoint.messages import Message
from spmd_rl.envs.endpoint.requests import CompletionRequest, Wishes
from spmd_rl.envs.endpoint.session import Session
from spmd_rl.envs.protocol import Generation, PromptTooLong
from tests.envs.chat_templates import tokenizer_with
from tests.envs.endpoint.sessions import END, asked, heard, refusal, run, talk
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

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
