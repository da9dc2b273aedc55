"""Real gloo processes: every layout of the trainer ranks computes what one rank computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.launch import torchrun
from tests.distributed.layout_worker import HALF, HALVES, LAYOUTS, TABLE, Run, make_models, runs, two_steps

TOLERANCE = 1e-5
OF_THE_LAYOUT = ("time/", "perf/", "tokens/packed")  # a rank with nothing to do brings a token of its own


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The models."""
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture(scope="module")
def single(folder) -> dict[tuple[str, str], dict[str, Any]]:
    """One rank, without FSDP and without processes, by model and case."""
    torch.set_num_threads(1)
    return {(model, case): two_steps(folder, (model, case, "one"), 0, None, None) for model, case in TABLE}


@pytest.fixture(scope="module")
def ranks(folder, tmp_path_factory) -> Callable[[int], list[dict[Run, dict[str, Any]]]]:
    """What so many ranks computed; each number is launched once."""

    @cache
    def launched(count: int) -> list[dict[Run, dict[str, Any]]]:
        out: Path = tmp_path_factory.mktemp("layouts")
        with torchrun("layout_worker.py", 1 + count, out, str(folder)) as started:
            assert started.wait(600) == [0], started.output()
        return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(count)]

    return launched


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= TOLERANCE * tensor.norm() + 1e-12, name


@pytest.mark.parametrize("run", runs(), ids="-".join)
def test_a_layout_equals_one_rank(single, ranks, run):
    expected = single[run[:2]]
    for results in ranks(LAYOUTS[run[2]].ranks):
        found = results[run]
        for metrics, one in zip(found["metrics"], expected["metrics"], strict=True):
            for name in (name for name in one if not name.startswith(OF_THE_LAYOUT)):
                assert metrics[name] == pytest.approx(one[name], rel=1e-5, abs=1e-9), name
        assert found["validation"] == pytest.approx(expected["validation"], rel=1e-5)
        assert_near(found["gradients"], expected["gradients"])
        assert_near(found["weights"], expected["weights"])
        assert found["table"] == expected["table"]
        for scores, one in zip(found["scores"], expected["scores"], strict=True):
            np.testing.assert_allclose(scores, one, rtol=0, atol=2e-5)


@pytest.mark.parametrize("run", [*runs(), *HALVES], ids="-".join)
def test_every_tensor_is_sent_whole_by_one_rank(ranks, run):
    """Out of any layout's shards, as every rank has it that asks for all."""
    found = ranks(LAYOUTS[run[2]].ranks)
    sent = {name: tensor for results in found for name, tensor in results[run]["sent"].items()}
    assert sum(len(results[run]["sent"]) for results in found) == len(sent)
    assert all(results[run]["sent"] for results in found)
    for results in found:
        assert {name for name, _, _ in results[run]["table"]} == set(sent)
        assert all(torch.equal(sent[name], tensor) for name, tensor in results[run]["weights"].items())


@pytest.mark.parametrize("run", HALVES, ids="-".join)
def test_bfloat16_stays_near_float32_on_layouts(single, ranks, run):
    expected = single[run[0].removesuffix(HALF), run[1]]
    for results in ranks(LAYOUTS[run[2]].ranks):
        for metrics, one in zip(results[run]["metrics"], expected["metrics"], strict=True):
            for name in ("loss", "entropy", "grad_norm"):
                assert metrics[name] == pytest.approx(one[name], rel=0.05), name
            assert metrics["tokens/trained"] == one["tokens/trained"]
        assert {tensor.dtype for tensor in results[run]["weights"].values()} == {torch.bfloat16}
