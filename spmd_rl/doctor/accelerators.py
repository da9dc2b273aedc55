"""Checks: the driver, CUDA, NCCL and the GPUs of this machine.

Where there is no GPU and none is asked for, that is one line and no fault. It refuses to know about links between GPUs.
"""

from __future__ import annotations

import re

from spmd_rl.doctor.finding import Check, Finding, fail, ok, warn
from spmd_rl.doctor.place import Place

FREE_SHARE = 0.9  # of a GPU's memory, before a run: less means that somebody else is on it
GIB = 2**30


def driver(place: Place) -> Finding:
    """The kernel's driver, and whether it serves the CUDA that torch was built with."""
    version, facts = _driver_version(place), place.trial("torch").facts
    cuda, serves = facts.get("cuda", ""), facts.get("driver_cuda", "")
    if not version:
        wanted = place.wishes.device == "cuda"
        to_do = "install NVIDIA's driver (in a container: start it with --gpus all), or deployment.device = 'cpu'"
        return fail("no NVIDIA driver, and the config wants CUDA", to_do) if wanted else ok("none: all on the CPU")
    if not cuda:
        return warn(f"{version}, but torch is a CPU build", "to use the GPUs: SPMD_RL_ACCELERATOR=gpu launch/setup.sh")
    if not serves:
        return fail(
            f"{version}, but libcuda can't be loaded", "reinstall it; in a container, start that with --gpus all"
        )
    if int(serves.split(".")[0]) < int(cuda.split(".")[0]):
        return fail(
            f"{version} serves CUDA {serves}, torch is built with {cuda}",
            f"update the driver to one for CUDA {cuda.split('.')[0]}, or install an older build of torch and vLLM",
        )
    return ok(f"{version} (CUDA {serves}; torch is built with {cuda})")


def gpus(place: Place) -> Finding:
    """Enough of them for the ranks, and empty."""
    found, facts = place.gpus(), place.trial("torch").facts
    if not found:
        if facts.get("cuda") and _driver_version(place):
            hidden = place.environ.get("CUDA_VISIBLE_DEVICES")
            why = f" with CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None else ""
            return fail(f"torch sees none{why}", "run nvidia-smi: it says what is wrong; unset CUDA_VISIBLE_DEVICES")
        if place.wishes.device == "cuda":
            return fail("none, and the config wants CUDA", "deployment.device = 'cpu', or another machine")
        return ok("none")
    names = ", ".join(sorted({gpu["name"] for gpu in found}))
    free = [gpu["free"] / GIB for gpu in found]
    value = f"{len(found)} × {names}, {min(free):.0f} to {max(free):.0f} GiB free"
    taken = [index for index, gpu in enumerate(found) if gpu["free"] < FREE_SHARE * gpu["total"]]
    if taken:
        return warn(f"{value}; in use: {', '.join(map(str, taken))}", "nvidia-smi shows by whom; end it or wait")
    if len({gpu["name"] for gpu in found}) > 1:
        return warn(value, "the slowest one sets the pace: choose equal ones with CUDA_VISIBLE_DEVICES")
    return ok(value)


def nccl(place: Place) -> Finding:
    """The NCCL that torch brings."""
    version = place.trial("torch").facts.get("nccl", "")
    if not place.gpus():
        return ok("not needed without GPUs: gloo")
    if not version:
        return fail("torch has none", "install the CUDA build of torch from PyPI")
    return ok(version)


def _driver_version(place: Place) -> str:
    path = place.root / "proc/driver/nvidia/version"
    if not path.exists():
        return ""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", path.read_text())
    return found.group() if found else "unknown version"


CHECKS = (
    Check("accelerators", "driver", driver),
    Check("accelerators", "GPUs", gpus),
    Check("accelerators", "NCCL", nccl),
)
