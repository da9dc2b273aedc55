"""One request is one answer, whatever else the engine does; and the trainer computes the same logprobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from spmd_rl.orchestrator.versions import k3
from tests.inference.engines import (
    SEQ_LEN,
    VOCAB,
    add,
    drain,
    prompts,
    refusal,
    request,
    serve,
    trainer_logprobs,
)

PROMPT, NEW = 50, 12


@pytest.fixture
def crowd():
    return [request(i, tokens, NEW) for i, tokens in enumerate(prompts(33, PROMPT))]


def assert_same(got, expected):
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def phases(engine, requests) -> list[bool]:
    """Of each step, whether it takes in tokens of a prompt."""
    found = []
    add(engine, requests)
    while engine.busy:
        found.append(engine.prefills)
        engine.step()
    return found


def test_requests_that_find_no_free_slot_make_no_prefill(piecewise, crowd):
    """Eight run at a time; while they generate, a queue is no news."""
    short = [replace(item, tokens=item.tokens[:2], max_tokens=6) for item in crowd[:16]]
    once = [True] + [False] * 5
    assert phases(piecewise, short) == [*once, *once]


def test_a_request_is_answered_alike_alone_and_in_a_crowd(engine, crowd):
    together = serve(engine, crowd)
    assert sorted(together) == list(range(33))
    for item in crowd[:4]:
        assert_same(serve(engine, [item])[item.id], together[item.id])


def test_a_request_is_answered_alike_when_its_prompt_is_taken_in_pieces(engine, piecewise, crowd):
    before = engine.steps
    whole = serve(engine, crowd[:1])
    assert engine.steps - before == NEW
    before = piecewise.steps
    pieces = serve(piecewise, crowd[:1])
    assert piecewise.steps - before == NEW + 3  # 50 tokens at 16 a step
    assert_same(pieces[0], whole[0])
    assert phases(engine, crowd[1:2]) == [True] + [False] * (NEW - 1)
    assert phases(piecewise, crowd[1:2]) == [True] * 4 + [False] * (NEW - 1)
    in_queue = serve(piecewise, crowd)
    for id, expected in serve(engine, crowd).items():
        assert_same(in_queue[id], expected)


@pytest.mark.parametrize("done", [1, 5, 11])
def test_an_aborted_request_goes_on_as_if_nothing_had_happened(engine, crowd, done):
    """Added again with what was generated so far in its prompt: the noise belongs to absolute positions."""
    item, others = crowd[0], crowd[1:4]
    expected = serve(engine, [item])[0]
    add(engine, [item, *others])
    for _ in range(done):
        engine.step()
    assert engine.cancel(item.id).stop_reason == "aborted"
    resumed = request(99, np.concatenate([item.tokens, expected.tokens[:done]]), NEW - done, seed=item.seed)
    got = serve(engine, [resumed])
    np.testing.assert_array_equal(got[99].tokens, expected.tokens[done:])
    assert sorted(got) == [1, 2, 3, 99]


def test_a_cancelled_request_says_so_and_disturbs_nobody(engine, crowd):
    expected = serve(engine, crowd[:8])
    add(engine, crowd[:8])
    engine.step()
    aborted = engine.cancel(3)
    assert (aborted.id, aborted.stop_reason, len(aborted.tokens)) == (3, "aborted", 0)
    assert engine.cancel(3) is None and engine.cancel(12345) is None
    got = drain(engine)
    assert sorted(got) == [0, 1, 2, 4, 5, 6, 7]
    for id, generated in got.items():
        assert_same(generated, expected[id])
    assert_same(serve(engine, [crowd[3]])[3], expected[3])  # the id is free again


def test_seeds_of_one_group_give_different_samples(engine):
    prompt = prompts(1, PROMPT)[0]
    answers = serve(engine, [request(i, prompt, NEW) for i in range(16)]).values()
    assert len({tuple(answer.tokens) for answer in answers}) == 16


def test_samples_follow_the_models_distribution(engine, learner):
    """2000 first tokens of one prompt against the trainer's probabilities: mean logprob within 4 standard errors."""
    prompt, n = prompts(1, PROMPT)[0], 2000
    answers = serve(engine, [request(i, prompt, 1) for i in range(n)]).values()
    sampled = np.array([answer.logprobs[0] for answer in answers])
    everything = np.array([trainer_logprobs(learner, np.append(prompt, v), PROMPT)[0] for v in range(VOCAB)])
    p = np.exp(everything.astype(np.float64))
    mean = (p * everything).sum()
    deviation = np.sqrt((p * (everything - mean) ** 2).sum())
    assert abs(sampled.mean() - mean) < 4 * deviation / np.sqrt(n)


def test_greedy_takes_the_likeliest_token_and_ignores_the_seed(engine, folders, crowd):
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    greedy = [request(i, item.tokens, NEW, temperature=0.0, seed=i) for i, item in enumerate(crowd[:4])]
    again = [request(i, item.tokens, NEW, temperature=0.0, seed=77) for i, item in enumerate(crowd[:4])]
    answers, others = serve(engine, greedy + crowd[8:]), serve(engine, again)
    for item in greedy:
        tokens = answers[item.id].tokens
        np.testing.assert_array_equal(tokens, others[item.id].tokens)
        sequence = np.concatenate([item.tokens, tokens])
        with torch.no_grad():
            best = model(torch.tensor(sequence[:-1]).long()[None]).logits[0, PROMPT - 1 :].argmax(-1)
        np.testing.assert_array_equal(tokens, best.numpy())


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_the_trainer_computes_the_engines_logprobs(engine, learner, temperature):
    crowd = [request(i, tokens, 40, temperature) for i, tokens in enumerate(prompts(8, PROMPT))]
    answers = serve(engine, crowd)
    for item in crowd:
        answer = answers[item.id]
        sequence = np.concatenate([item.tokens, answer.tokens])
        values = k3(trainer_logprobs(learner, sequence, PROMPT, temperature), answer.logprobs)
        assert len(values) == 40 and values.mean() <= 1e-8
        untempered = k3(trainer_logprobs(learner, sequence, PROMPT, 1.0), answer.logprobs)
        assert temperature == 1.0 or untempered.mean() > 1e-3  # the check can tell temperatures apart


def test_a_generation_ends_at_max_tokens_or_at_a_stop_token(engine):
    prompt = prompts(1, PROMPT)[0]
    full = serve(engine, [request(0, prompt, 40)])[0]
    assert (len(full.tokens), len(full.logprobs), len(full.versions), full.stop_reason) == (40, 40, 40, "length")
    stop = int(full.tokens[20])
    first = int(np.flatnonzero(full.tokens == stop)[0])
    stopped = serve(engine, [request(0, prompt, 40, stop_token_ids=[VOCAB - 1, stop])])[0]
    assert stopped.stop_reason == "stop"
    np.testing.assert_array_equal(stopped.tokens, full.tokens[: first + 1])  # with the stop token
    assert len(stopped.logprobs) == len(stopped.versions) == first + 1


def test_a_generation_ends_where_the_longest_sequence_ends(engine):
    answer = serve(engine, [request(0, prompts(1, SEQ_LEN - 3)[0], 40)])[0]
    assert (len(answer.tokens), answer.stop_reason) == (3, "length")


IMPOSSIBLE = {
    "a prompt as long as the longest sequence": (request(7, np.zeros(SEQ_LEN, dtype=np.int32)), "length 256"),
    "a longer prompt": (request(7, np.zeros(3 * SEQ_LEN, dtype=np.int32)), "768"),
    "an empty prompt": (request(7, np.zeros(0, dtype=np.int32)), "empty"),
    "an id that the vocabulary lacks": (request(7, np.array([1, 2, VOCAB], dtype=np.int32)), "[265]"),
    "a negative id": (request(7, np.array([1, -1, 2], dtype=np.int32)), "[-1]"),
    "no new token": (request(7, np.array([1, 2], dtype=np.int32), max_tokens=0), "max_tokens"),
    "a negative temperature": (request(7, np.array([1, 2], dtype=np.int32), temperature=-1.0), "temperature"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_the_engine_cannot_take_is_refused_and_the_rest_goes_on(engine, crowd, what):
    expected = serve(engine, crowd[:1])
    add(engine, crowd[:1])
    engine.step()
    impossible, reason = IMPOSSIBLE[what]
    refused = refusal(engine, impossible)
    assert refused.id == 7 and reason in refused.why
    assert engine.cancel(7) is None
    got = drain(engine)
    assert list(got) == [0]
    assert_same(got[0], expected[0])
