"""Real gloo processes: tokens that travel to their experts come back with what one process computes."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.exchange_worker import CASES, layer, run, tokens
from tests.distributed.launch import torchrun

RANKS = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("exchange")
    with torchrun("exchange_worker.py", RANKS, out) as started:
        assert started.wait(200) == [0], started.output()
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]


def joined(ranks: list[dict], key: tuple[str, str]) -> dict[str, torch.Tensor]:
    """Tokens and experts of all ranks one after the other, the router's gradient as a sum."""
    parts = [results[key] for results in ranks]
    return {
        name: sum(part[name] for part in parts) if name == "gate.weight" else torch.cat([part[name] for part in parts])
        for name in parts[0]
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("backend", "tolerance"),
    [("torch", 1e-5), ("torch bfloat16", 2e-2), ("deepep", 2e-2), ("deepep in pieces", 2e-2)],
)
def test_ranks_equal_one_process(ranks, backend, tolerance, case):
    torch.set_num_threads(1)
    dtype = torch.float32 if backend == "torch" else torch.bfloat16
    expected = run(layer(dtype), case, torch.cat([tokens(case, rank, dtype) for rank in range(RANKS)]))
    found = joined(ranks, (backend, case))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == dtype
        assert (found[name].float() - tensor.float()).norm() <= tolerance * tensor.float().norm(), name


def test_layers_share_a_buffer(ranks):
    assert [results["buffers"] for results in ranks] == [2] * RANKS  # one by each maker, for all its layers
