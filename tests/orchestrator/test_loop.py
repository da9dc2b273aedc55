"""The whole main loop against a fake cluster: what is trained on, when, how stale, and in which order all is said."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import CkptConfig
from spmd_rl.orchestrator import loop
from spmd_rl.orchestrator.batch import make_batch
from spmd_rl.orchestrator.router import Router
from spmd_rl.orchestrator.window import Window
from spmd_rl.rollouts.types import Task
from spmd_rl.world.messages import Export, Generate
from tests.orchestrator import fake_run
from tests.orchestrator.fake_cluster import TOKEN, Delays, Misbehaviour
from tests.orchestrator.fake_run import HELDOUT, PROMPT, TOOL, FakeEnvironment, Run, make_config, train

ORDERS = ("fifo", "window", "completion")


def tasks_of(documents: list[np.ndarray]) -> list[int]:
    """Training tasks that documents belong to; every one starts with its prompt."""
    return [int(document[0]) - PROMPT for document in documents]


def requests_of(documents: list[np.ndarray]) -> list[int]:
    """Requests whose tokens documents hold, once per document."""
    return [int(i) - TOKEN for document in documents for i in np.unique(document[document >= TOKEN])]


def bound_of(made: Run) -> int | None:
    o = made.config.orchestrator
    return Window(o.batch_size // o.group_size, o.max_lag, o.window_fraction, o.order).bound


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 4),
    group_size=st.integers(1, 3),
    max_steps=st.integers(1, 6),
    max_lag=st.integers(0, 3),
    order=st.sampled_from(ORDERS),
    window_fraction=st.sampled_from([0.1, 0.3, 1.0]),
    replicas=st.integers(1, 3),
    trainers=st.integers(1, 3),
    turns=st.integers(1, 2),
    seed=st.integers(0, 10_000),
    tail=st.sampled_from([0.6, 1.2, 3.0]),
    train_s=st.sampled_from([0.01, 1.0, 10.0]),
)
def test_any_run_trains_every_rollout_once_and_within_the_bound(
    groups, group_size, max_steps, max_lag, order, window_fraction, replicas, trainers, turns, seed, tail, train_s
) -> None:
    config = make_config(
        groups=groups,
        group_size=group_size,
        max_steps=max_steps,
        max_lag=max_lag,
        order=order,
        window_fraction=window_fraction,
    )
    env = FakeEnvironment(turns)
    made = train(
        config, [env], replicas=replicas, trainers=trainers, delays=Delays(seed=seed, tail=tail, train=train_s)
    )
    check_orders(made)
    check_rollouts(made, env)
    check_lags(made)


def check_orders(made: Run) -> None:
    steps = range(1, made.config.max_steps + 1)
    trained = [name for step in steps for name in (f"rl {step}", f"send {step}")]
    assert made.cluster.order_names() == ["send 0", *trained, "export", "stop"]
    for replica in range(made.loop.link.replicas):
        pulls = [d.version for r, d in made.cluster.decisions if r == replica and type(d).__name__ == "Pull"]
        assert pulls == [0, *steps]
    assert made.loop.versions.everywhere == made.config.max_steps


def check_rollouts(made: Run, env: FakeEnvironment) -> None:
    """Exactly the first max_steps · P tasks are attempted, each once per member; whole groups train, in one step."""
    o, trained = made.config.orchestrator, made.cluster.trained()
    everything = made.config.max_steps * o.batch_size // o.group_size
    members = {index: o.group_size for index in range(everything)}
    assert Counter(task.index for task in env.history) == members
    assert len(trained) == made.config.max_steps
    for documents in trained:
        assert set(Counter(tasks_of(documents)).values()) == {o.group_size}
        assert len(documents) == o.batch_size
    assert Counter(index for documents in trained for index in tasks_of(documents)) == members
    requests = [request for documents in trained for request in requests_of(documents)]
    assert sorted(requests) == sorted(made.cluster.requests) == sorted(made.cluster.answers)
    assert made.services.router.depth == [0] * made.loop.link.replicas
    assert made.loop.link.waiting == 0


def check_lags(made: Run) -> None:
    bound = bound_of(made)
    for step, documents in enumerate(made.cluster.trained(), start=1):
        batch = made.report.batches[step]
        admitted = {group.task.index: group.admitted_version for group in batch.groups}
        assert sorted(admitted) == sorted(set(tasks_of(documents)))
        for document in documents:
            versions = [made.cluster.versions(request) for request in requests_of([document])]
            oldest = min(v.min() for v in versions)
            assert admitted[tasks_of([document])[0]] <= oldest <= max(v.max() for v in versions) <= step - 1
        lags = batch.lags(step)
        stamped = np.concatenate([made.cluster.versions(r) for r in requests_of(documents)])
        assert sorted(lags) == sorted(step - 1 - stamped)
        if bound is not None:
            assert max(step - 1 - version for version in admitted.values()) <= bound
            assert lags.max() <= bound
        if made.config.orchestrator.max_lag == 0:
            assert (stamped == step - 1).all()


@pytest.mark.parametrize("order", ORDERS)
def test_slow_training_makes_rollouts_stale_when_they_may_run_ahead(order: str) -> None:
    made = train(make_config(max_steps=8, max_lag=1, order=order), delays=Delays(train=50.0))
    lags = [batch.lags(step).mean() for step, batch in made.report.batches.items()]
    assert lags[0] == 0
    assert min(lags[1:]) == 1.0


def test_training_and_sampling_overlap_when_they_may() -> None:
    """With rollouts and training of 10 s each: in turns without lag, beside each other with it."""
    delays = Delays(generate=100.0, tail=1e9, train=10.0, send=0.0, pull=0.0, probe=0.0)  # 0.1 × 100 s
    waits, runs_ahead = (train(make_config(max_steps=10, max_lag=lag), delays=delays).seconds for lag in (0, 1))
    assert waits == pytest.approx(200, rel=0.05)
    assert runs_ahead == pytest.approx(110, rel=0.05)


def test_the_trainer_takes_a_step_while_its_last_version_is_still_on_its_way() -> None:
    delays = Delays(generate=0.1, tail=1e9, train=10.0, send=0.0, pull=6.0, probe=3.0)
    made = train(make_config(max_steps=10, max_lag=3), delays=delays)
    assert made.seconds == pytest.approx(9 + 10 * 10 + 9, abs=2)  # version 0, the steps, the last version


def test_completion_order_does_not_wait_for_a_straggler_and_shows_its_true_lag() -> None:
    env = FakeEnvironment(pause=lambda task: 1000.0 * (task.index == 0))
    made = train(make_config(max_steps=6, groups=2, max_lag=1, order="completion"), [env], delays=Delays(tail=9.0))
    (late,) = [step for step, documents in enumerate(made.cluster.trained(), 1) if 0 in tasks_of(documents)]
    assert late == 6
    assert made.report.batches[6].lags(6).max() == 5


@pytest.mark.parametrize("order", ["fifo", "window"])
def test_other_orders_wait_for_a_straggler_and_keep_their_bound(order: str) -> None:
    env = FakeEnvironment(pause=lambda task: 1000.0 * (task.index == 0))
    config = make_config(max_steps=6, groups=4, max_lag=1, order=order, window_fraction=0.7)
    made = train(config, [env], delays=Delays(tail=9.0))
    check_lags(made)
    assert made.seconds > 1000
    (late,) = [step for step, documents in enumerate(made.cluster.trained(), 1) if 0 in tasks_of(documents)]
    assert late == (1 if order == "fifo" else 2)


def test_warm_up_comes_first_on_the_teachers_answers_and_then_the_optimizer_is_fresh() -> None:
    made = train(make_config(max_steps=2, warmup_steps=4), trainers=2)
    warmup = [f"warmup {step}" for step in range(1, 5)]
    assert made.cluster.order_names() == [
        *warmup,
        "fresh",
        "send 0",
        "rl 1",
        "send 1",
        "rl 2",
        "send 2",
        "export",
        "stop",
    ]
    assert [trained.step for trained in made.report.warmup] == [1, 2, 3, 4]
    assert [phase for phase, _ in made.report.started] == ["warmup", "rl"]
    taught = [tasks_of(documents) for documents in made.cluster.trained("warmup")]
    assert [sorted(tasks) for tasks in taught] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    answers = [document[2:] for documents in made.cluster.trained("warmup") for document in documents]
    assert {len(answer) for answer in answers} == {1, 2, 3}  # each has its own chance
    assert all((answer == TOOL).all() for answer in answers)  # nothing sampled: no engine has been asked yet
    first_request = made.cluster.decisions.index((0, made.cluster.requests[0]))
    assert type(made.cluster.decisions[first_request - 1][1]).__name__ == "Pull"


def test_warm_up_takes_turns_among_the_sources() -> None:
    envs = [FakeEnvironment(source="a"), FakeEnvironment(source="b")]
    taught: list[Task] = []
    for env in envs:
        env.teacher = lambda task, rng: taught.append(task) or (np.asarray([PROMPT]), np.asarray([TOOL]))
    train(make_config(max_steps=1, warmup_steps=2, sources=2), envs)
    assert [(task.source, task.index) for task in taught] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
        ("a", 2),
        ("b", 2),
    ]


def test_a_run_may_be_a_warm_up_alone() -> None:
    made = train(make_config(max_steps=0, warmup_steps=1, eval_tasks=1))
    assert made.cluster.order_names() == ["warmup 1", "fresh", "send 0", "export", "stop"]
    assert [step for step, _, _ in made.report.evaluations] == [0]


@pytest.mark.parametrize(("max_steps", "between"), [(5, [2, 4]), (4, [2])])
def test_evaluations_and_exports_come_when_the_config_says(max_steps: int, between: list[int]) -> None:
    config = make_config(max_steps=max_steps, eval_tasks=2, eval_interval=2, max_lag=1)
    config = replace(config, ckpt=CkptConfig(export_interval=2), output_dir="some/run")
    made = train(config)
    assert [step for step, _, _ in made.report.evaluations] == [0, *between, max_steps]
    folders = [orders[0].folder for orders in made.cluster.orders if isinstance(orders[0], Export)]
    names = [*(f"hf_step_{step:06d}" for step in between), "hf"]
    assert folders == [str(Path("some/run").resolve() / name) for name in names]
    for step, metrics, _ in made.report.evaluations:
        assert step <= metrics["eval/version_min"] <= metrics["eval/version_max"] <= step + 2
        assert step in between or metrics["eval/version_min"] == metrics["eval/version_max"] == step


def test_held_out_tasks_are_never_trained_on() -> None:
    made = train(make_config(max_steps=4, eval_tasks=3, eval_interval=1, max_lag=2))
    heldout = {id for id, request in made.cluster.requests.items() if request.tokens[0] >= HELDOUT}
    trained = {request for documents in made.cluster.trained() for request in requests_of(documents)}
    assert len(heldout) == 5 * 3 * 3  # evaluations × tasks × (greedy + 2 samples)
    assert len({made.cluster.requests[id].seed for id in heldout}) == len(heldout)
    assert trained == set(made.cluster.requests) - heldout


def test_sources_are_drawn_by_their_ratios_and_their_tasks_in_order() -> None:
    envs = [FakeEnvironment(source="one"), FakeEnvironment(source="two")]  # ratios 1 and 2
    made = train(make_config(max_steps=6, groups=2, group_size=2, sources=2), envs)
    attempts = [sorted(task.index for task in env.history) for env in envs]
    assert attempts == [sorted([*range(n), *range(n)]) for n in (4, 8)]
    assert len({request.seed for request in made.cluster.requests.values()}) == 24  # no seed serves both sources


def test_a_slow_replica_gets_less_work() -> None:
    config = make_config(max_steps=10, groups=4, group_size=2, max_lag=1)
    made = train(config, replicas=2, misbehaviour=Misbehaviour(slow={0: 20.0}), delays=Delays(tail=9.0))
    placed = Counter(replica for replica, d in made.cluster.decisions if isinstance(d, Generate))
    assert sum(len(documents) for documents in made.cluster.trained()) == 80
    assert placed[0] < placed[1]


def test_every_rollout_has_its_own_seed_which_does_not_depend_on_timing() -> None:
    def seeds(seed: int) -> dict[tuple[int, ...], set[int]]:
        made = train(make_config(max_steps=3, group_size=3), delays=Delays(seed=seed), replicas=1 + seed)
        found: dict[int, set[int]] = {}
        for request in made.cluster.requests.values():
            found.setdefault(int(request.tokens[0]), set()).add(request.seed)
        return found

    one, two = seeds(0), seeds(1)
    assert one == two
    assert len(set().union(*one.values())) == 3 * 2 * 3


def test_rewards_are_shuffled_anew_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    monkeypatch.setattr(loop, "make_batch", lambda *args: seeds.append(args[5]) or make_batch(*args))
    train(make_config(max_steps=4, shuffle_rewards=True))
    assert len(set(seeds)) == 4


def test_every_rollout_has_its_own_id_and_the_router_forgets_it_when_it_is_over(monkeypatch) -> None:
    placed: list[tuple[int, int]] = []
    forgotten: list[tuple[int, int]] = []

    class Watched(Router):
        def place(self, group_id: int, rollout_id: int, prompt_length: int) -> int:
            placed.append((group_id, rollout_id))
            return super().place(group_id, rollout_id, prompt_length)

        def forget_rollout(self, group_id: int, rollout_id: int) -> None:
            forgotten.append((group_id, rollout_id))
            super().forget_rollout(group_id, rollout_id)

    monkeypatch.setattr(fake_run, "Router", Watched)
    made = train(make_config(max_steps=4, groups=2, group_size=3, max_lag=1), replicas=2)
    assert len(placed) == len({rollout for _, rollout in placed}) == 4 * 2 * 3
    assert sorted(placed) == sorted(forgotten)
    assert not made.services.router._groups


def test_a_later_turn_extends_the_first_and_keeps_its_salt_with_noise_of_its_own() -> None:
    made = train(make_config(max_steps=6, max_lag=1), [FakeEnvironment(turns=3)], replicas=2)
    turns = [made.cluster.requests[i] for i in requests_of([made.cluster.trained()[-1][0]])]
    answers = [made.cluster.answers[i] for i in requests_of([made.cluster.trained()[-1][0]])]
    assert turns[0].salt == ""
    for before, answer, after in zip(turns, answers, turns[1:], strict=False):
        assert after.tokens.tolist() == [*before.tokens, *answer.tokens, TOOL]
        assert after.salt == answers[0].salt
    assert len({turn.seed for turn in turns}) == 3


def test_a_version_that_is_not_everywhere_is_not_admitted_under() -> None:
    """The slowest replica decides: with version v on only one of them, no group may count as started at v."""
    made = train(make_config(max_steps=4, max_lag=0), replicas=3, delays=Delays(pull=5.0))
    check_lags(made)
