"""A job that starts again: it goes on from the latest checkpoint, else begins anew with its own files in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.config import Config
from spmd_rl.config.tree import CkptConfig
from spmd_rl.world.world import RESTART_COUNTS, prepare_output, where_to_resume


@pytest.fixture(autouse=True)
def no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RESTART_COUNTS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", RESTART_COUNTS)
def test_after_a_restart_the_latest_checkpoint_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = Config(output_dir=str(tmp_path))
    monkeypatch.setenv(name, "2")
    assert where_to_resume(config) == "", "there is none"
    checkpoint = tmp_path / "checkpoints/step_000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").touch()
    assert where_to_resume(config) == "latest"
    for first in ("0", ""):
        monkeypatch.setenv(name, first)
        assert where_to_resume(config) == ""
    named = Config(output_dir=str(tmp_path), ckpt=CkptConfig(resume="elsewhere"))
    assert where_to_resume(named) == "elsewhere"


def test_an_earlier_run_moves_aside_and_leaves_the_job_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "job").mkdir(parents=True)
    (folder / "job/id").write_text("7\n")
    config = Config(output_dir=str(folder))
    prepare_output(config, "").close()
    (folder / "metrics.jsonl").touch()
    (folder / "stop").touch()  # asked for while it starts again
    prepare_output(config, "").close()
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "job", "lock", "stop"]
    assert (folder / "job/id").read_text() == "7\n"
    assert (tmp_path / "run.1/metrics.jsonl").exists() and not (tmp_path / "run.1/job").exists()


def test_without_a_job_nothing_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = Config(output_dir=str(folder))
    prepare_output(config, "").close()
    (folder / "stop").touch()
    prepare_output(config, "").close()
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "lock"]
