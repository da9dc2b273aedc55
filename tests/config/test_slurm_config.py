"""The [slurm] table: times as Slurm reads them, and what can't work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.config import Config, ConfigError, check, load, to_toml
from spmd_rl.config.schema import build
from spmd_rl.config.slurm import SlurmConfig, check_slurm, time_limit_s
from spmd_rl.config.tree import LogConfig, ModelConfig

JOB = SlurmConfig(nodes=2, processes=4)


def problems(slurm: SlurmConfig, interval: int = 0, saves: bool = True) -> str:
    return "\n".join(check_slurm(slurm, interval, saves))


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_times_are_read_as_slurm_reads_them(days: int, hours: int, minutes: int, seconds: int) -> None:
    whole = days * 86400 + hours * 3600 + minutes * 60 + seconds
    assert time_limit_s(f"{days}-{hours}:{minutes:02}:{seconds:02}") == whole
    assert time_limit_s(f"{days}-{hours:02}:{minutes:02}") == whole - seconds
    assert time_limit_s(f"{days}-{hours}") == whole - seconds - minutes * 60
    assert time_limit_s(f"{hours}:{minutes:02}:{seconds:02}") == whole - days * 86400
    assert time_limit_s(f"{minutes}:{seconds:02}") == minutes * 60 + seconds
    assert time_limit_s(str(minutes)) == minutes * 60


@given(st.text(alphabet="0123456789:- ٣", max_size=9))
def test_any_text_is_a_time_or_none(text: str) -> None:
    found = time_limit_s(text)
    assert found is None or found >= 0


def test_no_limit_is_endless() -> None:
    assert time_limit_s("") == time_limit_s("unlimited") == float("inf")


@pytest.mark.parametrize(
    ("slurm", "says"),
    [
        (replace(JOB, processes=0), "how many processes run on a node"),
        (replace(JOB, partition="two words"), "slurm.partition = 'two words'"),
        (replace(JOB, job_name="a\n#SBATCH --wrap=x"), "slurm.job_name"),
        (replace(JOB, options='--comment="open'), "slurm.options"),
        (replace(JOB, options="--a\n--b"), "several lines"),
        (replace(JOB, time="tomorrow"), "no time of Slurm"),
        (replace(JOB, time="5", signal_s=300), "slurm.signal_s = 300 is not below slurm.time = 5"),
        (replace(JOB, signal_s=70000), "65535"),
        (replace(JOB, requeue=True), "ckpt.interval = 0"),
    ],
)
def test_what_can_not_work_is_named(slurm: SlurmConfig, says: str) -> None:
    assert says in problems(slurm)
    assert problems(replace(slurm, nodes=0)) == "", "without nodes there is no job"


def test_good_tables_pass() -> None:
    assert problems(JOB) == ""
    assert problems(replace(JOB, time="1-12", requeue=True, options="--constraint='a b'"), interval=10) == ""
    assert problems(replace(JOB, requeue=True), saves=False) == "", "a server has nothing to save"
    assert problems(SlurmConfig(nodes=1)) == "", "one node starts what the config needs"
    assert problems(SlurmConfig(nodes=2, gpus=8)) == ""


def test_the_command_line_is_checked_for_it() -> None:
    config = load(["--model.name", "m", "--slurm.nodes", "2", "--slurm.gpus", "-1", "--slurm.time", "soon"])
    with pytest.raises(ConfigError) as error:
        check(config)
    assert "slurm.gpus = -1" in str(error.value) and "slurm.time = 'soon'" in str(error.value)


def test_ranks_on_the_console_are_a_list_of_any_length() -> None:
    config = load(["--log.console-ranks", "0", "3", "17"])
    assert config.log.console_ranks == (0, 3, 17)
    assert build({"log": {"console_ranks": []}}, "a file").log.console_ranks == ()
    assert "console_ranks = [0, 3, 17]" in to_toml(config)
    with pytest.raises(ConfigError, match="expected a list of ints, got int"):
        build({"log": {"console_ranks": 3}}, "a file")
    with pytest.raises(ConfigError, match=r"console_ranks\.1.*expected int, got str"):
        build({"log": {"console_ranks": [0, "1"]}}, "a file")
    with pytest.raises(ConfigError, match="ranks are counted from 0"):
        check(Config(model=ModelConfig("m"), log=LogConfig(console_ranks=(-1,))))
