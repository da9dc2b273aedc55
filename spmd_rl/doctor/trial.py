"""A process that tries imports, so that one that raises, crashes or hangs is a finding and no accident.

    python -P trial.py NAME...

For each name it writes one JSON line when it begins and one when it knows: the error (empty: it works), whether the
package is absent, and for torch what is to be known of the accelerators. It is run as a file and imports nothing of
this package. Invariant: what the imported libraries print never gets between the lines.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
from typing import Any

# A package may import and still be useless: these statements reach what is needed of it.
STATEMENTS = {
    "torch": "import torch",
    "transformers": "from transformers import Qwen3ForCausalLM",
    "vllm": "from vllm import EngineArgs; from vllm.v1.engine.llm_engine import LLMEngine",
    "triton": "import triton",
    "flash_attn": "from flash_attn import flash_attn_varlen_func",
    "flash_attn_interface": "import flash_attn_interface",
    "flash_attn.cute": "import flash_attn.cute",
    "deep_ep": "from deep_ep import ElasticBuffer",
    "deep_gemm": "import deep_gemm",
    "torchtitan": "import torchtitan",
}
_PR_SET_PDEATHSIG = 1


def attempt(name: str) -> dict[str, Any]:
    """What comes of importing it: {"absent", "error", "facts"}."""
    try:
        if importlib.util.find_spec(name) is None:
            return {"absent": True, "error": "not installed", "facts": {}}
    except ModuleNotFoundError:  # the parent of a dotted name
        return {"absent": True, "error": "not installed", "facts": {}}
    except Exception as error:
        return {"absent": False, "error": _said(error), "facts": {}}
    try:
        exec(STATEMENTS[name], {})
    except BaseException as error:  # some libraries call exit() when they dislike a machine
        return {"absent": False, "error": _said(error), "facts": {}}
    try:
        facts = _accelerators() if name == "torch" else {}
    except Exception as error:
        return {"absent": False, "error": f"it imports, but asking for accelerators fails: {_said(error)}", "facts": {}}
    return {"absent": False, "error": "", "facts": facts}


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'without a word'}"


def _accelerators() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "driver_cuda": _driver_cuda(),
        "nccl": "",
        "gpus": [],
    }
    if torch.version.cuda and torch.cuda.is_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            facts["gpus"].append({"name": name, "free": free, "total": total, "capability": list(capability)})
    return facts


def _driver_cuda() -> str:
    """The newest CUDA that the driver serves, such as 13.0; empty without a driver."""
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return ""
    except OSError:
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def main(names: list[str]) -> None:
    """Try them in order."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for name in names:
        answers.write(json.dumps({"begins": name}) + "\n")
        answers.write(json.dumps({"name": name, **attempt(name)}) + "\n")
    answers.flush()
    os._exit(0)  # no destructor of a half-broken library gets a say


if __name__ == "__main__":
    main(sys.argv[1:])
