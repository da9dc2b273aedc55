"""What must be equal on all ranks, and what had better be: code, config, versions, environment variables.

Facts are short texts; `compare` turns those that differ into findings which name the ranks of each value. It refuses to
know how facts travel.
"""

from __future__ import annotations

import hashlib
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmd_rl.doctor.finding import Finding, Line, fail, ok, warn
from spmd_rl.doctor.place import Wishes
from spmd_rl.world.fingerprint import code_hash, folder_hash, versions

GROUP = "the same everywhere"
VARIABLES = ("NCCL_", "GLOO_", "VLLM_", "TORCH_NCCL_", "OMP_NUM_THREADS", "CUDA_DEVICE_", "PYTORCH_")
PER_HOST = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")  # may well differ
SHOWN = 8  # ranks of one value

TO_DO = {
    "code": "update the clone on all hosts to one commit, with no local changes",
    "config": "give every host the same --config files and flags",
    "model": "copy the model folder anew from one host to the others",
    "NCCL": "install the same torch everywhere: ranks of different NCCL versions hang or crash",
    "python": "use one version of Python on all hosts",
}
MINOR = ("kernel", "processor", "GPUs", "driver", "environment")


def of_rank(environ: Mapping[str, str], wishes: Wishes, config: str) -> dict[str, str]:
    """The facts of this process; `config` names the config: its hash, or why there is none."""
    variables = {key: value for key, value in environ.items() if key.startswith(VARIABLES) and key not in PER_HOST}
    facts = {
        "code": code_hash(),
        "config": config,
        "python": platform.python_version(),
        "environment": ", ".join(f"{key}={value}" for key, value in sorted(variables.items())) or "nothing set",
    }
    if wishes.model and Path(wishes.model).is_dir():
        facts["model"] = _model_hash(Path(wishes.model))
    return facts | versions()


def of_host(facts: Mapping[str, object]) -> dict[str, str]:
    """Those that one process per host finds out; `facts` are those of torch's trial (`trial.py`)."""
    gpus = facts.get("gpus", [])
    names = ", ".join(gpu["name"] for gpu in gpus) if isinstance(gpus, list) else ""
    return {
        "NCCL": str(facts.get("nccl") or "none"),
        "GPUs": names or "none",
        "driver": str(facts.get("driver_cuda") or "none"),
        "kernel": platform.release(),
        "processor": platform.machine(),
    }


def compare(facts: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[Line]:
    """One line per fact that differs among `names` (of ranks or hosts), and one for all that are equal."""
    lines, equal = [], []
    for what in dict.fromkeys(key for known in facts for key in known):
        holders: dict[str, list[str]] = defaultdict(list)
        for name, known in zip(names, facts, strict=True):
            holders[known.get(what, "missing")].append(name)
        if len(holders) == 1:
            equal.append(what)
        else:
            lines.append(Line(GROUP, what, _differs(what, holders)))
    return [Line(GROUP, "equal", ok(", ".join(equal) or "nothing")), *lines]


def _differs(what: str, holders: Mapping[str, list[str]]) -> Finding:
    largest_first = sorted(holders.items(), key=lambda entry: -len(entry[1]))
    value = "; ".join(f"{value} on {_few(names)}" for value, names in largest_first)
    if what in MINOR:
        return warn(value, "make it equal, or know why it is not")
    return fail(value, TO_DO.get(what, f"install one version of {what} on all hosts"))


def _few(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _model_hash(folder: Path) -> str:
    """Of small files by content, of weights by size: reading those would take minutes."""
    sizes = "".join(f"{path.name}{path.stat().st_size}" for path in sorted(folder.glob("*.safetensors")))
    return hashlib.sha256((folder_hash(folder, "*.json") + sizes).encode()).hexdigest()[:12]
