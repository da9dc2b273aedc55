"""From `SourceConfig` to an environment: a built-in name, `package.module:Class`, `file.py:Class`, another library's
(`verifiers:taskset`, `reasoning_gym:name`, `gym:make`), a class of tools (`methods:path`), or a dataset.

It refuses to know what environments do. Invariant: every error names the source and says what would work.
"""

from __future__ import annotations

import difflib
import inspect
from pathlib import Path
from typing import Any

from spmd_rl.config.imports import load_object, module_of_file, module_of_package
from spmd_rl.config.tree import SourceConfig
from spmd_rl.envs.adapters.verifiers import environment_class
from spmd_rl.envs.dataset import Dataset
from spmd_rl.envs.protocol import Environment, Tokenizer

WHAT = "environment"
BUILT_IN = {
    "reverse": "spmd_rl.envs.reverse:Reverse",
    "copy": "spmd_rl.envs.builtin.copy:Copy",
    "sort": "spmd_rl.envs.builtin.sort:Sort",
    "arithmetic": "spmd_rl.envs.builtin.arithmetic:Arithmetic",
    "count": "spmd_rl.envs.builtin.count:Count",
    "guess": "spmd_rl.envs.builtin.guess:Guess",
    "wordle": "spmd_rl.envs.builtin.wordle:Wordle",
    "calculator": "spmd_rl.envs.builtin.calculator:Calculator",
    "python": "spmd_rl.envs.builtin.python:Python",
    "repo_fix": "spmd_rl.envs.builtin.repo_fix:RepoFix",
    "command": "spmd_rl.envs.builtin.command:Command",
    "tictactoe": "spmd_rl.envs.builtin.tictactoe:TicTacToe",
}
ADAPTERS = {  # prefix of a name → class, and the argument that the rest of the name is
    "reasoning_gym": ("spmd_rl.envs.adapters.reasoning_gym:ReasoningGym", "dataset"),
    "gym": ("spmd_rl.envs.adapters.gym:Gym", "make"),
    "methods": ("spmd_rl.envs.adapters.methods:Methods", "make"),
}


def load(source: SourceConfig, tokenizer: Tokenizer, seed: int) -> Environment:
    """The environment `Class(tokenizer, seed, **source.args)`, or the rows of `source.data`.

    Raises ValueError (unknown name, no such class), ImportError (the module doesn't import) or TypeError (wrong args).
    """
    if source.data:
        return Dataset(tokenizer, seed, source)
    if source.env.startswith("verifiers:"):
        taskset = source.env.removeprefix("verifiers:")
        return _made(source, environment_class(taskset), tokenizer, seed, {"taskset": taskset, **source.args})
    prefix, _, rest = source.env.partition(":")
    if prefix in ADAPTERS:
        path, key = ADAPTERS[prefix]
        return _made(source, load_object(path, WHAT), tokenizer, seed, {key: rest, **source.args})
    target = BUILT_IN.get(source.env, source.env)
    if ":" not in target:
        near = difflib.get_close_matches(source.env, BUILT_IN, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"built in: {', '.join(sorted(BUILT_IN))}."
        raise ValueError(
            f"unknown environment {source.env!r}; {hint} Your own goes as 'package.module:Class' or 'file.py:Class'"
        )
    location, _, name = target.rpartition(":")
    module = module_of_file(Path(location), WHAT) if location.endswith(".py") else module_of_package(location, WHAT)
    cls = getattr(module, name, None)
    if not inspect.isclass(cls):
        classes = [n for n, c in vars(module).items() if inspect.isclass(c) and c.__module__ == module.__name__]
        has = ", ".join(classes) or "none"
        raise ValueError(f"environment {source.env!r}: {location} has no class {name!r}; its classes: {has}")
    return _made(source, cls, tokenizer, seed, source.args)


def _made(source: SourceConfig, cls: Any, tokenizer: Tokenizer, seed: int, args: dict[str, Any]) -> Environment:
    try:
        inspect.signature(cls).bind(tokenizer, seed, **args)
    except TypeError as error:
        raise TypeError(f"environment {source.env!r}: {error}; args may hold {_takes(cls)}") from None
    environment: Environment = cls(tokenizer, seed, **args)  # nothing but use shows that it keeps to the protocol
    return environment


def _takes(cls: type) -> str:
    """The keyword arguments after (tokenizer, seed), with their defaults, for error messages."""
    parameters = list(inspect.signature(cls).parameters.values())[2:]
    names = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    return ", ".join(names) or "nothing"
