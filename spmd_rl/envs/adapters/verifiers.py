"""Environments of the package `verifiers`: which of its two libraries is installed, and errors that say the way out.

Two libraries have borne the name. From 0.4 on it is `verifiers.v1`: tasksets, played by `verifiers_env`. Up to 0.3.1 it
was what packages with a `load_environment` were written for, played by `verifiers_classic`. One source name stands for
both: `verifiers:<name>` is of the library that is installed.

It refuses to know how either is played. Importing it imports neither.
"""

from __future__ import annotations

import difflib
import importlib.util
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

EXTRA = "pip install 'spmd_rl[verifiers]'"
FIRST_V1 = (0, 4)
CLASSIC = "0.3.1"  # the last one


def environment_class(name: str) -> type:
    """The class that plays `verifiers:<name>` with the library that is installed.

    ImportError without the package, or when the environment is of the other library.
    """
    source = f"verifiers:{name}"
    installed = installed_version(source)
    is_v1 = tuple(int(part) for part in installed.split(".")[:2]) >= FIRST_V1
    classic = _has(name, "load_environment")
    if is_v1 and classic:
        raise ImportError(
            f"{source} is a classic environment (it has load_environment), and verifiers {installed} is installed, "
            f"which only plays tasksets: pip install 'verifiers=={CLASSIC}' in a venv of its own, or use a version of "
            "the environment that is a taskset"
        )
    if is_v1:
        from spmd_rl.envs.adapters.verifiers_env import VerifiersEnvironment

        return VerifiersEnvironment
    if classic is False:
        raise ImportError(
            f"{source} has no load_environment, so it is a taskset for verifiers 0.4, and {installed} is installed: "
            f"{EXTRA}"
        )
    from spmd_rl.envs.adapters.verifiers_classic import ClassicEnvironment

    return ClassicEnvironment


def installed_version(source: str) -> str:
    """Of verifiers. ImportError says how to get it."""
    try:
        return version("verifiers")
    except PackageNotFoundError:
        raise ImportError(f"{source} needs the package verifiers, which is not installed: {EXTRA}") from None


@contextmanager
def explained(source: str, *names: str) -> Iterator[None]:
    """Around the import of plugins: what is not found, and what is found but does not import, becomes a ValueError."""
    wanted = {module_of(name) for name in names if name}
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else error.name) or ""
        if missing.split(".")[-1] not in wanted:
            raise ValueError(
                f"{source} does not import: it needs {missing or error}, which is not installed"
            ) from error
        near = difflib.get_close_matches(missing.split(".")[-1], _modules(), n=3, cutoff=0.6)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(
            f"{source}: there is no module {missing!r}{hint} Install the package that holds it, or put its folder on "
            "PYTHONPATH"
        ) from error
    except (AttributeError, TypeError, ImportError) as error:  # what verifiers says of a module that is no plugin
        raise ValueError(f"{source}: {error}") from error


def module_of(name: str) -> str:
    """The module of an id, as verifiers finds it: owner and version are left out."""
    return name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def _has(name: str, attribute: str) -> bool | None:
    """Whether the module has it, imported or not; None: there is no such module."""
    try:
        found = importlib.util.find_spec(module_of(name))
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    try:
        return hasattr(importlib.import_module(found.name), attribute)
    except Exception:  # it will be imported again, where errors are explained
        return None


def _modules() -> list[str]:
    """Names of top-level modules, and of the tasksets that come with verifiers."""
    names = [module.name for module in pkgutil.iter_modules()]
    bundled = importlib.util.find_spec("verifiers.v1.tasksets")
    if bundled is not None and bundled.submodule_search_locations:
        names += [module.name for module in pkgutil.iter_modules(bundled.submodule_search_locations)]
    return names
