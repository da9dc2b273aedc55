"""The book of versions: publishing, waiting until everybody serves one, and the same-version check."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import TrainerConfig, TrainerModelConfig, WeightsConfig
from spmd_rl.orchestrator.versions import MismatchError, Versions, k3, probe_set
from spmd_rl.world.messages import Pull, Send
from tests.orchestrator.fake_cluster import BYTES, Delays, Misbehaviour
from tests.orchestrator.fake_run import PROBE, make_config, prepare, train
from tests.orchestrator.virtual_time import run


def test_k3_is_exp_d_minus_one_minus_d() -> None:
    trainer, engine = np.asarray([-1.0, -2.0, -1.0], np.float32), np.asarray([-1.0, -1.0, -2.0], np.float32)
    assert k3(trainer, engine) == pytest.approx([0.0, math.exp(-1), math.e - 2], rel=1e-12)
    assert k3(trainer, engine).dtype == np.float64


@settings(max_examples=100, deadline=None)
@given(st.floats(-15, 0, width=32), st.floats(-15, 0, width=32))
def test_k3_is_never_negative_and_zero_only_for_equal_logprobs(p: float, q: float) -> None:
    (value,) = k3(np.asarray([p], np.float32), np.asarray([q], np.float32))
    assert value >= 0
    assert (value == 0) == (p == q) or abs(p - q) < 1e-7


def test_k3_of_a_tiny_difference_does_not_drown_in_rounding() -> None:
    trainer = np.asarray([-1e-8], np.float32)
    half_square = float(trainer[0]) ** 2 / 2
    assert k3(trainer, np.zeros(1, np.float32)) == pytest.approx([half_square], rel=1e-3, abs=0)


def book(config=None, *, versions: int = 1, probe=PROBE, **options) -> tuple[list[dict[str, float]], list]:
    """Publish versions 0 … and report each; (metrics of each, all that was said)."""

    async def main():
        made = await prepare(config or make_config(), probe=probe, **options)
        for version in range(versions):
            if version:
                made.loop.trainers.train("rl", version, replace_rows(made))
            made.loop.versions.publish(version)
        try:
            metrics = [await made.loop.versions.report(version) for version in range(versions)]
        finally:
            await made.cluster.close()
        said = [orders[0] for orders in made.cluster.orders] + [decision for _, decision in made.cluster.decisions]
        return metrics, said

    return run(main())


def replace_rows(made):
    """A step without work, which must lie between two versions."""
    from spmd_rl.rollouts.packing import pack

    return [pack([], made.loop.link.trainers, made.config.seq_len)]


def shifted(by: float, rank: int | None = None, version: int | None = None) -> Misbehaviour:
    """An engine (all of them) whose logprobs are off by `by` (at one version)."""

    def disagree(r: int, v: int, logprobs: np.ndarray) -> np.ndarray:
        guilty = rank in (None, r) and version in (None, v)
        return logprobs + np.float32(by) if guilty else logprobs

    return Misbehaviour(disagree=disagree)


def test_publishing_tells_every_trainer_and_every_replica_with_the_same_probe() -> None:
    _, said = book(replicas=3, trainers=2)
    (send,) = [message for message in said if isinstance(message, Send)]
    pulls = [message for message in said if isinstance(message, Pull)]
    assert [pull.version for pull in pulls] == [0, 0, 0]
    assert all(pull.probe == send.probe == PROBE for pull in pulls)


def test_agreement_is_zero_over_all_tokens_of_all_replicas() -> None:
    ((metrics,), _) = book(replicas=3)
    assert metrics["mismatch/k3_mean"] == metrics["mismatch/k3_max"] == metrics["mismatch/above_limit"] == 0
    assert metrics["mismatch/tokens"] == 3 * (4 + 3)


def test_figures_of_a_pull_are_those_of_the_slowest_replica() -> None:
    ((metrics,), _) = book(replicas=2, delays=Delays(pull=2.0, send=0.5))
    assert metrics["weights/bytes"] == BYTES
    assert metrics["weights/pull_s"] == 4.0  # replica i takes (1 + i) · 2 s
    assert metrics["weights/stall_s"] == pytest.approx(0.4)
    assert metrics["weights/gather_s"] == 0.5


def test_a_mismatch_is_averaged_over_replicas_and_its_maximum_shown() -> None:
    ((metrics,), _) = book(replicas=2, misbehaviour=shifted(1.0, rank=3))
    one = math.exp(-1)  # d = trainer − engine = −1
    assert metrics["mismatch/k3_mean"] == pytest.approx(one / 2)
    assert metrics["mismatch/k3_max"] == pytest.approx(one)
    assert metrics["mismatch/above_limit"] == 1


def test_many_good_replicas_do_not_hide_a_bad_one() -> None:
    bad = shifted(2e-4, rank=5)  # k3 2e-8 on its own, 2.5e-9 over all eight
    ((metrics,), _) = book(replicas=8, misbehaviour=bad)
    assert metrics["mismatch/k3_mean"] < 1e-8
    assert metrics["mismatch/above_limit"] == 1
    with pytest.raises(MismatchError, match="rank 5"):
        book(make_config(weights=WeightsConfig(strict=True)), replicas=8, misbehaviour=bad)


@pytest.mark.parametrize(
    ("dtype", "max_k3", "shift", "above"),
    [
        ("float32", 0.0, 1e-3, 1),  # k3 5e-7 > 1e-8
        ("float32", 0.0, 5e-5, 0),  # 1e-9
        ("bfloat16", 0.0, 1e-1, 0),  # 5e-3 < 1e-2
        ("bfloat16", 0.0, 2e-1, 1),
        ("bfloat16", 1e-4, 1e-1, 1),
        ("float32", 1e-2, 1e-1, 0),
    ],
)
def test_the_limit_follows_the_dtype_unless_it_is_set(dtype: str, max_k3: float, shift: float, above: int) -> None:
    config = make_config(weights=WeightsConfig(max_k3=max_k3))
    config = replace(config, trainer=TrainerConfig(model=TrainerModelConfig(dtype=dtype)))
    ((metrics,), _) = book(config, misbehaviour=shifted(shift))
    assert metrics["mismatch/above_limit"] == above


def test_a_strict_limit_names_the_version_and_the_guilty_rank() -> None:
    config = make_config(weights=WeightsConfig(strict=True))
    with pytest.raises(MismatchError, match=r"policy version 1: the engine on rank 3 .* over 7 tokens \(limit 1e-08\)"):
        book(config, versions=3, replicas=3, misbehaviour=shifted(0.5, rank=3, version=1))


def test_of_several_guilty_ranks_the_worst_is_named() -> None:
    bad = Misbehaviour(disagree=lambda rank, version, logprobs: logprobs + np.float32(rank % 3))  # 2, 0, 1 on 2, 3, 4
    with pytest.raises(MismatchError, match="rank 2"):
        book(make_config(weights=WeightsConfig(strict=True)), replicas=3, misbehaviour=bad)


def test_nan_is_above_every_limit() -> None:
    nan = shifted(math.nan, rank=3)
    ((metrics,), _) = book(make_config(weights=WeightsConfig(max_k3=1e30)), replicas=2, misbehaviour=nan)
    assert metrics["mismatch/above_limit"] == 1
    with pytest.raises(MismatchError, match="rank 3"):
        book(make_config(weights=WeightsConfig(max_k3=1e30, strict=True)), replicas=2, misbehaviour=nan)


def test_strict_is_silent_below_the_limit() -> None:
    metrics, _ = book(make_config(weights=WeightsConfig(strict=True)), versions=3, replicas=2)
    assert [m["mismatch/above_limit"] for m in metrics] == [0, 0, 0]


def test_without_a_probe_there_is_nothing_to_say_about_a_mismatch() -> None:
    metrics, _ = book(probe=[], versions=3, replicas=2)
    assert all(m["weights/bytes"] == BYTES for m in metrics)
    assert not any(key.startswith("mismatch") for m in metrics for key in m)


def test_a_version_is_everywhere_when_the_last_replica_serves_it() -> None:
    async def main() -> tuple[float, float]:
        made = await prepare(make_config(), replicas=3, delays=Delays(pull=10.0, probe=5.0, send=1.0))
        versions: Versions = made.loop.versions
        versions.publish(0)
        assert versions.everywhere == -1
        await versions.wait_everywhere(0)
        everywhere = asyncio.get_running_loop().time()
        assert versions.everywhere == 0
        await versions.report(0)
        await made.cluster.close()
        return everywhere, asyncio.get_running_loop().time()

    assert run(main()) == (pytest.approx(31), pytest.approx(36))  # replica i takes (1 + i) · 10 s, then the probe


def test_a_version_is_judged_when_the_trainer_has_scored_too() -> None:
    ((metrics,), _) = book(replicas=2, delays=Delays(score=1000.0))
    assert metrics["mismatch/tokens"] == 14
    assert book(probe=[], delays=Delays(score=1000.0))[0][0]["weights/gather_s"] == 0.1


def test_a_mismatch_in_the_middle_of_a_strict_run_ends_it() -> None:
    config = make_config(max_steps=5, weights=WeightsConfig(strict=True))
    with pytest.raises(ExceptionGroup) as caught:
        train(config, replicas=2, misbehaviour=shifted(0.5, version=2))
    (error,) = caught.value.exceptions
    assert isinstance(error, MismatchError)


def test_a_mismatch_of_a_lenient_run_is_reported_with_its_step() -> None:
    made = train(make_config(max_steps=5), replicas=2, misbehaviour=shifted(0.5, version=2))
    above = {step: pull["mismatch/above_limit"] for step, pull in made.report.pulls.items()}
    assert above == {1: 0, 2: 1, 3: 0, 4: 0, 5: 0}


def test_a_probe_set_is_made_of_prompts_of_one_length() -> None:
    probe = probe_set([np.asarray([1, 2, 3]), np.arange(9)], 7)
    assert [sequence.tolist() for sequence in probe] == [[1, 2, 3, 1, 2, 3, 1], [0, 1, 2, 3, 4, 5, 6]]
    assert all(sequence.dtype == np.int32 for sequence in probe)
    assert probe_set([], 7) == []
