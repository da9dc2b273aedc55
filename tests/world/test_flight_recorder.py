"""The flight recorder, with a fake in NCCL's place: it is written, or says why not, or ends the process in time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from spmd_rl.world import flight_recorder
from spmd_rl.world.flight_recorder import ENTRIES, FlightRecorder

VARIABLES = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Nobody has set anything; and what a test sets is gone after it."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def fake(monkeypatch, dump) -> None:
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", dump, raising=False)


def test_the_environment_is_set_where_nobody_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flight_recorder.arm("run")
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == str(ENTRIES)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/run/flight_recorder/rank_"
    assert not (tmp_path / "run").exists()  # an earlier run's folder is still to be moved aside


@pytest.mark.parametrize(("size", "prefix"), [VARIABLES[::2], VARIABLES[1::2]])
def test_what_is_set_already_stays_also_under_the_older_names(tmp_path, monkeypatch, size, prefix):
    monkeypatch.setenv(size, "7")
    monkeypatch.setenv(prefix, str(tmp_path / "mine_"))
    flight_recorder.arm("run")
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert FlightRecorder(3).path == tmp_path / "mine_3"


def test_all_that_torch_knows_is_written_under_the_name_that_its_reader_takes(tmp_path, monkeypatch):
    asked = {}
    fake(monkeypatch, lambda **options: asked.update(options) or b"collectives")
    flight_recorder.arm(str(tmp_path / "run"))
    recorder = FlightRecorder(12)
    for _ in range(2):
        recorder.write()
        (file,) = (tmp_path / "run/flight_recorder").iterdir()
        assert file.name == "rank_12" and file.read_bytes() == b"collectives"
    assert asked == {"includeCollectives": True, "includeStackTraces": True, "onlyActive": False}


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), None])
def test_a_failure_is_said_and_is_no_error(tmp_path, monkeypatch, capsys, error):
    """None: a torch without NCCL does not know the function at all."""

    def fails(**options):
        raise error

    flight_recorder.arm(str(tmp_path))
    if error:
        fake(monkeypatch, fails)
    FlightRecorder(1).write()
    said = capsys.readouterr().err
    assert said.startswith("no flight recorder: ") and (not error or "CUDA error" in said)
    assert not list((tmp_path / "flight_recorder").iterdir())


HANGS = """
import ctypes, sys, torch
from spmd_rl.world import flight_recorder
from spmd_rl.world.flight_recorder import FlightRecorder

def hang(**options):  # PyDLL keeps Python's lock during the call, as a driver's call inside of torch does
    ctypes.PyDLL(None).sleep(600)

torch._C._distributed_c10d._dump_nccl_trace = hang
flight_recorder.arm(sys.argv[1])
print("the verdict", flush=True)
FlightRecorder(0).write(0.2)
"""


def test_a_hang_with_the_interpreters_lock_ends_the_process_and_hides_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-c", HANGS, tmp_path], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (1, "the verdict\n", "")
