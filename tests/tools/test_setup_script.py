"""launch/setup.sh with a stand-in for Python: what it installs, when it installs nothing, how it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

# Acts as `python` and, copied into .venv, as the environment's python. It writes down what pip was asked for.
STUB = """#!/bin/bash
[ -z "$STUB_TOO_OLD" ] || { [ "$1" != --version ] || echo "Python 3.9.1"; exit 1; }
case "$1 $2" in
    "--version "*) echo "Python 3.11.7" ;;
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "command = python -m venv $3" > "$3/pyvenv.cfg" ;;
    "-m pip")
        shift 2
        echo "$*" >> "$STUB_CALLS"
        echo "WARNING: Location 'somewhere' is ignored: it is neither a file nor a directory."
        sleep "${STUB_SLEEP:-0}"
        case "$*" in
            *"${STUB_FAILS_ON:-nothing at all}"*) echo "ERROR: No matching distribution found"; exit 1 ;;
        esac ;;
esac
"""
PROGRAMS = ("bwrap", "chromium", "slurmctld", "munged", "tc")
TORCH = "install --progress-bar off torch==2.13.0"
UNINSTALL = "uninstall -y torchvision torchaudio torchcodec"


class Checkout:
    """A folder with the script, stand-ins first in PATH, and the pip calls that were made."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin = root / "repo", root / "bin"
        self.bin.mkdir()
        (self.root / "launch").mkdir(parents=True)
        shutil.copy(REPO / "launch/setup.sh", self.root / "launch")
        shutil.copy(REPO / "pyproject.toml", self.root)
        self.calls_file = root / "calls"
        self.command("nvidia-smi", "#!/bin/bash\nexit 9\n")
        self.command("python-stub", STUB)
        for program in PROGRAMS:
            self.command(program, "#!/bin/bash\n")

    def command(self, name: str, script: str) -> None:
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def start(self, *args: str, **env: str) -> subprocess.Popen[str]:
        own = {"PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHON": "python-stub", "STUB_CALLS": str(self.calls_file)}
        return subprocess.Popen(
            ["bash", "launch/setup.sh", *args],
            cwd=self.root,
            env=os.environ | own | env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *args: str, **env: str) -> tuple[int, str]:
        process = self.start(*args, **env)
        out, err = process.communicate()
        return process.returncode, out + err

    def take_calls(self) -> list[str]:
        """The pip calls since the last time, without the repository's path."""
        if not self.calls_file.exists():
            return []
        calls = self.calls_file.read_text().replace(str(self.root), "REPO").splitlines()
        self.calls_file.unlink()
        return calls


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_cpu_gets_its_own_torch_build_and_loses_the_vision_packages(checkout):
    code, output = checkout.run()
    assert code == 0, output
    torch, package, removed = checkout.take_calls()
    assert torch.startswith(TORCH)
    assert package == "install --progress-bar off -e REPO[cpu]"
    assert removed == UNINSTALL
    assert "WARNING" not in output
    assert "WARNING" in (checkout.root / ".venv/install.log").read_text()


def test_cuda_machine_gets_vllm_for_cuda(checkout):
    checkout.command("nvidia-smi", "#!/bin/bash\necho 'GPU 0'\n")
    code, output = checkout.run()
    assert code == 0, output
    assert checkout.take_calls() == ["install --progress-bar off -e REPO[gpu]"]


def test_tests_get_torchtitan_without_what_its_trainer_asks_for(checkout):
    checkout.run("dev")
    assert checkout.take_calls()[-1] == "install --progress-bar off --no-deps torchtitan==0.3.0"
    extra = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]["titan"]
    assert "torchtitan==0.3.0" in extra  # one version in both places


def test_second_run_installs_nothing(checkout):
    checkout.run("dev")
    assert "install --progress-bar off -e REPO[cpu,dev]" in checkout.take_calls()
    for args in ([], ["dev"]):  # the smaller set is there as well
        code, output = checkout.run(*args)
        assert (code, output, checkout.take_calls()) == (0, "", [])


def test_a_larger_set_or_a_new_pyproject_installs_again(checkout):
    checkout.run()
    checkout.take_calls()
    checkout.run("dev")
    assert "install --progress-bar off -e REPO[cpu,dev]" in checkout.take_calls()
    with open(checkout.root / "pyproject.toml", "a") as pyproject:
        pyproject.write("# changed\n")
    checkout.run()
    assert "install --progress-bar off -e REPO[cpu]" in checkout.take_calls()


def test_a_failed_installation_leaves_no_stamp(checkout):
    code, output = checkout.run(STUB_FAILS_ON="-e")
    assert code != 0
    assert "ERROR: No matching distribution found" in output
    assert "just run it again" in output
    checkout.take_calls()
    code, _ = checkout.run()
    assert code == 0
    assert "install --progress-bar off -e REPO[cpu]" in checkout.take_calls()


def test_missing_cpu_wheel_names_the_way_out_before_anything_large(checkout):
    code, output = checkout.run(STUB_FAILS_ON="torch==")
    assert code != 0
    assert "PIP_EXTRA_INDEX_URL" in output and "PIP_FIND_LINKS" in output
    assert "WARNING: Location" not in output
    assert len(checkout.take_calls()) == 1


def test_two_starts_at_once_install_once(checkout):
    starts = [checkout.start(STUB_SLEEP="0.3") for _ in range(2)]
    assert [start.wait() for start in starts] == [0, 0]
    for start in starts:
        start.communicate()
    assert checkout.take_calls().count(UNINSTALL) == 1


def test_old_python_is_refused_by_name(checkout):
    code, output = checkout.run(STUB_TOO_OLD="1")
    assert code != 0
    assert "PYTHON=python-stub is not usable (Python 3.9.1)" in output
    assert "3.11 or newer" in output
    assert checkout.take_calls() == []


def test_old_python_is_refused_also_where_an_environment_exists(checkout):
    checkout.run()
    code, output = checkout.run(STUB_TOO_OLD="1")
    assert code != 0 and "not usable" in output


def test_no_python_at_all_says_what_to_install(checkout):
    for name in ("python3.12", "python3.11", "python3"):
        checkout.command(name, "#!/bin/bash\nexit 1\n")
    code, output = checkout.run(PYTHON="")
    assert code != 0
    assert "no Python 3.11 or newer" in output and "PYTHON=" in output


def test_full_disk_is_noticed_before_the_download(checkout):
    checkout.command("df", "#!/bin/bash\necho Filesystem\necho /dev/x 9000000 8000000 3900000 90% /\n")
    code, output = checkout.run()
    assert code != 0
    assert "3 GB of free disk" in output and "needs 4 GB" in output
    assert checkout.take_calls() == []


def test_environment_of_a_moved_repository_is_made_anew(checkout):
    checkout.run()
    checkout.take_calls()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    code, output = checkout.run()
    assert code == 0, output
    assert "install --progress-bar off -e REPO[cpu]" in checkout.take_calls()
    assert str(checkout.root) in (checkout.root / ".venv/pyvenv.cfg").read_text()


def test_unknown_arguments_are_refused(checkout):
    assert "usage" in checkout.run("everything")[1]
    code, output = checkout.run(SPMD_RL_ACCELERATOR="tpu")
    assert code != 0 and "choose cpu or gpu" in output


def hidden(checkout, *names: str) -> str:
    """A PATH without these programs."""
    bare = checkout.root.parent / "bare"
    bare.mkdir()
    for name in names:
        (checkout.bin / name).unlink(missing_ok=True)
    for folder in reversed(os.environ["PATH"].split(":")):
        for program in Path(folder).glob("*") if Path(folder).is_dir() else ():
            if program.name not in names:
                (bare / program.name).unlink(missing_ok=True)
                (bare / program.name).symlink_to(program)
    return f"{checkout.bin}:{bare}"


def test_programs_that_tests_need_are_installed(checkout):
    checkout.command("apt-get", '#!/bin/bash\necho "$*" >> "$STUB_CALLS"\n')
    checkout.command("id", "#!/bin/bash\necho 0\n")
    path = hidden(checkout, *PROGRAMS)
    assert checkout.run(PATH=path)[0] == 0
    assert not any("bubblewrap" in call for call in checkout.take_calls()), "a run needs none of them"
    assert checkout.run("dev", PATH=path)[0] == 0
    programs = "bubblewrap chromium slurm-wlm munge iproute2"
    assert checkout.take_calls()[:2] == ["update -qq", f"install -y -qq --no-install-recommends {programs}"]


def test_who_may_not_install_programs_is_told_which(checkout):
    checkout.command("id", "#!/bin/bash\necho 1000\n")
    code, output = checkout.run("dev", PATH=hidden(checkout, "bwrap"))
    assert code != 0 and "the tests need bubblewrap" in output and "apt install bubblewrap" in output


def test_who_may_not_install_slurm_goes_on_without(checkout):
    checkout.command("id", "#!/bin/bash\necho 1000\n")
    code, output = checkout.run("dev", PATH=hidden(checkout, "slurmctld", "munged", "tc"))
    assert code == 0, output
