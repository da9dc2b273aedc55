"""The trainer's end of weight sync, alone in its group: what is not the plan is named before anything is complete.

What arrives is in tests/distributed/test_world_ranks.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch

from spmd_rl.world.buckets import Plan, WeightsError
from spmd_rl.world.weights import Sender, Write

TABLE = [("embed", (4, 3), "float32"), ("layers.0.weight", (5, 3), "float32"), ("lm_head", (4, 3), "float32")]
NAMES = [name for name, _, _ in TABLE]
PATIENCE_S = 30.0


@pytest.fixture(params=[0, 1], ids=["this rank's bucket", "another rank's bucket"])
def index(request) -> int:
    """All three tensors are in one bucket, which the first of two trainer ranks sends: which rank this one is."""
    return request.param


@pytest.fixture
def sender(index, group) -> Iterator[Sender]:
    errors = []
    yield Sender(Plan.build(TABLE, 2**20, 2), index, group, torch.device("cpu"), errors.append)
    assert errors == []


def writes(names: list[str]) -> Write:
    """Fills tensors with ones; says these names, of those that it is asked for and of others."""

    def write(views: Mapping[str, torch.Tensor]) -> Iterator[str]:
        for view in views.values():
            view.fill_(1)
        yield from (name for name in names if name in views or name not in NAMES)

    return write


def test_the_whole_plan_is_sent_as_often_as_asked(sender):
    for version in (0, 1, 2):
        sender.send(version, writes(NAMES), PATIENCE_S)
    sender.send(3, writes(NAMES[::-1]), PATIENCE_S)  # the plan says the places, not the order
    sender.close(PATIENCE_S)


def test_a_rank_is_asked_for_the_tensors_that_it_sends(sender, index):
    asked = {}

    def write(views: Mapping[str, torch.Tensor]) -> list[str]:
        asked.update({name: (tuple(view.shape), view.dtype) for name, view in views.items()})
        return list(views)

    sender.send(0, write, PATIENCE_S)
    sender.close(PATIENCE_S)
    assert asked == ({name: (shape, torch.float32) for name, shape, _ in TABLE} if index == 0 else {})


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (NAMES[:-1], r"1 tensors were not written for version 4: \['lm_head'\]"),
        ([], r"3 tensors were not written for version 4: \['embed', 'layers\.0\.weight', 'lm_head'\]"),
        (["embed", *NAMES], r"'embed' is not one that this rank sends, or was written twice"),
        ([*NAMES, "extra.bias"], r"'extra\.bias' is not one that this rank sends"),
    ],
    ids=["missing", "all missing", "repeated", "unknown"],
)
def test_what_is_not_the_plan_is_named(sender, index, names, says):
    sender.send(3, writes(NAMES), PATIENCE_S)
    if index == 0 or "extra.bias" in names:
        with pytest.raises(WeightsError, match=says):
            sender.send(4, writes(names), PATIENCE_S)
    else:
        sender.send(4, writes(names), PATIENCE_S)  # nothing of it is this rank's


def test_a_version_that_nobody_takes_is_an_error_and_not_a_hang(group):
    sender = Sender(Plan.build(TABLE, 2**20, 2), 0, group, torch.device("cpu"), print)
    with pytest.raises(WeightsError, match="not written"):
        sender.send(1, writes(NAMES[:-1]), PATIENCE_S)  # this version never ends
    with pytest.raises(WeightsError, match=r"was not taken by the inference ranks within 0\.05 s"):
        sender.send(2, writes(NAMES), 0.05)


def test_a_thread_that_fails_says_so(group):
    errors = []
    sender = Sender(Plan.build(TABLE, 2**20, 1), 0, group, torch.device("cpu"), errors.append)
    sender.send(2**63, writes(NAMES), PATIENCE_S)  # no version has such a number
    sender._thread.join(PATIENCE_S)
    (error,) = errors
    assert "verflow" in str(error)
