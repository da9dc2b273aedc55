"""Every back end that runs here equals plain softmax attention per document, forward and backward."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.models.attention import attend, resolve_backend
from spmd_rl.models.packed import Documents

RUNNABLE = ["sdpa"] + (["varlen"] if torch.cuda.is_available() else [])


def plain(q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor, cu_seqlens: np.ndarray) -> torch.Tensor:
    """Textbook attention, one document and one head group at a time."""
    outputs = []
    share = q_THd.shape[1] // k_TKd.shape[1]
    for start, end in pairwise(cu_seqlens):
        q, k, v = q_THd[start:end], k_TKd[start:end], v_TKd[start:end]
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        scores_Hqk = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        future_qk = torch.ones(end - start, end - start, device=q.device).triu(1).bool()
        weights_Hqk = scores_Hqk.masked_fill(future_qk, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights_Hqk, v))
    return torch.cat(outputs)


@pytest.mark.parametrize("backend", RUNNABLE)
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    head_dim=st.sampled_from([4, 8, 24]),
)
def test_attend_equals_plain_attention(backend: str, lengths: list[int], heads: tuple[int, int], head_dim: int) -> None:
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    on_gpu = backend != "sdpa"
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    documents = Documents.build(cu_seqlens, device)
    torch.manual_seed(0)
    inputs = [torch.randn(sum(lengths), n, head_dim, device=device) for n in (heads[0], heads[1], heads[1])]
    grad_THd = torch.randn_like(inputs[0])

    mine = [x.clone().to(dtype).requires_grad_() for x in inputs]
    out_THd = attend(*mine, documents, backend)
    out_THd.backward(grad_THd.to(dtype))
    theirs = [x.clone().requires_grad_() for x in inputs]
    expected_THd = plain(*theirs, cu_seqlens)
    expected_THd.backward(grad_THd)

    tolerance = 5e-2 if on_gpu else 1e-5
    torch.testing.assert_close(out_THd.float(), expected_THd, atol=tolerance, rtol=tolerance)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad.float(), b.grad, atol=tolerance, rtol=tolerance)


def test_documents_do_not_see_each_other() -> None:
    documents = Documents.build(np.array([0, 7, 12, 31], dtype=np.int32))
    q, k, v = torch.randn(31, 4, 8), torch.randn(31, 2, 8), torch.randn(31, 2, 8)
    before = attend(q, k, v, documents, "sdpa")
    k[7:12] += 1.0
    v[7:12] -= 1.0
    after = attend(q, k, v, documents, "sdpa")
    assert torch.equal(before[:7], after[:7])
    assert torch.equal(before[12:], after[12:])
    assert not torch.equal(before[7:12], after[7:12])


def test_auto_is_sdpa_on_the_cpu() -> None:
    assert resolve_backend("auto", "cpu") == "sdpa"


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flash_attention_4", "varlen"])
def test_a_back_end_that_cannot_run_says_what_it_needs(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*needs a CUDA device.*use sdpa"):
        resolve_backend(name, "cpu")


@pytest.mark.parametrize(
    ("backend", "module"), [("flash_attention_3", "flash_attn_interface"), ("flash_attention_4", "flash_attn.cute")]
)
def test_newer_flash_attention_is_called_with_the_bounds_of_documents(monkeypatch, backend: str, module: str) -> None:
    """A stand-in that attends by what it is told, and returns the denominators as well."""
    cu_seqlens = np.array([0, 7, 12, 31], dtype=np.int32)
    documents, told = Documents.build(cu_seqlens), []

    def flash_attn_varlen_func(q, k, v, **about):  # type: ignore[no-untyped-def]
        told.append(about)
        return plain(q.float(), k.float(), v.float(), about["cu_seqlens_k"].numpy()).to(q.dtype), None

    monkeypatch.setitem(sys.modules, module, SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    q, k, v = (torch.randn(31, heads, 8).bfloat16() for heads in (4, 2, 2))
    torch.testing.assert_close(attend(q, k, v, documents, backend), plain(q, k, v, cu_seqlens), atol=2e-2, rtol=2e-2)
    assert told[0]["causal"] is True and told[0]["cu_seqlens_q"] is documents.cu_seqlens
    assert (told[0]["max_seqlen_q"], told[0]["max_seqlen_k"]) == (19, 19)


def test_what_to_install_is_said() -> None:
    with pytest.raises(ValueError, match=r"a CUDA device and flash-attention 3 \(build the folder hopper/"):
        resolve_backend("flash_attention_3", "cpu")
    with pytest.raises(ValueError, match="pip install flash-attn-4"):
        resolve_backend("flash_attention_4", "cpu")


def test_unknown_back_end_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown attention back end 'flash3'; choose auto, sdpa"):
        resolve_backend("flash3", "cpu")
