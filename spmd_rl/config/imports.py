"""Users' own objects by import path: `package.module:name` or `file.py:name`.

It refuses to know what the objects are for. Invariant: every error names the key it came from and says what would work.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load_object(path: str, what: str) -> Any:
    """The object at `path`; `what` names its origin in errors, such as a config key.

    Raises ValueError (not an import path, or no such name in the module) or ImportError (the module doesn't import).
    """
    location, colon, name = path.rpartition(":")
    if not colon or not location or not name:
        raise ValueError(f"{what} = {path!r}: write 'package.module:name' or 'file.py:name'")
    module = module_of_file(Path(location), what) if location.endswith(".py") else module_of_package(location, what)
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
        raise ValueError(f"{what} = {path!r}: {location} has no {name!r}; it has {', '.join(own) or 'nothing'}")
    return getattr(module, name)


def module_of_package(name: str, what: str) -> ModuleType:
    """An installed module."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{what}: module {name!r} does not import: {error}; it must be installed, or on PYTHONPATH"
        ) from error


def module_of_file(path: Path, what: str) -> ModuleType:
    """A file as a module. Its folder is not put on the path: one file, or else a package."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ImportError(f"{what}: file {path} does not exist (relative paths start at the working directory)")
    spec = importlib.util.spec_from_file_location(f"spmd_rl_own_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ImportError(f"{what}: file {path} does not import: {type(error).__name__}: {error}") from error
    return module
