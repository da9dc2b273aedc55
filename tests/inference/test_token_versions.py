"""Which version sampled which token, and that no version ever sees another one's KV cache."""

from __future__ import annotations

import numpy as np

from spmd_rl.orchestrator.versions import k3
from tests.inference.engines import add, drain, load, probe, prompts, request, serve, trainer_logprobs

PROMPT, NEW = 100, 12  # the prompt fills three blocks of the KV cache


def test_a_swap_stamps_every_token_with_the_version_that_sampled_it(engine, stranger):
    """The old weights' own answer says where the new ones took over."""
    old = engine.version
    crowd = [request(i, tokens, NEW) for i, tokens in enumerate(prompts(4, PROMPT))]
    undisturbed = serve(engine, crowd)
    add(engine, crowd)
    for _ in range(5):
        assert not engine.step()
    load(engine, old + 1, stranger)
    answers = drain(engine)
    assert sorted(answers) == [0, 1, 2, 3]  # nobody was lost
    for id, answer in answers.items():
        assert answer.versions.tolist() == [old] * 5 + [old + 1] * 7
        assert answer.versions.dtype == np.int32 and len(answer.tokens) == len(answer.logprobs) == NEW
        np.testing.assert_array_equal(answer.tokens[:5], undisturbed[id].tokens[:5])
        np.testing.assert_array_equal(answer.logprobs[:5], undisturbed[id].logprobs[:5])
        assert abs(answer.logprobs[5] - undisturbed[id].logprobs[5]) > 1e-3


def test_a_version_that_sampled_nothing_is_stamped_on_nothing(engine, learner, stranger):
    """Two swaps before the first token, one after some, one between two steps that a later one overtakes."""
    start = engine.version
    add(engine, [request(0, prompts(1, PROMPT)[0], NEW)])
    load(engine, start + 1, stranger)
    load(engine, start + 2, learner)
    for _ in range(3):
        engine.step()
    load(engine, start + 3, stranger)
    load(engine, start + 4, learner)
    for _ in range(2):
        engine.step()
    load(engine, start + 5, stranger)
    answer = drain(engine)[0]
    assert (answer.versions - start).tolist() == [2] * 3 + [4] * 2 + [5] * 7


def test_requests_in_the_queue_are_stamped_by_the_version_that_serves_them(piecewise, learner, stranger):
    """8 run at a time: the others wait through the swap."""
    load(piecewise, piecewise.version + 1, learner)
    old = piecewise.version
    add(piecewise, [request(i, tokens, 4) for i, tokens in enumerate(prompts(16, 10))])
    answers = {}
    while len(answers) < 3:
        answers |= {event.id: event for event in piecewise.step()}
    load(piecewise, old + 1, stranger)
    answers |= drain(piecewise)
    assert sorted(answers) == list(range(16))
    assert answers[0].versions.tolist() == [old] * 4
    assert answers[15].versions.tolist() == [old + 1] * 4
    for answer in answers.values():
        assert (np.diff(answer.versions) >= 0).all()


def test_new_requests_get_a_salt_of_the_new_version_and_later_turns_keep_theirs(engine, stranger):
    prompt, old = prompts(1, PROMPT)[0], engine.version
    first = serve(engine, [request(0, prompt, NEW)])[0]
    load(engine, old + 1, stranger)
    turn = np.concatenate([prompt, first.tokens, prompt[:5]])
    answers = serve(engine, [request(1, turn, NEW, salt=first.salt), request(2, turn, NEW)])
    assert answers[1].salt == first.salt == f"v{old}"
    assert answers[2].salt == f"v{old + 1}"
    for answer in answers.values():
        assert answer.versions.tolist() == [old + 1] * NEW


def test_no_version_reads_the_kv_cache_of_another(engine, learner, stranger):
    """The same prompt under other weights; keeping the old salt shows that the old cache was there to be found."""
    prompt = prompts(1, PROMPT)[0]
    old = serve(engine, [request(0, prompt, NEW)])[0]

    def mismatch(weights, answer) -> float:
        sequence = np.concatenate([prompt, answer.tokens])
        return k3(trainer_logprobs(weights, sequence, PROMPT), answer.logprobs).mean()

    assert mismatch(learner, old) <= 1e-8
    load(engine, engine.version + 1, stranger)
    answers = serve(engine, [request(1, prompt, NEW), request(2, prompt, NEW, salt=old.salt)])
    assert mismatch(stranger, answers[1]) <= 1e-8
    assert mismatch(stranger, answers[2]) > 1e-4


def test_the_cache_of_a_version_is_used_within_it(piecewise, learner):
    """Three blocks of 32 of the prompt are not computed a second time: at 16 tokens a step, six steps fewer."""
    load(piecewise, piecewise.version + 1, learner)
    prompt, steps = prompts(1, PROMPT)[0], []
    for id in range(2):
        before = piecewise.steps
        serve(piecewise, [request(id, prompt, 1)])
        steps.append(piecewise.steps - before)
    assert steps == [7, 1]


def test_the_probe_scores_the_current_version_beside_rollouts(engine, learner, stranger):
    crowd = [request(i, tokens, NEW) for i, tokens in enumerate(prompts(4, PROMPT))]
    sequences = [*prompts(3, 24, seed=5), *prompts(1, 60, seed=6), *prompts(1, 2, seed=7)]
    sequences.append(sequences[0])  # twice the same
    undisturbed = serve(engine, crowd)
    add(engine, crowd)
    engine.step()
    engine.probe(sequences)
    assert engine.probing
    answers, scored = {}, None
    while engine.busy:
        for event in engine.step():
            if hasattr(event, "id"):
                answers[event.id] = event
            else:
                scored = event
    assert not engine.probing
    assert scored.version == engine.version
    assert [len(logprobs) for logprobs in scored.logprobs] == [23, 23, 23, 59, 1, 23]
    trainer = np.concatenate(learner.score(sequences))
    assert k3(trainer, np.concatenate(scored.logprobs)).mean() <= 1e-8
    for id, answer in answers.items():
        np.testing.assert_array_equal(answer.tokens, undisturbed[id].tokens)
    load(engine, engine.version + 1, stranger)
    scored = np.concatenate(probe(engine, sequences).logprobs)
    assert k3(np.concatenate(stranger.score(sequences)), scored).mean() <= 1e-8
    assert k3(trainer, scored).mean() > 1e-4
