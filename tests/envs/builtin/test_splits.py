"""Where tasks come from: held out by content, the same for the same seed, an error where a side is empty."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.envs.builtin.splits import Drawn, Listed, canonical, fraction

NUMBERS = [{"n": n} for n in range(50)]


def draw(rng: np.random.Generator) -> dict[str, Any]:
    return {"n": int(rng.integers(500))}


def listed(seed: int = 0, heldout: float = 0.2, contents: list[dict[str, Any]] = NUMBERS) -> Listed:
    return Listed("numbers", seed, heldout, contents)


@given(st.integers(0, 2**40), st.integers(0, 10**9))
def test_any_index_has_the_same_task_again_on_its_own_side(seed: int, index: int) -> None:
    for make in (listed, lambda s: Drawn("numbers", s, 0.2, draw)):
        train, heldout = (make(seed).task(index, split) for split in ("train", "heldout"))
        assert train == make(seed).task(index, "train")
        assert heldout == make(seed + 1).task(index, "heldout")
        assert train.index == heldout.index == index
        assert fraction(canonical(train.data)) >= 0.2 > fraction(canonical(heldout.data))


def test_training_tasks_depend_on_the_seed() -> None:
    for make in (listed, lambda s: Drawn("numbers", s, 0.2, draw)):
        first, second = ([make(seed).task(i, "train").data for i in range(20)] for seed in (0, 1))
        assert first != second


def test_a_list_comes_whole_in_every_epoch() -> None:
    tasks = listed()
    train, heldout = tasks.contents["train"], tasks.contents["heldout"]
    assert sorted(c["n"] for c in train + heldout) == list(range(50))
    epochs = [[tasks.task(e * len(train) + i, "train").data["n"] for i in range(len(train))] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(c["n"] for c in train)
    assert epochs[0] != epochs[1]
    assert [tasks.task(i, "heldout").data for i in range(len(heldout) + 1)] == [*heldout, heldout[0]]


def test_contents_with_one_key_stay_together() -> None:
    tasks = Listed("numbers", 0, 0.3, NUMBERS, key=lambda content: str(content["n"] % 10))
    sides = {split: {c["n"] % 10 for c in tasks.contents[split]} for split in ("train", "heldout")}
    assert not sides["train"] & sides["heldout"]
    assert len(tasks.contents["heldout"]) == 5 * len(sides["heldout"])
    drawn = Drawn("numbers", 0, 0.3, draw, key=lambda content: str(content["n"] % 10))
    kinds = [{drawn.task(i, split).data["n"] % 10 for i in range(200)} for split in ("train", "heldout")]
    assert kinds == [sides["train"], sides["heldout"]]


def test_a_short_list_has_something_on_both_sides() -> None:
    for count in range(2, 12):
        for share in (0.001, 0.999):
            tasks = listed(heldout=share, contents=NUMBERS[:count])
            assert min(len(tasks.contents["train"]), len(tasks.contents["heldout"])) == 1
    assert all(listed(heldout=share, contents=[{"n": 1}]).contents["train"] for share in (0.0, 0.001, 0.999))


def test_a_share_is_about_what_it_says() -> None:
    held = len(listed(heldout=0.3, contents=[{"n": n} for n in range(2000)]).contents["heldout"])
    assert held / 2000 == pytest.approx(0.3, abs=0.04)


@pytest.mark.parametrize(("share", "split"), [(0.0, "heldout"), (1.0, "train")])
def test_an_empty_side_is_named(share: float, split: Any) -> None:
    for tasks in (listed(heldout=share), Drawn("numbers", 0, share, draw)):
        with pytest.raises(ValueError, match=f"numbers: .*{'held out' if split == 'heldout' else 'in training'}; make"):
            tasks.task(0, split)
    single = Drawn("numbers", 0, 0.5, lambda rng: {"n": 1})
    empty: Any = "train" if single.side({"n": 1}) == "heldout" else "heldout"
    with pytest.raises(ValueError, match=r"heldout = 0\.5, and no task that was drawn"):
        single.task(0, empty)


@pytest.mark.parametrize("share", [-0.1, 1.1, "half", True])
def test_a_share_that_is_none_is_named(share: Any) -> None:
    for make in (lambda: listed(heldout=share), lambda: Drawn("numbers", 0, share, draw)):
        with pytest.raises(ValueError, match="numbers: heldout = "):
            make()


def test_the_split_is_the_same_in_every_process() -> None:
    code = (
        "from spmd_rl.envs.builtin.splits import Listed\n"
        "print([c['n'] for c in Listed('numbers', 0, 0.2, [{'n': n} for n in range(50)]).contents['heldout']])"
    )
    env = {"PYTHONHASHSEED": "7", "PYTHONPATH": "."}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert said.strip() == str([c["n"] for c in listed().contents["heldout"]])


def test_a_task_is_its_own_copy() -> None:
    tasks = listed()
    tasks.task(0, "heldout").data["n"] = -1
    assert tasks.task(0, "heldout").data["n"] >= 0
