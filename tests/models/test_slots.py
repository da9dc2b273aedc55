"""Spreading and collecting: equal to plain indexing, and each the other's gradient."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.models.slots import collect, spread

D = 3


@given(st.integers(0, 6), st.integers(1, 4), st.data())
def test_they_are_plain_indexing_and_each_others_gradient(tokens: int, each: int, data: st.DataObject) -> None:
    slots = data.draw(st.permutations(range(tokens * each)))
    slot_S = torch.tensor(slots[: data.draw(st.integers(0, len(slots)))], dtype=torch.int64)
    x_TD = torch.randn(tokens, D, dtype=torch.float64, requires_grad=True)
    y_SD = torch.randn(len(slot_S), D, dtype=torch.float64, requires_grad=True)
    spread_SD, collected_TD = spread(x_TD, slot_S, each), collect(y_SD, slot_S, tokens, each)
    assert torch.equal(spread_SD, x_TD[slot_S // each])
    torch.testing.assert_close(collected_TD, torch.zeros_like(x_TD).index_add(0, slot_S // each, y_SD))
    assert torch.autograd.gradcheck(lambda x: spread(x, slot_S, each), x_TD)
    assert torch.autograd.gradcheck(lambda y: collect(y, slot_S, tokens, each), y_SD)


def test_a_tokens_slots_are_added_in_order_whatever_order_they_come_in() -> None:
    y_SD = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])  # rounding would tell
    expected_TD = collect(y_SD, torch.arange(4), 1, 4)
    for order in ([3, 2, 1, 0], [2, 0, 3, 1]):
        assert torch.equal(collect(y_SD[order], torch.tensor(order), 1, 4), expected_TD)
