"""The command that checks users' own losses and advantages: good ones pass, and each check can fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import check_loss

ROOT = Path(__file__).parents[2]
LOSSES = """
import torch
def good(i): return -i.pg_weight_T * i.log_ratio_T.clamp(max=20).exp()
def stopped(i): return -i.pg_weight_T * i.log_ratio_T.detach().clamp(max=1).exp() * i.logprobs_T
def scalar(i): return good(i).sum()
def text(i): return "x"
def constant(i): return i.pg_weight_T.clone()
def row_mean(i): return good(i) / len(i.logprobs_T)
def position(i): return good(i) * torch.arange(len(i.logprobs_T))
def squared(i): return -i.pg_weight_T.abs() * i.pg_weight_T * i.logprobs_T
def weightless(i): return good(i) + 1e-3 * i.log_ratio_T ** 2
def prompt(i): return good(i) * (1 + i.logprobs_T[~i.mask_T].mean())
def overflows(i): return -i.pg_weight_T * (2 * i.log_ratio_T).exp()
def raises(i): raise RuntimeError("no")
"""
ADVANTAGES = """
import numpy as np
def good(r, group): return r - r.mean()
def short(r, group): return r[:-1]
def divides(r, group): return (r - r.mean()) / r.std()
def first(r, group): return r - r[0]
def plain(r, group): return r
"""


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    def run(kind: str, name: str) -> tuple[int, str]:
        (tmp_path / f"{kind}.py").write_text(LOSSES if kind == "loss" else ADVANTAGES)
        monkeypatch.setattr(sys, "argv", ["check_loss.py", f"{tmp_path / kind}.py:{name}", "--kind", kind])
        code = check_loss.main()
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def failures(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("FAILED")]


@pytest.mark.parametrize("name", ["good", "stopped"])
def test_good_losses(said, name):
    code, text = said("loss", name)
    assert code == 0 and not failures(text) and text.count("ok") >= 12
    assert ("note" in text) == (name == "stopped")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("scalar", "expected (15,), got ()"),
        ("text", "got str"),
        ("constant", "all zero: nothing would be learned"),
        ("row_mean", "documents apart or in one row: same loss"),
        ("position", "documents in another order: same gradient"),
        ("squared", "twice the weight is twice the loss"),
        ("weightless", "no weight: no gradient"),
        ("prompt", "tokens that were not sampled: no"),
        ("overflows", "log-ratio +80"),
        ("raises", "it raised RuntimeError: no"),
    ],
)
def test_bad_losses(said, name, says):
    code, text = said("loss", name)
    assert code == 1 and any(says in line for line in failures(text)), text


def test_good_advantages(said):
    assert said("advantage", "good")[0] == 0
    code, text = said("advantage", "plain")
    assert code == 0 and "note" in text and "right without a baseline" in text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("short", "one finite number per rollout"),
        ("divides", "rewards [0.0, 0.0]"),
        ("first", "the order of rollouts does not matter"),
        ("missing", "has no 'missing'"),
    ],
)
def test_bad_advantages(said, name, says):
    code, text = said("advantage", name)
    assert code == 1 and says in text


@pytest.mark.parametrize(("kind", "name"), [("loss", "tanh_ratio"), ("advantage", "ranks")])
def test_the_examples_pass(monkeypatch, capsys, kind, name):
    monkeypatch.setattr(sys, "argv", ["check_loss.py", f"{ROOT}/configs/own_loss.py:{name}", "--kind", kind])
    assert check_loss.main() == 0, capsys.readouterr().out
