"""Environments are found by name, by package and by file, and every mistake is answered with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.config.tree import SourceConfig
from spmd_rl.envs.load import load
from spmd_rl.envs.reverse import Reverse

OWN = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Own:
    tokenizer: object
    seed: int
    size: int = 3
"""


class OneToken:
    """Every text is one token."""

    def encode(self, text: str) -> list[int]:
        return [0]

    def decode(self, token_ids: list[int]) -> str:
        return ""


def test_built_in_by_name() -> None:
    env = load(SourceConfig(env="reverse", args={"letters": "abc", "length": 2}), OneToken(), seed=4)
    assert isinstance(env, Reverse)
    assert env.seed == 4
    assert len(env.words["train"]) + len(env.words["heldout"]) == 6


def test_by_package_path() -> None:
    assert isinstance(load(SourceConfig(env="spmd_rl.envs.reverse:Reverse"), OneToken(), 0), Reverse)


def test_by_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    env = load(SourceConfig(env=f"{tmp_path}/mine.py:Own", args={"size": 5}), OneToken(), 2)
    assert (env.seed, env.size) == (2, 5)


@pytest.mark.parametrize(
    ("env", "args", "error", "message"),
    [
        ("revers", {}, ValueError, "did you mean 'reverse'"),
        ("zzzzzz", {}, ValueError, "built in: .*reverse"),
        ("no_such_package.mod:Class", {}, ImportError, "No module named 'no_such_package'"),
        ("no/such/file.py:Class", {}, ImportError, "does not exist"),
        ("spmd_rl.envs.reverse:Revers", {}, ValueError, "has no class 'Revers'; its classes: Reverse"),
        (
            "reverse",
            {"leters": "ab"},
            TypeError,
            "argument 'leters'; args may hold letters='abcdefgh'",
        ),
        ("reverse", {"seed": 3}, TypeError, "multiple values for argument 'seed'"),
    ],
)
def test_mistakes(env: str, args: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(SourceConfig(env=env, args=args), OneToken(), 0)


def test_a_broken_file_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module_at_all")
    with pytest.raises(ImportError, match=r"broken\.py does not import: ModuleNotFoundError: .*no_such_module_at_all"):
        load(SourceConfig(env=f"{tmp_path}/broken.py:Own"), OneToken(), 0)
