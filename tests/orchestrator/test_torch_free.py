"""Rank 0's own modules are read without torch and without an engine, as it really happens in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

IMPORT_EACH = """
import importlib, json, pkgutil, sys
import spmd_rl.orchestrator as package
heavy = {"torch", "vllm", "transformers", "jax", "tensorflow"}
guilty = {}
for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
    new = heavy & set(sys.modules) - {name for names in guilty.values() for name in names}
    guilty[module.name] = sorted(new)
print(json.dumps(guilty))
"""


def test_no_module_of_the_orchestrator_imports_torch_or_an_engine() -> None:
    process = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    guilty = json.loads(process.stdout)
    assert {f"spmd_rl.orchestrator.{path.stem}" for path in (ROOT / "spmd_rl/orchestrator").glob("[!_]*.py")} == set(
        guilty
    )
    assert not any(guilty.values()), guilty
