"""The job of a [slurm] table: its script, what it does when it is told to end, and how a submission can fail.

Slurm's commands are stand-ins here; tests/e2e/test_slurm_runs.py has the real ones.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config import Config, command_of, config_for, load
from spmd_rl.config.slurm import SlurmConfig
from spmd_rl.config.tree import ModelConfig
from spmd_rl.world import slurm
from spmd_rl.world.slurm import SlurmError, layout, render, submit

JOB = SlurmConfig(nodes=2, processes=3)


def config(folder: Path | str, **keys: Any) -> Config:
    return Config(output_dir=str(folder), max_steps=50, model=ModelConfig("m"), slurm=replace(JOB, **keys))


def script(folder: Path | str, command: str = "rl", **keys: Any) -> str:
    return render(command, config(folder, **keys), (3, 3), Path(folder) / "job")


def bash(text: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", *options], input=text, capture_output=True, text=True, timeout=20)


# --- the text ------------------------------------------------------------------------------------------------------


@given(
    command=st.sampled_from(["rl", "sft", "eval", "serve"]),
    keys=st.fixed_dictionaries(
        {
            "gpus": st.sampled_from([0, 8]),
            "cpus": st.sampled_from([0, 4]),
            "memory": st.sampled_from(["", "64G"]),
            "partition": st.sampled_from(["", "long"]),
            "time": st.sampled_from(["", "2-12"]),
            "exclude": st.sampled_from(["", "n[1-3]"]),
            "options": st.sampled_from(["", "--constraint='a b'"]),
            "pre_run": st.sampled_from(["", "module load cuda\nexport X='a b'"]),
            "requeue": st.booleans(),
            "signal_s": st.sampled_from([0, 60]),
        }
    ),
)
@settings(max_examples=40)
def test_every_script_is_one(command: str, keys: dict[str, Any]) -> None:
    text = script("/runs/a", command, **keys)
    checked = bash(text, "-n")
    assert checked.returncode == 0, checked.stderr
    options = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    header = text.splitlines()[1 : 1 + len(options)]
    assert header == options, "sbatch reads them up to the first command only"
    asked = {word.split("=")[0]: word.partition("=")[2] for line in options for word in shlex.split(line)[1:]}
    assert asked["--nodes"] == "2" and asked["--ntasks-per-node"] == "1"
    for key, flag in (("partition", "--partition"), ("time", "--time"), ("exclude", "--exclude")):
        assert asked.get(flag, "") == keys[key]
    assert ("--exclusive" in asked) == (not keys["cpus"]), "one task alone would get a single core"
    assert ("--requeue" in asked) == keys["requeue"] and ("--no-requeue" in asked) == (not keys["requeue"])
    assert asked.get("--signal", "") == ("B:USR1@60" if keys["signal_s"] else "")


@given(name=st.text(alphabet="ab '\"$`\\%;&|<>*?{}()#~!é", min_size=1, max_size=12).filter(str.strip))
@settings(max_examples=60)
def test_no_name_of_a_folder_breaks_out(name: str) -> None:
    folder = Path("/runs") / name
    text = script(folder, job_name="j")
    assert bash(text, "-n").returncode == 0
    line = next(line for line in text.splitlines() if line.startswith("output="))
    assert bash(f'{line}\nprintf %s "$output"').stdout == str(folder)
    option = next(line for line in text.splitlines() if line.startswith("#SBATCH --output="))
    literal = str(folder).replace("%", "%%")  # to Slurm %j is the job, %% a percent sign
    assert shlex.split(option)[1] == f"--output={literal}/job/slurm-%j.out"


def test_layouts() -> None:
    assert layout(JOB, smallest=3, spare=1) == (3, 3)
    assert layout(SlurmConfig(nodes=1), smallest=3, spare=1) == (3,)
    assert layout(SlurmConfig(nodes=3, gpus=8), smallest=3, spare=1) == (9, 8, 8)
    assert layout(SlurmConfig(nodes=3, gpus=8), smallest=3, spare=0) == (8, 8, 8)


# --- one's own template --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("#!/bin/bash\n\n{{ slurm.partiton }}\n", "line 3: .*no attribute 'partiton'"),
        ("#!/bin/bash\n{{ nodes }}\n", r"line 2: 'nodes' is undefined \(known: slurm, command"),
        ("#!/bin/bash\n{% if slurm.gpus %}\n", "line 3|line 2"),
        ("#!/bin/bash\n{{ output_dir | shout }}\n", "line 2: No filter named 'shout'"),
        ("{# nothing #}\nsrun\n", "does not begin with #!"),
    ],
)
def test_a_wrong_template_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "own.j2"
    path.write_text(text)
    with pytest.raises(SlurmError, match=says) as error:
        script(tmp_path, template_path=str(path))
    assert str(path) in str(error.value)


def test_a_template_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match=r"template_path = .*none.j2' can't be read: No such file"):
        submit("rl", config(tmp_path / "run", template_path="none.j2"), (3,), dry_run=True)
    assert not (tmp_path / "run").exists()


def test_a_template_of_ones_own_knows_the_run(tmp_path: Path) -> None:
    own = tmp_path / "own.j2"
    own.write_text("#!/bin/sh\n{{ command }} {{ config | quote }} {{ ranks[0] }} {{ slurm.partition }}\n")
    text = script("/runs/a b", partition="long", template_path=str(own))
    assert text == "#!/bin/sh\nrl '/runs/a b/job/config.toml' 3 long\n"


@pytest.mark.parametrize("command", ["rl", "rl --bench", "eval", "serve"])
def test_the_job_writes_where_its_files_are(tmp_path: Path, commands: Path, command: str) -> None:
    """`eval`, `serve` and a bench take another folder than the config's, unless they are told."""
    stand_in(commands, "srun", f"printf '%s\\n' \"$@\" >{tmp_path}/srun")
    folder = tmp_path / ("run-bench" if "--bench" in command else "run")
    config = replace(load([]), output_dir=str(folder), model=ModelConfig("m"), slurm=JOB)
    submit(command, config, (3, 3), dry_run=True)
    done = subprocess.run(["bash", folder / "job/job.sbatch"], env=os.environ | {"SLURM_JOB_ID": "7"})
    words = (tmp_path / "srun").read_text().splitlines()
    words = words[words.index(command.split()[0]) :]
    assert done.returncode == 0 and command_of(words) == command
    inside = config_for(command, words[1:])
    assert inside.output_dir == str(folder) and inside.slurm.nodes == 0


# --- submitting ----------------------------------------------------------------------------------------------------


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first in PATH; the rest of PATH has no Slurm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "env", "sleep", "touch", "sort", "tail", "grep", "mkdir", "cat", "sh"):
        found = next(Path(at) / name for at in os.environ["PATH"].split(":") if (Path(at) / name).exists())
        (folder / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_job_is_written_and_submitted(tmp_path: Path, commands: Path) -> None:
    stand_in(commands, "sbatch", f'echo "$*" >{tmp_path}/asked; echo "17;cluster"')
    said = submit("rl", config(tmp_path / "run"), (3, 3), dry_run=False)
    job = tmp_path / "run/job"
    assert (tmp_path / "asked").read_text() == f"--parsable {job}/job.sbatch\n"
    assert "job 17 " in said and f"{job}/slurm-17.out" in said and (job / "id").read_text() == "17\n"
    inside = load(["--config", str(job / "config.toml")])
    assert inside == replace(config(tmp_path / "run"), slurm=replace(JOB, nodes=0)), "or it would submit itself"


def test_a_dry_run_needs_no_slurm(tmp_path: Path, commands: Path) -> None:
    said = submit("rl", config(tmp_path / "run"), (3, 3), dry_run=True)
    assert "written, not submitted" in said and (tmp_path / "run/job/job.sbatch").exists()
    assert not (tmp_path / "run/job/id").exists()


def test_without_sbatch_there_is_a_way_out(tmp_path: Path, commands: Path) -> None:
    with pytest.raises(SlurmError, match=r"no sbatch here.*slurm\.nodes = 0.*--dry-run"):
        submit("rl", config(tmp_path / "run"), (3, 3), dry_run=False)
    assert not (tmp_path / "run").exists()


def test_what_sbatch_says_is_passed_on(tmp_path: Path, commands: Path) -> None:
    stand_in(commands, "sbatch", 'echo "sbatch: error: invalid partition specified: x" >&2; exit 1')
    with pytest.raises(SlurmError, match="did not take the job: sbatch: error: invalid partition"):
        submit("rl", config(tmp_path / "run"), (3, 3), dry_run=False)


def test_a_controller_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "ASK_S", 0.3)
    stand_in(commands, "sbatch", "exec sleep 60")
    with pytest.raises(SlurmError, match=r"no answer in 0\.3 s; is Slurm's controller up"):
        submit("rl", config(tmp_path / "run"), (3, 3), dry_run=False)


@pytest.mark.parametrize(("state", "free"), [("RUNNING", False), ("PENDING", False), ("COMPLETED", True), ("", True)])
def test_a_folder_belongs_to_the_job_that_uses_it(tmp_path: Path, commands: Path, state: str, free: bool) -> None:
    stand_in(commands, "sbatch", "echo 18")
    stand_in(commands, "squeue", f"echo {state}")
    submit("rl", config(tmp_path / "run"), (3, 3), dry_run=False)
    if free:
        submit("rl", config(tmp_path / "run"), (3, 3), dry_run=False)
        return
    with pytest.raises(SlurmError, match=f"is that of job 18, which is {state}"):
        submit("rl", config(tmp_path / "run"), (3, 3), dry_run=True)


# --- the script at work --------------------------------------------------------------------------------------------


class Batch:
    """The script run by bash, with a run that ends when the stop file comes, or when the test says so."""

    def __init__(self, folder: Path, commands: Path, command: str = "rl", **keys: Any) -> None:
        self.run, self.calls = folder / "run", folder / "calls"
        (self.run / "checkpoints").mkdir(parents=True, exist_ok=True)
        quick_sleep(commands)
        until = f"until [ -e {self.run}/end ]; do sleep 0.02; done"
        stand_in(commands, "srun", f"touch {folder}/began; {until}; exit ${{CODE:-0}}")
        preempted = folder / "preempted"
        stand_in(
            commands,
            "scontrol",
            f'echo "$*" >>{self.calls}; [ -e {preempted} ] && t=2026-01-01 || t=None; echo "JobId=7 PreemptTime=$t"',
        )
        text = script(self.run, command, **({"requeue": True} | keys))
        self.began = folder / "began"
        self._process = subprocess.Popen(["bash", "-c", text], env=os.environ | {"SLURM_JOB_ID": "7"})
        wait_until(self.began.exists)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def saves(self, step: int) -> None:
        (self.run / f"checkpoints/step_{step:06d}").mkdir()
        (self.run / f"checkpoints/step_{step + 1:06d}.tmp").mkdir()  # one that is being written

    def end(self) -> int:
        (self.run / "end").touch()
        return self._process.wait(20)

    @property
    def queued_again(self) -> bool:
        return self.calls.exists() and "requeue 7" in self.calls.read_text().splitlines()


def quick_sleep(commands: Path) -> None:
    """The script looks every second; the tests have none to wait."""
    if (commands / "sleep").is_symlink():
        real = (commands / "sleep").readlink()
        (commands / "sleep").unlink()
        stand_in(commands, "sleep", f"exec {real} 0.02")


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def told(batch: Batch) -> Batch:
    batch.signal(signal.SIGUSR1)
    wait_until((batch.run / "stop").exists)
    return batch


def test_near_the_time_limit_the_run_saves_and_the_job_is_queued_again(tmp_path: Path, commands: Path) -> None:
    (tmp_path / "run/checkpoints/step_000010").mkdir(parents=True)
    batch = told(Batch(tmp_path, commands))
    batch.saves(12)
    assert batch.end() == 0 and batch.queued_again


@pytest.mark.parametrize("step", [0, 10, 50])
def test_who_gets_nowhere_or_is_done_is_not_queued_again(tmp_path: Path, commands: Path, step: int) -> None:
    """Nothing saved; nothing newer saved; the last step saved."""
    if step == 10:
        (tmp_path / "run/checkpoints/step_000010").mkdir(parents=True)
    batch = told(Batch(tmp_path, commands))
    if step == 50:
        batch.saves(50)
    assert batch.end() == 0 and not batch.queued_again


def test_a_run_that_ends_by_itself_ends_the_job(tmp_path: Path, commands: Path) -> None:
    batch = Batch(tmp_path, commands)
    batch.saves(20)
    assert batch.end() == 0 and not batch.queued_again and not (batch.run / "stop").exists()


def test_a_failure_is_the_jobs(tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE", "3")
    batch = told(Batch(tmp_path, commands))
    batch.saves(20)
    assert batch.end() == 3 and not batch.queued_again


def test_a_signal_at_the_very_end_does_not_hide_how_it_went(
    tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODE", "3")
    for i in range(12):
        folder = tmp_path / str(i)
        folder.mkdir()
        batch = Batch(folder, commands)
        (batch.run / "end").touch()
        time.sleep(i * 0.003)
        batch.signal(signal.SIGUSR1)
        assert batch.end() == 3


def test_a_cancelled_job_is_not_queued_again(tmp_path: Path, commands: Path) -> None:
    """scancel sends SIGTERM to the script and to the run, which saves."""
    batch = told(Batch(tmp_path, commands))
    batch.signal(signal.SIGTERM)
    time.sleep(0.2)
    batch.saves(20)
    assert batch.end() == 0 and not batch.queued_again


@pytest.mark.parametrize("saved", [True, False])
def test_a_preempted_job_is_queued_again(tmp_path: Path, commands: Path, saved: bool) -> None:
    batch = Batch(tmp_path, commands)
    (tmp_path / "preempted").touch()
    batch.signal(signal.SIGTERM)
    if saved:
        batch.saves(20)
    assert batch.end() == 0 and batch.queued_again


def test_without_requeue_a_job_saves_and_ends(tmp_path: Path, commands: Path) -> None:
    batch = told(Batch(tmp_path, commands, requeue=False))
    batch.saves(20)
    assert batch.end() == 0 and not batch.queued_again


def test_a_server_is_queued_again_and_an_evaluation_is_not(tmp_path: Path, commands: Path) -> None:
    for command, again in (("serve", True), ("eval", False)):
        folder = tmp_path / command
        folder.mkdir()
        batch = told(Batch(folder, commands, command))
        assert batch.end() == 0 and batch.queued_again == again


def test_what_runs_first_is_heard_by_the_run_and_may_fail_the_job(tmp_path: Path, commands: Path) -> None:
    text = script(tmp_path / "run", pre_run="export MASTER_PORT=3; false")
    stand_in(commands, "srun", f"touch {tmp_path}/ran")
    assert subprocess.run(["bash", "-c", text], env=os.environ | {"SLURM_JOB_ID": "7"}).returncode == 1
    assert not (tmp_path / "ran").exists()
