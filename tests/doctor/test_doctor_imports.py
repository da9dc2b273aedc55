"""Imports that raise, crash, exit, hang or chatter: each is a finding, and none hides another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.doctor.imports import Imports
from tests.doctor.places import write

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "spmd_rl/main.py"
BROKEN = {
    "flash_attn": "raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEab\\nsecond line')",
    "deep_ep": "import os; os.kill(os.getpid(), 11)",
    "deep_gemm": "import sys; sys.exit(3)",
    "torchtitan": 'print(\'{"name": "deep_ep"}\', flush=True)',
    "flash_attn_interface": "import os; os._exit(5)",
}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of broken packages that stands before all others."""
    for name, text in BROKEN.items():
        write(tmp_path / f"{name}.py", text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_every_way_to_break(broken: Path) -> None:
    imports = Imports([*BROKEN, "flash_attn.cute"])
    assert imports.of("flash_attn").error == "ImportError: undefined symbol: _ZN3c104cuda9SetDeviceEab"
    assert "SIGSEGV" in imports.of("deep_ep").error
    assert imports.of("deep_gemm").error == "SystemExit: 3"
    assert imports.of("torchtitan").error == "" and not imports.of("torchtitan").absent
    assert "code 5" in imports.of("flash_attn_interface").error
    assert imports.of("flash_attn.cute").absent or imports.of("flash_attn.cute").error


def test_an_import_that_hangs_is_named_and_ended(broken: Path) -> None:
    write(
        broken / "deep_gemm.py",
        f"import os, time\nopen({str(broken / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)",
    )
    imports = Imports(["torchtitan", "deep_gemm", "flash_attn"], deadline_s=5.0)
    assert imports.of("torchtitan").error == ""
    assert "not done within 5 s" in imports.of("deep_gemm").error
    assert imports.of("flash_attn").error
    assert not Path(f"/proc/{(broken / 'pid').read_text()}").exists()


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess:
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "PYTHONPATH")} | environ
    return subprocess.run(
        [sys.executable, str(MAIN), "doctor", *arguments], env=variables, capture_output=True, text=True, timeout=300
    )


def test_the_program_answers_where_nothing_else_can_be_imported(broken: Path, tmp_path: Path) -> None:
    for name in ("tyro", "numpy", "msgspec", "torch", "vllm"):
        write(broken / f"{name}.py", f"raise ImportError('{name} is broken')")
    write(broken / "transformers.py", "raise RuntimeError('operator torchvision::nms does not exist')")
    done = doctor("--config", "x.toml", "--json", str(tmp_path / "report.json"), PYTHONPATH=str(broken))
    assert done.returncode == 1, done.stderr
    said = {line["what"]: line for line in json.loads((tmp_path / "report.json").read_text())["lines"]}
    for what, says in {
        "config": "numpy is broken",
        "torch": "torch is broken",
        "vllm": "vllm is broken",
        "transformers": "torchvision::nms",
    }.items():
        assert said[what]["status"] == "FAIL" and says in said[what]["value"], said[what]
    assert said["python"]["status"] == "ok"  # the others were looked at all the same
    assert "pip uninstall -y torchvision" in done.stdout and done.stdout.strip().splitlines()[-1].startswith("not fit")
    assert "Traceback" not in done.stderr


def test_this_machine(tmp_path: Path) -> None:
    """The real thing; what it thinks of this machine is its own business, but it must add up."""
    done = doctor("--json", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == (not report["fit"]) and "Traceback" not in done.stderr, done.stderr
    statuses = [line["status"] for line in report["lines"]]
    assert report["fit"] == ("FAIL" not in statuses)
    assert all(line["to_do"] for line in report["lines"] if line["status"] != "ok")
    assert not any("could not be checked" in line["value"] for line in report["lines"])
    said = {line["what"]: line for line in report["lines"]}
    assert said["torch"]["status"] == said["transformers"]["status"] == "ok"  # else no test here would run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--json"], "--json needs a value"),
        (["--for", "dance"], "choose one of"),
        (["--json", "--for"], "needs a value"),
    ],
)
def test_questions_that_make_no_sense(arguments: list[str], says: str) -> None:
    done = doctor(*arguments)
    assert done.returncode == 2 and says in done.stderr


def test_a_report_that_can_not_be_written_is_an_error(broken: Path) -> None:
    for name in ("torch", "vllm", "transformers"):
        write(broken / f"{name}.py", "")
    done = doctor("--json", "/proc/report.json", PYTHONPATH=str(broken))
    assert done.returncode == 1 and "name a file that can be written" in done.stderr
