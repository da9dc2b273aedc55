"""The configuration: one tree of frozen dataclasses, read from TOML and flags, checked, and shown again.

Imports no torch, so that a laptop can check a config in under a second.
"""

from spmd_rl.config.check import check
from spmd_rl.config.commands import ALL_TRAIN, command_of, config_for
from spmd_rl.config.errors import ConfigError
from spmd_rl.config.load import Arguments, load, split_argv
from spmd_rl.config.show import config_hash, to_toml, write_toml
from spmd_rl.config.tree import Config

__all__ = [
    "ALL_TRAIN",
    "Arguments",
    "Config",
    "ConfigError",
    "check",
    "command_of",
    "config_for",
    "config_hash",
    "load",
    "split_argv",
    "to_toml",
    "write_toml",
]
