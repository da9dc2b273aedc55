"""An engine that gives its memory back: requests wait, and go on behind their tokens with the next weights."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from spmd_rl.inference.memory import forget_pages
from spmd_rl.world.messages import Generated
from tests.inference.engines import add, drain, load, prompts, request, take_step

PROMPT, NEW = 50, 20


def some_steps(engine, count: int) -> dict[int, Generated]:
    return {event.id: event for _ in range(count) for event in engine.step() if isinstance(event, Generated)}


def test_after_a_sleep_requests_go_on_as_after_a_swap_and_a_restart(engine, learner):
    crowd = [request(i, tokens, NEW + 3 * i) for i, tokens in enumerate(prompts(6, PROMPT))]
    late = [request(10 + i, tokens, NEW) for i, tokens in enumerate(prompts(3, PROMPT, seed=1))]
    before = {name: tensor.clone() for name, tensor in learner.full_tensors()}
    add(engine, crowd)
    assert not some_steps(engine, 8)
    engine.sleep()
    assert not engine.busy
    add(engine, late)
    assert not engine.busy, "what comes while it sleeps waits too"
    engine.sleep()  # a second time is no harm
    take_step(learner, 1e-2)
    load(engine, engine.version + 1, learner)
    slept, version = drain(engine), engine.version
    assert sorted(slept) == [item.id for item in crowd + late]

    engine.swap(version + 1, before.items(), list(before))
    add(engine, crowd)
    assert not some_steps(engine, 8)
    load(engine, version + 2, learner)
    engine.restart()
    add(engine, late)
    for id, answer in drain(engine).items():
        for name in ("tokens", "logprobs"):
            assert getattr(answer, name).tobytes() == getattr(slept[id], name).tobytes()
        assert set(slept[id].versions.tolist()) == ({version} if id >= 10 else {version - 1, version})


def test_a_request_that_waits_can_be_cancelled_and_is_fenced(engine, learner):
    crowd = [request(i, tokens, NEW) for i, tokens in enumerate(prompts(3, PROMPT))]
    add(engine, crowd)
    some_steps(engine, 4)
    engine.sleep()
    assert engine.cancel(1).stop_reason == "aborted"
    assert engine.cancel(1) is None
    partials = engine.restart()
    assert [partial.id for partial in partials] == [0, 2] and not engine.busy
    load(engine, engine.version + 1, learner)
    done = drain(engine)
    assert sorted(done) == [0, 2]
    for partial in partials:
        np.testing.assert_array_equal(done[partial.id].tokens[: len(partial.tokens)], partial.tokens)


def test_pages_go_back_to_the_system_and_neighbours_stay():
    held = torch.ones(64 * 2**20 // 4)
    neighbour = torch.ones(1000)
    before = resident()
    forget_pages(held)
    assert before - resident() > 48 * 2**20
    assert held[4096:-4096].sum() == 0 and neighbour.sum() == 1000
    held += 1
    assert held[5000] == 1


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
