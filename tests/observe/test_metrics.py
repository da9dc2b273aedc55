"""Metrics: every line is standard JSON and there at once, views get the same scalars, failures name the way out."""

from __future__ import annotations

import errno
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.observe.metrics import FILE_NAME, Metrics, read_metrics

RL = {"phase": "rl", "step": 1}
FLOATS = st.floats(width=64)
VALUES = st.recursive(
    FLOATS | st.integers() | st.text(max_size=5) | st.none(), lambda inner: st.lists(inner, max_size=3)
)


def strict(line: str) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


def lines(folder: Path) -> list[dict]:
    return [strict(line) for line in (folder / FILE_NAME).read_text().splitlines()]


def test_a_record_is_in_the_file_when_log_returns(tmp_path):
    metrics = Metrics(tmp_path / "run", tensorboard=False)
    metrics.log(RL | {"reward/mean": 0.5, "note": "hello"})
    assert lines(tmp_path / "run") == [RL | {"reward/mean": 0.5, "note": "hello"}]


def test_nonfinite_numbers_become_null_and_are_named(tmp_path):
    with Metrics(tmp_path, tensorboard=False) as metrics:
        metrics.log(RL | {"a": math.nan, "b": -math.inf, "c": 1.0, "d": [1.0, math.inf]})
        metrics.log(RL | {"c": 1.0})
    first, second = lines(tmp_path)
    assert first == RL | {"a": None, "b": None, "c": 1.0, "d": [1.0, None], "nonfinite": ["a", "b", "d"]}
    assert "nonfinite" not in second


@settings(max_examples=100, deadline=None)
@given(values=st.dictionaries(st.text(max_size=5).map("x/".__add__), VALUES, max_size=5))
def test_any_record_is_one_line_of_standard_json(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("run")
    with Metrics(folder, tensorboard=False) as metrics:
        metrics.log(RL | values)
    (record,) = lines(folder)
    assert set(record) - {"nonfinite"} == set(RL | values)
    for key, value in values.items():
        if isinstance(value, float) and math.isfinite(value):
            assert record[key] == value


def test_numpy_scalars_and_arrays_are_written_as_numbers(tmp_path):
    with Metrics(tmp_path, tensorboard=False) as metrics:
        metrics.log(RL | {"a": np.float32(0.5), "b": np.int64(3), "c": np.array([1, 2]), "d": np.float32("nan")})
    assert lines(tmp_path) == [RL | {"a": 0.5, "b": 3, "c": [1, 2], "d": None, "nonfinite": ["d"]}]


@pytest.mark.parametrize("missing", ["phase", "step"])
def test_phase_and_step_are_required(tmp_path, missing):
    with (
        Metrics(tmp_path, tensorboard=False) as metrics,
        pytest.raises(KeyError, match=f"{missing}.*missing"),
    ):
        metrics.log({key: value for key, value in RL.items() if key != missing})


def test_a_new_run_keeps_the_old_file_and_append_goes_on(tmp_path):
    for step, append in ((1, False), (2, False), (3, True)):
        with Metrics(tmp_path, tensorboard=False, append=append) as metrics:
            metrics.log({"phase": "rl", "step": step})
    assert [record["step"] for record in lines(tmp_path)] == [2, 3]
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.old.jsonl")] == [1]


def test_reader_leaves_out_a_line_that_is_still_being_written(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text('{"phase": "rl", "step": 1}\n{"phase": "rl", "st')
    assert list(read_metrics(path)) == [RL]


def test_full_disk_names_the_folder_and_the_way_out(tmp_path):
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    metrics = Metrics(tmp_path, tensorboard=False, append=True)
    with pytest.raises(OSError, match=r"disk is full.*output_dir") as caught:
        metrics.log(RL)
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)


def test_tensorboard_gets_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path)  # still open below: TensorBoard follows a run that goes on
    metrics.log({"phase": "warmup", "step": 7, "loss": 0.25, "note": "text", "bad": math.nan, "flag": True})
    (folder,) = (tmp_path / "tensorboard").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()
    names = tags["scalars"] + tags["tensors"]
    assert names == ["warmup/loss"]
    assert [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors("warmup/loss")] == [(7, 0.25)]
    metrics.close()


def test_missing_wandb_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"wandb.*pip install.*log\.wandb = false"):
        Metrics(tmp_path, tensorboard=False, wandb_project="demo")


def test_wandb_counts_the_steps_of_each_phase(tmp_path, monkeypatch):
    class FakeRun:
        logged: list[dict] = []  # noqa: RUF012
        axes: dict[str, str] = {}  # noqa: RUF012

        def define_metric(self, name, step_metric):
            self.axes[name] = step_metric

        def log(self, record):
            self.logged.append(record)

        def finish(self):
            self.logged.append("finished")

    class FakeWandb:
        @staticmethod
        def init(**settings):
            assert settings["project"] == "demo" and settings["config"] == {"seed": 1}
            return FakeRun()

    monkeypatch.setitem(sys.modules, "wandb", FakeWandb)
    with Metrics(tmp_path, tensorboard=False, wandb_project="demo", config={"seed": 1}) as metrics:
        metrics.log(RL | {"loss": 2.0})
    assert FakeRun.logged == [{"rl/step": 1, "rl/loss": 2.0}, "finished"]
    assert FakeRun.axes["rl/*"] == "rl/step"


def test_observing_imports_no_torch(tmp_path):
    """Every module is imported and used, TensorBoard included: rank 0 has no torch at module level."""
    program = f"""
import sys
from spmd_rl.observe import disk, logs, metrics, names, plots, progress, samples
with metrics.Metrics({str(tmp_path)!r}) as m:
    m.log({{"phase": "rl", "step": 1, names.REWARD: 0.5}})
plots.reward_png(m.path, {str(tmp_path / "reward.png")!r})
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
