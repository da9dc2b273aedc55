"""The picture: drawn from any metrics file, and its numbers are the right ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
from matplotlib.image import imread

from spmd_rl.observe import names
from spmd_rl.observe.plots import curve, reward_png, trailing_mean

RL = [{"phase": "rl", "step": s, names.REWARD: s / 40, names.ENTROPY: 1 / s, names.LAG: s % 2} for s in range(1, 41)]
EVAL = [{"phase": "eval", "step": s, names.EVAL_GREEDY: s / 40, names.EVAL_SAMPLED: s / 50} for s in (0, 40)]
ODD = [{"phase": "rl", "step": 1, names.REWARD: None, names.LAG: None}, {"phase": "warmup", "step": 1, "loss": 2.0}]


def written(folder, records):
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("records", [RL + EVAL, RL, EVAL[:1], ODD, []], ids=["all", "rl", "one eval", "odd", "none"])
def test_any_run_can_be_drawn(tmp_path, records):
    png = reward_png(written(tmp_path, records), tmp_path / "plots" / "reward.png")
    height, width, _ = imread(png).shape
    assert width > height > 500


def test_the_curve_is_in_the_picture(tmp_path):
    empty = imread(reward_png(written(tmp_path, []), tmp_path / "empty.png"))
    drawn = imread(reward_png(written(tmp_path, RL), tmp_path / "drawn.png"))
    blue = np.array([0x25, 0x63, 0xEB]) / 255
    assert (np.abs(drawn[..., :3] - blue).max(-1) < 0.02).sum() > 1000
    assert (np.abs(empty[..., :3] - blue).max(-1) < 0.02).sum() == 0


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        reward_png(tmp_path / "nothing.jsonl", tmp_path / "reward.png")


def test_curves_are_sorted_and_the_last_record_of_a_step_counts():
    records = [{"phase": "rl", "step": s, "x": v} for s, v in ((2, 5.0), (1, 1.0), (2, 6.0), (3, None))]
    steps, values = curve([*records, {"phase": "eval", "step": 9, "x": 9.0}], "rl", "x")
    assert (steps.tolist(), values.tolist()) == ([1, 2], [1.0, 6.0])


def test_trailing_mean_looks_back_only():
    assert trailing_mean(np.array([4.0, 2.0, 0.0, 8.0]), over=2).tolist() == [4.0, 3.0, 1.0, 4.0]
