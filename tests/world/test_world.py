"""The parts of the start-up that need no other rank: differences, the output folder, accelerators."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config import load
from spmd_rl.config.tree import Config, DeploymentConfig
from spmd_rl.world.world import (
    StartError,
    accelerator_index,
    describe_differences,
    pick_device,
    prepare_output,
    where_to_resume,
)

# --- what the ranks run -----------------------------------------------------------------------------------------------

fingerprints = st.lists(
    st.dictionaries(st.sampled_from(["config", "code", "torch"]), st.sampled_from(["aaa", "bbb", "ccc"])),
    min_size=1,
    max_size=6,
)


@given(fingerprints)
@settings(max_examples=100, deadline=None)
def test_differences_are_said_exactly_when_there_are_some(prints):
    text = describe_differences(prints)
    differing = {
        item for item in ("config", "code", "torch") if len({fingerprint.get(item) for fingerprint in prints}) > 1
    }
    assert bool(text) == bool(differing)
    assert {line.split(":")[0].strip() for line in text.splitlines()[1:]} == differing


def test_a_difference_names_item_values_and_ranks_the_most_common_first():
    prints = [{"config": "c1", "torch": "2.13.0"}] * 2 + [{"config": "c1", "torch": "2.14.0"}, {"config": "c1"}]
    prints.insert(0, prints[2])
    prints.append(prints[1])
    assert describe_differences(prints).splitlines() == [
        "the ranks do not run the same program; make these equal on all hosts:",
        "  torch: 2.13.0 on ranks [1, 2, 5]; 2.14.0 on ranks [0, 3]; missing on ranks [4]",
    ]


# --- the output folder ------------------------------------------------------------------------------------------------


def test_the_folder_holds_the_resolved_config(tmp_path):
    config = Config(output_dir=str(tmp_path / "deep" / "run"), seed=5)
    prepare_output(config, "")
    folder = tmp_path / "deep" / "run"
    assert load(["--config", str(folder / "config.toml")]) == config


def test_earlier_runs_are_moved_aside_and_nothing_is_lost(tmp_path):
    configs = [Config(output_dir=str(tmp_path / "run"), seed=seed) for seed in range(4)]
    for config in configs:
        prepare_output(config, "").close()  # that run has ended
        folder = tmp_path / "run"
        (folder / "logs").mkdir()
        (folder / "logs" / "rank_00000.log").write_text(f"seed {config.seed}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2", "run.3"]
    for name, config in zip(["run.1", "run.2", "run.3", "run"], configs, strict=True):
        assert (tmp_path / name / "logs" / "rank_00000.log").read_text() == f"seed {config.seed}"
        assert load(["--config", str(tmp_path / name / "config.toml")]) == config


@pytest.mark.parametrize("spelling", ["run/", "./run", "run/."])
def test_a_folder_spelled_with_a_slash_is_moved_beside_itself(tmp_path, monkeypatch, spelling):
    monkeypatch.chdir(tmp_path)
    for seed in range(2):
        prepare_output(Config(output_dir=spelling, seed=seed), "").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1"]


def test_a_folder_without_a_run_keeps_its_files(tmp_path):
    """For example one that a batch system has put its own log into."""
    (tmp_path / "slurm.log").write_text("x")
    prepare_output(Config(output_dir=str(tmp_path)), "")
    assert (tmp_path / "config.toml").exists()
    assert (tmp_path / "slurm.log").exists() and list(tmp_path.parent.glob(f"{tmp_path.name}.*")) == []


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path):
    config = Config(output_dir=str(tmp_path / "run"))
    held = prepare_output(config, "")
    for resume in ("", "latest"):
        with pytest.raises(StartError, match=f"in use by process {os.getpid()} on .*choose another output_dir"):
            prepare_output(config, resume)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # nothing was moved aside
    held.close()
    prepare_output(config, "latest").close()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_restart_goes_on_from_the_latest_checkpoint_if_there_is_one(tmp_path, monkeypatch):
    config = Config(output_dir=str(tmp_path))
    assert where_to_resume(config) == ""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert where_to_resume(config) == ""
    (tmp_path / "checkpoints/step_000004").mkdir(parents=True)
    (tmp_path / "checkpoints/step_000004/state.json").write_text("{}")
    assert where_to_resume(config) == "latest"


# --- accelerators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("per_host", "expected"),
    [
        ([5], [0, 1, 2, 3]),  # the first host starts one process more than it has accelerators
        ([5, 4], [0, 1, 2, 3, 0, 1, 2, 3]),
        ([1, 2], [0, 1]),
    ],
)
def test_every_accelerator_of_a_host_gets_one_rank(per_host, expected, monkeypatch):
    got = []
    for processes in per_host:
        for local_rank in range(processes):
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
            monkeypatch.setenv("RANK", str(len(got)))
            got.append(accelerator_index())
    assert got[1:] == expected  # rank 0 orchestrates


def on(device: str) -> Config:
    return replace(Config(), deployment=DeploymentConfig(device=device))


@pytest.fixture
def accelerators(monkeypatch):
    """A host with two accelerators; holds the one that was chosen last."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_rank_takes_its_accelerator(accelerators, device):
    assert pick_device(on(device), "trainer", 1) == torch.device("cuda", 1)
    assert pick_device(on(device), "inference", 0) == torch.device("cuda", 0)
    assert accelerators == [1, 0]


def test_a_rank_without_an_accelerator_says_so(accelerators):
    with pytest.raises(StartError, match=r"needs accelerator 2 of its host, which has 2.*deployment\.device = 'cpu'"):
        pick_device(on("cuda"), "inference", 2)


def test_the_host_is_enough_for_the_orchestrator_and_where_it_is_asked_for(accelerators):
    for device, role in (("auto", "orchestrator"), ("cuda", "orchestrator"), ("cpu", "trainer")):
        assert pick_device(on(device), role, -1 if role == "orchestrator" else 0) == torch.device("cpu")
    assert accelerators == []


def test_auto_means_the_host_where_there_is_no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device(on("auto"), "trainer", 0) == torch.device("cpu")
    with pytest.raises(StartError, match="which has 0"):
        pick_device(on("cuda"), "trainer", 0)
