"""The chunked LM head equals plain torch in values and gradients, and never makes a [T, V] tensor."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_rl.models.lm_head import token_logprobs


def plain(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, temperatures_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logp_TV = torch.log_softmax((hidden_TD @ weight_VD.T).float() / temperatures_T[:, None], dim=-1)
    return logp_TV.gather(1, targets_T[:, None]).squeeze(1), -(logp_TV.exp() * logp_TV).sum(-1)


def inputs(tokens: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens * 1000 + vocab)
    hidden_TD = torch.randn(tokens, 12, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(vocab, 12, generator=generator).to(dtype).requires_grad_()
    targets_T = torch.randint(0, vocab, (tokens,), generator=generator, dtype=torch.int32)
    temperatures_T = torch.rand(tokens, generator=generator) + 0.5
    return hidden_TD, weight_VD, targets_T, temperatures_T


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 40),
    vocab=st.integers(2, 99),
    chunk=st.integers(1, 50),
    used=st.sampled_from(["logprobs", "entropies", "both"]),
)
def test_values_and_gradients_equal_plain_torch(tokens: int, vocab: int, chunk: int, used: str) -> None:
    hidden_TD, weight_VD, targets_T, temperatures_T = inputs(tokens, vocab)
    mine = token_logprobs(hidden_TD, weight_VD, targets_T, temperatures_T, chunk)
    theirs = plain(hidden_TD, weight_VD, targets_T.long(), temperatures_T)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)

    scale_T = torch.linspace(-1, 2, tokens)
    chosen = {"logprobs": [0], "entropies": [1], "both": [0, 1]}[used]
    leaves = (hidden_TD, weight_VD)
    got = torch.autograd.grad(sum((scale_T * mine[i]).sum() for i in chosen), leaves)
    expected = torch.autograd.grad(sum((scale_T * theirs[i]).sum() for i in chosen), leaves)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [2, 5, 8])
def test_gradcheck(chunk: int) -> None:
    hidden_TD, weight_VD, targets_T, temperatures_T = inputs(5, 7, torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets_T, temperatures_T, chunk), (hidden_TD, weight_VD)
    )


def test_a_second_backward_gives_the_same_gradient() -> None:
    hidden_TD, weight_VD, targets_T, temperatures_T = inputs(9, 11)
    loss = sum(out.sum() for out in token_logprobs(hidden_TD, weight_VD, targets_T, temperatures_T, 4))
    first = torch.autograd.grad(loss, (hidden_TD, weight_VD), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden_TD, weight_VD))
    torch.testing.assert_close(first, second, atol=0, rtol=0)


def test_bfloat16_rounds_logits_only() -> None:
    hidden_TD, weight_VD, targets_T, temperatures_T = inputs(17, 33, torch.bfloat16)
    mine = token_logprobs(hidden_TD, weight_VD, targets_T, temperatures_T, 4)
    assert [out.dtype for out in mine] == [torch.float32, torch.float32]
    torch.testing.assert_close(mine, plain(hidden_TD, weight_VD, targets_T.long(), temperatures_T))
    (mine[0].sum() + mine[1].sum()).backward()
    wide = [x.detach().float().requires_grad_() for x in (hidden_TD, weight_VD)]
    sum(out.sum() for out in plain(*wide, targets_T.long(), temperatures_T)).backward()
    for narrow, exact in zip((hidden_TD, weight_VD), wide, strict=True):
        assert narrow.grad.dtype == torch.bfloat16
        error = (narrow.grad.float() - exact.grad).norm() / exact.grad.norm()
        assert error < 2e-2


@pytest.mark.parametrize("scale", [1e3, 1e30])
def test_extreme_logits_stay_finite(scale: float) -> None:
    hidden_TD = (torch.eye(3) * scale).requires_grad_()
    outputs = token_logprobs(hidden_TD, torch.eye(3), torch.tensor([0, 0, 2]), torch.ones(3), 2)
    sum(out.sum() for out in outputs).backward()
    assert all(torch.isfinite(x).all() for x in (*outputs, hidden_TD.grad))


class Watch(TorchDispatchMode):
    """Records the most elements that any result had, and how many results of `watched` elements lived at once."""

    def __init__(self, watched: int) -> None:
        super().__init__()
        self.watched, self.elements, self.at_once, self._seen = watched, 0, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
                if value.numel() == self.watched:
                    self._seen.append(weakref.ref(value))
        alive = [tensor for ref in self._seen if (tensor := ref()) is not None]
        self.at_once = max(self.at_once, len({tensor.data_ptr() for tensor in alive}))
        return result


@pytest.mark.parametrize("used", [0, 1])
def test_no_tensor_is_larger_than_a_chunk_of_logits_and_three_of_these_live_at_once(used: int) -> None:
    tokens, vocab, chunk = 64, 500, 8
    hidden_TD, weight_VD, targets_T, temperatures_T = inputs(tokens, vocab)
    with Watch(chunk * vocab) as watch:
        token_logprobs(hidden_TD, weight_VD, targets_T, temperatures_T, chunk)[used].sum().backward()
    assert watch.elements == max(chunk * vocab, vocab * 12)
    assert 2 <= watch.at_once <= 3


def test_a_chunk_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="lm_head_chunk"):
        token_logprobs(*inputs(3, 5), 0)
