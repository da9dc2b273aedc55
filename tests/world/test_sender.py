"""The trainer's end of weight sync, alone in its group: what is not the plan is named before anything is complete.

What arrives is in tests/distributed/test_world_ranks.py.
"""

from __future__ import annotations

import pytest
import torch

from spmd_rl.world.buckets import Plan, WeightsError
from spmd_rl.world.weights import Sender

TABLE = [("embed", (4, 3), "float32"), ("layers.0.weight", (5, 3), "float32"), ("lm_head", (4, 3), "float32")]
PATIENCE_S = 30.0


@pytest.fixture(params=[0, 1], ids=["this rank's bucket", "another rank's bucket"])
def sender(request, group) -> Sender:
    """All three tensors in one bucket, which the first of two trainer ranks sends."""
    errors = []
    sender = Sender(Plan.build(TABLE, 2**20, 2), request.param, group, torch.device("cpu"), errors.append)
    yield sender
    assert errors == []


def tensors(*changes: tuple[int, str, tuple[int, ...]]) -> list[tuple[str, torch.Tensor]]:
    """The table's tensors, with some replaced by (position, name, shape)."""
    given = [(name, shape) for name, shape, _ in TABLE]
    for position, name, shape in changes:
        given[position] = (name, shape)
    return [(name, torch.ones(shape)) for name, shape in given]


def test_the_whole_plan_is_sent_as_often_as_asked(sender):
    for version in (0, 1, 2):
        sender.send(version, tensors(), PATIENCE_S)
    sender.send(3, reversed(tensors()), PATIENCE_S)  # the plan says the places, not the order
    sender.close(PATIENCE_S)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (tensors()[:-1], r"1 tensors were not given for version 4: \['lm_head'\]"),
        ([], r"3 tensors were not given for version 4: \['embed', 'layers\.0\.weight', 'lm_head'\]"),
        (tensors((2, "embed", (4, 3))), r"'embed' is not in the plan, or was given twice"),
        ([*tensors(), ("extra.bias", torch.ones(1))], r"'extra\.bias' is not in the plan"),
        (tensors((1, "layers.0.weight", (3, 5))), r"'layers\.0\.weight' has shape \(3, 5\), the plan says \(5, 3\)"),
        (tensors((1, "layers.0.weight", (1, 3))), r"'layers\.0\.weight' has shape \(1, 3\)"),  # it would broadcast
    ],
    ids=["missing", "all missing", "repeated", "unknown", "transposed", "other shape"],
)
def test_what_is_not_the_plan_is_named(sender, given, says):
    sender.send(3, tensors(), PATIENCE_S)
    with pytest.raises(WeightsError, match=says):
        sender.send(4, given, PATIENCE_S)


def test_a_version_that_nobody_takes_is_an_error_and_not_a_hang(sender):
    with pytest.raises(WeightsError, match="not given"):
        sender.send(1, tensors()[:-1], PATIENCE_S)  # this version never ends
    with pytest.raises(WeightsError, match=r"was not taken by the inference ranks within 0\.05 s"):
        sender.send(2, tensors(), 0.05)


def test_a_thread_that_fails_says_so(group):
    errors = []
    sender = Sender(Plan.build(TABLE, 2**20, 1), 0, group, torch.device("cpu"), errors.append)
    sender.send(2**63, tensors(), PATIENCE_S)  # no version has such a number
    sender._thread.join(PATIENCE_S)
    (error,) = errors
    assert "verflow" in str(error)
