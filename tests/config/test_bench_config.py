"""`--bench` on the command line: which command it makes, and which config."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.config import ConfigError, command_of, config_for, load, split_argv

MODEL = ["--model.name", "m"]


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_the_switch_makes_another_command(command):
    assert command_of([command, *MODEL]) == command
    assert command_of([command, "--seed", "1", "--bench"]) == f"{command} --bench"
    assert load(["--bench", "--seed", "3"]).seed == 3


@pytest.mark.parametrize("words", [["--json", "f.json"], ["--json=f.json"], ["--bench.json", "f.json"]])
def test_json_is_a_key_with_a_short_name(words):
    assert load(["--bench", *words]).bench.json == "f.json"
    assert split_argv(["--bench", *words]).bench


@pytest.mark.parametrize("command", ["eval", "generate", "serve"])
def test_what_does_not_train_has_no_bench(command):
    with pytest.raises(ConfigError, match=f"{command} does none: main.py rl|sft --bench"):
        command_of([command, "--bench"])


@pytest.mark.parametrize("words", [["--json", "f"], ["--json=f"], ["--bench.json", "f"]])
def test_figures_without_a_bench(words):
    with pytest.raises(ConfigError, match="there is no --bench"):
        command_of(["rl", *words])


@pytest.mark.parametrize("given", [[], ["--output-dir", "outputs/run"], ["--output-dir", "outputs/run-bench"]])
def test_a_run_is_left_alone(given):
    """Its folder and its checkpoints, whoever names them; and a job that is told its folder finds the same one."""
    resuming = ["--ckpt.resume", "latest", "--ckpt.interval", "5", "--deployment.rank-map", "0", "2", "1"]
    config = config_for("rl --bench", [*MODEL, *resuming, *given, "--bench"])
    assert config.output_dir == "outputs/run-bench"
    assert (config.ckpt.resume, config.ckpt.interval, config.deployment.rank_map) == ("", 0, ())


def test_no_data_and_no_sources_are_needed():
    config_for("sft --bench", MODEL)
    config_for("rl --bench", [*MODEL, "--orchestrator.source.0.env", ""])
    for command in ("rl", "sft"):
        with pytest.raises(ConfigError):
            config_for(command, [*MODEL, "--orchestrator.source.0.env", ""])


BAD = {
    "no steps": (["--bench.steps", "0"], "bench.steps = 0: must be 1 or more"),
    "fewer than none": (["--bench.warmup", "-1"], "bench.warmup = -1: must be 0 or more"),
    "no peak": (["--bench.peak-tflops", "-2"], "bench.peak_tflops = -2"),
    "too long": (["--bench.median-length", "9", "--seq-len", "8"], "above seq_len = 8"),
    "in turns": (["--deployment.placement", "colocated"], "--deployment.placement disaggregated"),
    "batch of parts of groups": (["--orchestrator.batch-size", "3"], "not a multiple of orchestrator.group_size"),
    "a layout that can't be": (["--trainer.parallel.cp", "2", "--trainer.model.impl", "hf"], "impl = custom"),
}


@pytest.mark.parametrize(("words", "says"), BAD.values(), ids=BAD)
def test_what_can_not_be_measured(words, says):
    with pytest.raises(ConfigError, match=says):
        config_for("rl --bench", [*MODEL, *words])


def test_other_lengths_are_unknown():
    with pytest.raises(ConfigError, match="'fixed', 'variable', 'both'"):
        load(["--bench.lengths", "long"])


def test_a_folder_is_no_file_for_figures(tmp_path: Path):
    with pytest.raises(ConfigError, match="is a folder"):
        config_for("sft --bench", [*MODEL, "--json", str(tmp_path)])
