"""Whatever is wrong with the input ends the run on all ranks, and the screen ends with the reason and the way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from spmd_rl.models.byte_tokenizer import VOCAB_SIZE
from spmd_rl.models.tiny import make_tiny
from tests.e2e.runner import QUICKSTART, run

ENVIRONMENTS = Path(__file__).with_name("environments.py")
SHORT = ["--config", QUICKSTART, "--warmup.steps", "0", "--orchestrator.eval.tasks", "0"]


def assert_refused(folder: Path, args: list[str], *reasons: str, nproc: int = 3, wrap: tuple = ()) -> None:
    """Not by a time-out: nothing may wait for a rank that is gone."""
    done = run(folder, [*SHORT, *args], nproc, timeout_s=120, wrap=wrap)
    assert done.returncode != 0
    for reason in reasons:
        assert reason in done.last_lines(), done.output[-4000:]


@pytest.fixture
def damaged(model, tmp_path):
    """A copy of the model folder, to be damaged."""
    return Path(shutil.copytree(model, tmp_path / "damaged"))


def test_an_unknown_key(model, tmp_path):
    args = ["--model.name", model, "--trainer.optim.learning-rate", "1"]
    assert_refused(tmp_path / "run", args, "--trainer.optim.learning-rate", "did you mean --trainer.optim.lr")


def test_a_number_of_processes_that_does_not_fit(model, tmp_path):
    args = ["--model.name", model]
    assert_refused(tmp_path / "run", args, "4 ranks do not fit", "Start 3 processes", nproc=4)


def test_a_model_folder_that_is_not_there(tmp_path):
    args = ["--model.name", str(tmp_path / "nowhere")]
    assert_refused(tmp_path / "run", args, f"model folder '{tmp_path}/nowhere' does not exist", "pass a folder")


def test_a_model_config_that_is_no_json(damaged, tmp_path):
    (damaged / "config.json").write_text('{"model_type": "qwen3", ')
    assert_refused(tmp_path / "run", ["--model.name", str(damaged)], f"{damaged}/config.json is not valid JSON")


def test_weights_that_end_too_early(damaged, tmp_path):
    """Found by the ranks that load them, the trainer or the engine."""
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(tmp_path / "run", ["--model.name", str(damaged)], "model.safetensors", "damaged or truncated")


def test_a_tokenizer_of_another_model(damaged, tmp_path):
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 32, "ff": 32}
    make_tiny(str(damaged), seed=0, vocab_size=VOCAB_SIZE - 9, **sizes)
    reasons = ["makes token ids up to 264", "a vocabulary of 256", "they do not belong together"]
    assert_refused(tmp_path / "run", ["--model.name", str(damaged)], *reasons)


def test_no_room_for_an_answer(model, tmp_path):
    args = ["--model.name", model, "--seq-len", "6", "--orchestrator.sampling.max-tokens", "1"]
    args += ["--weights.probe-length", "4"]
    assert_refused(tmp_path / "run", args, "the prompt of train task 0 has 6 tokens", "Raise seq_len")


def test_an_environment_whose_tasks_raise(model, tmp_path):
    args = ["--model.name", model, "--orchestrator.source.0.env", f"{ENVIRONMENTS}:NoTask"]
    assert_refused(tmp_path / "run", args, "NoTask", "train task 0", "LookupError: the data set ends before this task")


def test_rewards_that_raise_or_are_no_numbers(model, tmp_path):
    """Single ones are data; beyond the allowed share the run shows the first ones and ends."""
    args = ["--model.name", model, "--orchestrator.source.0.env", f"{ENVIRONMENTS}:NoReward"]
    done = run(tmp_path / "run", [*SHORT, *args])
    assert done.returncode != 0
    end = done.last_lines(40)
    assert "rollouts failed" in end and "orchestrator.max_error_rate = 0.2" in end
    assert "the judge divided by zero" in end or "the reward is nan" in end
    assert done.phase("rl") == []


def test_a_rank_that_dies_at_start(model, tmp_path):
    """Rank 0, killed from inside while it loads an environment; no handler of its own can speak for it."""
    (tmp_path / "deadly.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    args = ["--model.name", model, "--orchestrator.source.0.env", f"{tmp_path}/deadly.py:Env"]
    done = run(tmp_path / "run", [*SHORT, *args], timeout_s=120)
    assert done.returncode != 0
    assert "rank      : 0" in done.output and "SIGKILL" in done.output


def test_a_disk_without_room(model, tmp_path):
    """A file system of 1 MiB, which only this run sees."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=1m tmpfs {disk} && exec "$@"'
    wrap = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    reasons = [f"the disk of output_dir '{disk}/run' has", "free", "64 MiB"]
    assert_refused(disk / "run", ["--model.name", model], *reasons, wrap=wrap)


def test_a_disk_that_fills_up(model, tmp_path):
    """After the start: somebody else takes what is left."""
    disk, hog = tmp_path / "disk", tmp_path / "hog.py"
    disk.mkdir()
    hog.write_text(
        "from spmd_rl.envs.reverse import Reverse\n"
        "class Hog(Reverse):\n"
        "    async def rollout(self, task, policy):\n"
        f"        with open('{disk}/hog', 'ab', buffering=0) as file:\n"
        "            try:\n"
        "                while file.write(bytes(2**20)): pass\n"
        "            except OSError: pass\n"
        "        return await super().rollout(task, policy)\n"
    )
    script = f'mount -t tmpfs -o size=80m tmpfs {disk} && exec "$@"'
    wrap = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    args = ["--model.name", model, "--orchestrator.source.0.env", f"{hog}:Hog"]
    reasons = [f"the disk is full: cannot write into '{disk}/run", "set output_dir to a folder on a larger disk"]
    assert_refused(disk / "run", args, *reasons, wrap=wrap)


def test_the_message_of_a_file_beside_the_model(damaged, tmp_path):
    (damaged / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    assert_refused(tmp_path / "run", ["--model.name", str(damaged)], f"no tokenizer in '{damaged}'", "model.tokenizer")
