"""Checks: what is optional. For each back end: usable, or why not, what it would be good for and what to install.

Absence is no fault unless the config asks for it; being there and broken is one. It refuses to know how a back end is
used.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spmd_rl.doctor.finding import Check, Finding, fail, ok, warn
from spmd_rl.doctor.place import Place

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM_S = 10.0
BOX_S = 30.0
ANY_GPU, HOPPER = (0, 0), (9, 0)


@dataclass(frozen=True)
class BackEnd:
    """Something optional."""

    name: str  # as a config's wishes name it
    purpose: str
    install: str
    why_not: Callable[[Place], str]  # empty: it is usable; `absent` when it is not there at all
    version: Callable[[Place], str] = lambda place: ""

    def look(self, place: Place) -> Finding:
        """A fault only where it is broken, or where the config asks for it."""
        why, asked_by = self.why_not(place), place.wishes.back_ends.get(self.name, "")
        if not why:
            return ok(f"usable {self.version(place)}".strip())
        if asked_by:
            return fail(f"{why}; {asked_by} asks for it", self.install)
        if why == ABSENT:
            return ok(why, f"for {self.purpose}: {self.install}")
        if why.startswith(NO_USE):
            return ok(why)
        return warn(why, f"{self.install}; or uninstall it, if you do not need it for {self.purpose}")


ABSENT = "not installed"
NO_USE = "of no use here"


def kernels(module: str, capability: tuple[int, int]) -> Callable[[Place], str]:
    """A compiled package for GPUs of at least this compute capability."""

    def why_not(place: Place) -> str:
        trial = place.trial(module)
        if trial.absent:
            return ABSENT
        gpus = place.gpus()
        if not gpus:
            return f"{NO_USE}: there is no GPU"
        if min(tuple(gpu["capability"]) for gpu in gpus) < capability:
            return f"{NO_USE}: these GPUs are older than compute capability {capability[0]}.{capability[1]}"
        return trial.error

    return why_not


def package(name: str) -> Callable[[Place], str]:
    """A distribution that an extra of this project asks for, in a version that it allows."""

    def why_not(place: Place) -> str:
        from packaging.requirements import Requirement

        version = place.version(name)
        if not version:
            return ABSENT
        for requirement in map(Requirement, place.requires(f"spmd_rl[{name}]")):
            found = place.version(requirement.name)
            if not found:
                return f"{requirement.name}, which it needs, is missing"
            if not requirement.specifier.contains(found, prereleases=True):
                return f"{requirement.name} {found} is not {requirement.specifier}"
        return ""

    return why_not


def imported(module: str) -> Callable[[Place], str]:
    """A package that only has to import."""
    return lambda place: place.trial(module).error


def version_of(*names: str) -> Callable[[Place], str]:
    """The version of the first of these distributions that is installed."""
    return lambda place: next(filter(None, map(place.version, names)), "")


def sandbox(place: Place) -> str:
    """A real box, in which a program runs: whether user namespaces are allowed shows in no other way."""
    if shutil.which("bwrap") is None:
        return ABSENT
    from spmd_rl.envs.sandbox import SandboxError, open_sandbox

    async def attempt() -> str:
        async with open_sandbox("bwrap") as box:
            result = await box.exec(["true"])
        return "" if result.code == 0 else f"a program in the box ended with code {result.code}"

    try:
        return asyncio.run(asyncio.wait_for(attempt(), BOX_S))
    except SandboxError as error:
        return str(error)
    except TimeoutError:
        return f"no box within {BOX_S:g} s"


def docker(place: Place) -> str:
    """The command, and a daemon behind it. Many have the one without the other and never miss it."""
    why = _program(("docker",), ("version", "--format", "{{.Server.Version}}"))
    return why if why in ("", ABSENT) else f"{NO_USE}: {why}"


def chromium(place: Place) -> str:
    """Under any of its names."""
    return _program(CHROMIUMS, ("--version",))


def _program(names: Sequence[str], arguments: Sequence[str]) -> str:
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        return ABSENT
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {PROGRAM_S:g} s"
    except OSError as error:
        return f"{path}: {error.strerror}"
    said = (done.stderr or done.stdout).strip().splitlines()
    return "" if done.returncode == 0 else (said[-1] if said else f"ended with code {done.returncode}")


ATTENTION = "faster attention over packed rows"
BACK_ENDS = (
    BackEnd("triton", "kernels that are written in it", "pip install triton", kernels("triton", ANY_GPU)),
    BackEnd(
        "flash-attn",
        ATTENTION,
        "pip install -e '.[flash]'",
        kernels("flash_attn", (8, 0)),
        version_of("flash-attn"),
    ),
    BackEnd(
        "flash-attn 3",
        f"{ATTENTION} on Hopper",
        "build the folder hopper/ of flash-attention's repository",
        kernels("flash_attn_interface", HOPPER),
        version_of("flash-attn-3", "flash_attn_3"),
    ),
    BackEnd(
        "flash-attn 4",
        f"{ATTENTION} on Hopper and Blackwell",
        "pip install flash-attn-4",
        kernels("flash_attn.cute", HOPPER),
        version_of("flash-attn-4"),
    ),
    BackEnd(
        "deep_ep",
        "faster expert parallelism between GPUs",
        "build DeepEP (CUDA 12.3, NCCL 2.30.4 or newer)",
        kernels("deep_ep", HOPPER),
        version_of("deep_ep"),
    ),
    BackEnd(
        "deep_gemm",
        "8-bit matrix products on Hopper and Blackwell",
        "build DeepGEMM (CUDA 12.3 or newer)",
        kernels("deep_gemm", HOPPER),
        version_of("deep_gemm"),
    ),
    BackEnd(
        "torchtitan",
        "further model families (trainer.model.impl = titan), comparisons",
        "pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 (it needs Triton)",
        imported("torchtitan"),
        version_of("torchtitan"),
    ),
    BackEnd(
        "verifiers",
        "the tasks verifiers:…",
        "pip install -e '.[verifiers]'",
        package("verifiers"),
        version_of("verifiers"),
    ),
    BackEnd(
        "reasoning-gym",
        "the tasks reasoning_gym:…",
        "pip install -e '.[reasoning-gym]'",
        package("reasoning-gym"),
        version_of("reasoning-gym"),
    ),
    BackEnd(
        "gymnasium",
        "the tasks gym:gymnasium:…",
        "pip install -e '.[gymnasium]'",
        package("gymnasium"),
        version_of("gymnasium"),
    ),
    BackEnd("wandb", "log.wandb", "pip install -e '.[wandb]'", package("wandb"), version_of("wandb")),
    BackEnd(
        "bubblewrap",
        "tasks in which a model writes programs (the sandbox)",
        "apt install bubblewrap util-linux mount, and allow user namespaces",
        sandbox,
    ),
    BackEnd("docker", "the sandbox 'docker'", "install docker, start its daemon, join its group", docker),
    BackEnd("chromium", "the tests of the rollout viewer", "apt install chromium", chromium),
)

CHECKS = tuple(Check("back ends", back_end.name, back_end.look) for back_end in BACK_ENDS)
