"""Which tests of this folder fit the installed verifiers: from 0.4 on it is another library than before."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    IS_CLASSIC = tuple(map(int, version("verifiers").split(".")[:2])) < (0, 4)
except PackageNotFoundError:
    IS_CLASSIC = False  # the tests say that it is missing
collect_ignore_glob = ["test_verifiers.py", "test_verifiers_[!c]*.py"] if IS_CLASSIC else ["test_verifiers_classic.py"]
