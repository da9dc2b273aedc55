"""The rules of the house, read from the source of every module of the package.

Each rule is a function from a source tree to a list of violations; the package has none, and a small tree that breaks
the rule has one, so no rule can go blind unnoticed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "spmd_rl"

# Imports go downward only: a part may import itself and what stands on lower floors.
FLOORS = [
    {"config", "rollouts"},
    {"world", "models", "observe", "data"},
    {"envs"},
    {"algorithms"},
    {"orchestrator", "inference", "trainer", "doctor"},
    {"colocated"},
    {"main"},
]
TORCH_FREE = {"config", "rollouts", "data", "algorithms", "orchestrator", "envs", "observe"}
TORCH = {"torch", "torchvision", "vllm"}
MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 70


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str  # dotted
    is_package: bool
    text: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The part of the house that the module belongs to."""
        return part_of(self.name)


def part_of(name: str) -> str:
    """`spmd_rl.world.clock` belongs to `world`, `spmd_rl` to nothing (an empty string)."""
    return name.partition(".")[2].partition(".")[0]


def modules(root: Path) -> dict[str, Module]:
    """Every module under root/spmd_rl by its dotted name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        found[name] = Module(name, is_package, text, ast.parse(text, str(path)))
    return found


def imported(module: Module, known: dict[str, Module], *, at_import: bool) -> set[str]:
    """Dotted names that a module imports: everywhere, or only those that importing the module runs."""
    names: set[str] = set()
    for node in _executed(module.tree.body) if at_import else ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.name.split(".")
                above = above[: len(above) - node.level + module.is_package]
                base = ".".join([*above, *([node.module] if node.module else [])])
            submodules = {f"{base}.{alias.name}" for alias in node.names} & set(known)
            names.update(submodules)
            if len(submodules) < len(node.names):
                names.add(base)
    return names


def _executed(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes but the insides of functions and of `if TYPE_CHECKING:`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _executed(node.orelse)
            continue
        yield node
        for _, value in ast.iter_fields(node):
            if (
                isinstance(value, list)
                and value
                and isinstance(value[0], ast.stmt | ast.excepthandler | ast.match_case)
            ):
                yield from _executed(value)


def upward_imports(root: Path) -> list[str]:
    """Imports of the same floor or of a higher one. Imports inside functions count."""
    floor = {part: level for level, parts in enumerate(FLOORS) for part in parts}
    known = modules(root)
    wrong = []
    for module in known.values():
        if module.part and module.part not in floor:
            wrong.append(f"{module.name} stands on no floor: add it to FLOORS")
            continue
        for name in imported(module, known, at_import=False):
            if name.split(".")[0] != PACKAGE:
                continue
            part = part_of(name)
            if part != module.part and floor.get(part, -1) >= floor.get(module.part, -1):
                wrong.append(f"{module.name} imports {name}")
    return wrong


def torch_at_import(root: Path) -> list[str]:
    """Modules of the torch-free parts whose import runs an import of torch, their own or that of a module they need."""
    known = modules(root)
    wrong = []
    for module in known.values():
        if module.part not in TORCH_FREE:
            continue
        seen, queue = {module.name}, [(module.name, module.name)]
        while queue:
            name, way = queue.pop()
            for target in imported(known[name], known, at_import=True):
                if target.split(".")[0] in TORCH:
                    wrong.append(f"{way} -> {target}")
                for needed in _with_parents(target):
                    if needed in known and needed not in seen:
                        seen.add(needed)
                        queue.append((needed, f"{way} -> {needed}"))
    return wrong


def _with_parents(name: str) -> list[str]:
    """Importing a.b.c runs a and a.b first."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def circular_imports(root: Path) -> list[str]:
    """A cycle among modules that import each other when they are imported."""
    known = modules(root)
    graph = {name: imported(module, known, at_import=True) & set(known) for name, module in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def vague_names(root: Path) -> list[str]:
    """Modules called utils, whose content belongs to some idea with a name."""
    return [name for name in modules(root) if name.rpartition(".")[2] in ("utils", "util", "helpers", "misc")]


def long_files(root: Path) -> list[str]:
    """Files that hold more than one idea."""
    lines = {name: len(module.text.splitlines()) for name, module in modules(root).items()}
    return [f"{name} has {count} lines" for name, count in lines.items() if count > MAX_FILE_LINES]


def long_functions(root: Path) -> list[str]:
    """Functions that do not fit on a screen."""
    wrong = []
    for module in modules(root).values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or 0) - node.lineno + 1
                if count > MAX_FUNCTION_LINES:
                    wrong.append(f"{module.name}.{node.name} has {count} lines")
    return wrong


def silent_modules(root: Path) -> list[str]:
    """Modules with code and without a docstring."""
    return [name for name, module in modules(root).items() if module.tree.body and not ast.get_docstring(module.tree)]


RULES: list[Callable[[Path], list[str]]] = [
    upward_imports,
    torch_at_import,
    circular_imports,
    vague_names,
    long_files,
    long_functions,
    silent_modules,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule):
    assert rule(ROOT) == []


def test_the_house_is_found():
    assert {"spmd_rl", "spmd_rl.config.tree", "spmd_rl.rollouts.types"} <= set(modules(ROOT))


BROKEN = {
    "role imports role": (upward_imports, {"trainer/a.py": "from spmd_rl.inference import b"}, "spmd_rl.inference"),
    "lazily too": (upward_imports, {"trainer/a.py": "def f():\n    import spmd_rl.inference.b"}, "spmd_rl.inference.b"),
    "upward": (upward_imports, {"config/a.py": "from spmd_rl.world.mesh import Mesh"}, "spmd_rl.world.mesh"),
    "relative": (
        upward_imports,
        {"config/a.py": "from ..world import mesh", "world/mesh.py": ""},
        "spmd_rl.world.mesh",
    ),
    "same floor": (upward_imports, {"config/a.py": "import spmd_rl.rollouts"}, "spmd_rl.rollouts"),
    "unknown part": (upward_imports, {"cellar/a.py": ""}, "spmd_rl.cellar.a stands on no floor"),
    "torch": (torch_at_import, {"config/a.py": "import torch.nn"}, "spmd_rl.config.a -> torch.nn"),
    "torch in a class": (
        torch_at_import,
        {"envs/a.py": "class A:\n    from torch import nn"},
        "spmd_rl.envs.a -> torch",
    ),
    "torch in a try": (
        torch_at_import,
        {"envs/a.py": "try:\n    import torch\nexcept ImportError:\n    pass"},
        "torch",
    ),
    "torch after a failure": (torch_at_import, {"envs/a.py": "try:\n    x\nexcept E:\n    import vllm"}, "-> vllm"),
    "torch far away": (
        torch_at_import,
        {"orchestrator/a.py": "from spmd_rl.world.b import c", "world/b.py": "import torch"},
        "spmd_rl.orchestrator.a -> spmd_rl.world.b -> torch",
    ),
    "torch in a parent": (
        torch_at_import,
        {"orchestrator/a.py": "from spmd_rl.world.b import c", "world/b.py": "", "world/__init__.py": "import torch"},
        "spmd_rl.orchestrator.a -> spmd_rl.world -> torch",
    ),
    "circle": (
        circular_imports,
        {"world/a.py": "from . import b", "world/b.py": "import spmd_rl.world.a"},
        "spmd_rl.world.a",
    ),
    "utils": (vague_names, {"world/utils.py": ""}, "spmd_rl.world.utils"),
    "long file": (long_files, {"world/a.py": "x = 1\n" * 421}, "421 lines"),
    "long function": (
        long_functions,
        {"world/a.py": "class A:\n  def f(self):\n" + "    x = 1\n" * 70},
        "spmd_rl.world.a.f has 71",
    ),
    "no docstring": (silent_modules, {"world/a.py": "x = 1"}, "spmd_rl.world.a"),
}

FINE = {
    "trainer/a.py": '"""Doc."""\nimport torch\nfrom spmd_rl.world import b\nimport spmd_rl.config.c\nfrom .d import e',
    "trainer/d.py": "",
    "world/b.py": "",
    "envs/f.py": '"""Doc."""\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import torch',
    "main.py": '"""Doc."""\nfrom spmd_rl.trainer import a',
}


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(("rule", "files", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_seen(tmp_path, rule, files, says):
    plant(tmp_path, files)
    (violation,) = rule(tmp_path)
    assert says in violation


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_tree_that_keeps_the_rules(tmp_path, rule):
    plant(tmp_path, FINE)
    assert rule(tmp_path) == []
