"""Small repositories with a bug: they fail, their repair passes, they have their size, and git knows its files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.envs.builtin.code_calls import RUNNER
from spmd_rl.envs.builtin.git_files import repository
from spmd_rl.envs.builtin.repo_fix import RepoFix, steps_of
from spmd_rl.envs.builtin.repo_functions import LONG
from spmd_rl.envs.builtin.repo_pieces import places, written
from spmd_rl.envs.builtin.repo_tasks import MODULES, Size, draw_repository, right_sources
from tests.envs.builtin.repos import made
from tests.envs.fakes import byte_tokenizer

SIZES = [
    Size(1, 1, 1, 0),
    Size(1, 1, 9, 2),
    Size(1, 3, 2, 3),
    Size(2, 1, 1, 0),
    Size(2, 2, 1, 1),
    Size(2, 4, 3, 5),
    Size(2, 6, 4, 2),
]


def passing(folder: Path, data: dict[str, Any], sources: Mapping[str, str]) -> int:
    """How many hidden calls return what is right, outside of any box."""
    for path, text in sources.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    work = {"form": "files", "calls": data["calls"]}
    argv = [sys.executable, "-B", *RUNNER[1:]]
    said = subprocess.run(argv, cwd=folder, input=ascii(work), capture_output=True, text=True, check=True).stdout
    values = [json.loads(line) for line in said.splitlines()[1:]]
    return sum(value == [right] for value, right in zip(values, data["right"], strict=True))


def is_well(folder: Path, data: dict[str, Any]) -> bool:
    argv = [sys.executable, "-B", *data["command"].split()[1:]]
    return subprocess.run(argv, cwd=folder, capture_output=True, check=False).returncode == 0


@given(size=st.sampled_from(SIZES), seed=st.integers(0, 2**32))
@settings(max_examples=7, deadline=None)
def test_a_repository_fails_and_its_repair_passes(tmp_path_factory: Any, size: Size, seed: int) -> None:
    data = draw_repository(size, np.random.default_rng(seed))
    assert data == draw_repository(size, np.random.default_rng(seed)) == json.loads(json.dumps(data))
    count, bug = len(data["calls"]), data["bug"]
    buggy = {path: data["files"][path] for path in data["sources"]}
    assert buggy[bug["path"]].count(bug["old"]) == 1
    folder = tmp_path_factory.mktemp("repo")
    assert passing(folder, data, data["files"]) == data["passing"] < count
    assert not is_well(folder, data)
    for mistake in bug["mistakes"]:
        wrong = buggy | {bug["path"]: buggy[bug["path"]].replace(bug["old"], mistake)}
        assert passing(folder, data, wrong) < count
    assert passing(folder, data, right_sources(data)) == count
    assert is_well(folder, data)
    assert len(data["sources"]) == (1 if size.files == 1 else size.files + 1)


@given(size=st.sampled_from(SIZES), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_repository_has_its_size(size: Size, seed: int) -> None:
    data = draw_repository(size, np.random.default_rng(seed))
    bug, trail = data["bug"], data["trail"]
    text = "".join(data["files"][path] for path in data["sources"])
    assert text.count("def ") == size.files * size.functions + size.depth
    tested = {name for name, _ in data["calls"]}
    assert len(tested) == size.files * size.functions and len(data["calls"]) == 8 * len(tested)
    assert data["files"][bug["path"]].count(bug["old"]) == 1 and bug["mistakes"]
    steps = [step for step, _ in steps_of(data)]
    assert steps[-3:] == ["edit", "bash", "end"] and (steps[0] == "bash") == (size.files > 1)
    modules = sorted((path for path in data["sources"] if "__init__" not in path), key=place_of)
    assert len(modules) == size.files
    at = modules.index(bug["path"])
    assert trail == modules[at : at + size.depth + 1][::-1]  # each caller stands in the next file, while there is one
    for path in modules:
        for name in re.findall(r"^from \w+\.(\w+) import", data["files"][path], re.MULTILINE):
            assert place_of(name) < place_of(path)


def test_there_is_always_something_to_get_wrong() -> None:
    rng = np.random.default_rng(0)
    assert all(draw_repository(Size(2, 1, 1, 0), rng)["bug"]["mistakes"] for _ in range(300))


def place_of(path: str) -> int:
    """Of a module among those that may be imported by later ones."""
    return [*MODULES, "lib"].index(Path(path).stem)


@pytest.mark.parametrize("piece", LONG, ids=[piece.name for piece in LONG])
def test_every_place_has_wrong_texts_that_show(piece: Any) -> None:
    def values(source: str) -> list[Any]:
        functions: dict[str, Any] = {}
        exec(source, functions)
        chance = Random(0)
        found = []
        for _ in range(150):
            arguments = piece.arguments(chance)
            try:
                found.append(functions[piece.name](*arguments))
            except Exception as error:
                found.append({"raised": type(error).__name__})
        return found

    right = values(written(piece.source))
    assert json.loads(json.dumps(right)) == right and not any(type(v) is dict and "raised" in v for v in right)
    for place, texts in enumerate(places(piece.source)):
        assert len(set(texts)) == len(texts) >= 3
        for text in texts[1:]:
            assert values(written(piece.source, place, text)) != right


@pytest.mark.parametrize("knobs", [{}, {"level": 2, "files": 2, "depth": 1}])
def test_held_out_repositories_are_never_trained_with_any_bug(knobs: dict[str, Any]) -> None:
    env, again, other = made(**knobs), made(**knobs), RepoFix(byte_tokenizer(), 1, show_tools=False, **knobs)
    seen: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for split, found in seen.items():
        for index in range(40):
            task = env.task(index, split)
            assert task == again.task(index, split)
            found.add(json.dumps(right_sources(task.data)))
            if split == "heldout":
                assert task == other.task(index, split)
    assert min(map(len, seen.values())) > 10 and not seen["train"] & seen["heldout"]


def test_the_files_of_git_are_those_that_git_makes(tmp_path: Path) -> None:
    files = {"a.py": "x\n", "a/b.py": "é\n", "a/c/d.txt": "", "a-b/e": "1", "README.md": "# x\n", "z" * 90: "z"}
    for path, data in repository(files).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)

    def git(command: str) -> str:
        argv = ["git", *command.split()]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert git("status --porcelain") == git("fsck --strict") == git("diff HEAD") == ""
    assert git("ls-files").splitlines() == sorted(files)
    assert (
        git("log --format=%an,%ae,%s,%aI,%cI")
        == "dev,dev@localhost,start,2025-01-01T00:00:00+00:00,2025-01-01T00:00:00+00:00\n"
    )
    tree, entries = git("rev-parse HEAD^{tree}"), git("ls-files --stage")
    (tmp_path / ".git/index").unlink()
    git("add --all")
    assert (git("write-tree"), git("ls-files --stage")) == (tree, entries)
    (tmp_path / "a.py").write_text("y\n")
    assert git("status --porcelain") == " M a.py\n"
