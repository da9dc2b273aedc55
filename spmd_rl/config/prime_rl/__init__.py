"""Configs of prime-rl as ours: one table of its keys, and a few rules for what several keys say together.

The table follows prime-rl's repository (github.com/PrimeIntellect-ai/prime-rl) at commit 559b44772, 2026-08-21 (0.8.1
in development), and names of 0.4 to 0.6 that its memory and deployment guides used. `tools/convert_config.py` is
the command, docs/migrating.md shows the table.
"""

from spmd_rl.config.prime_rl.convert import ROOT, Converted, convert
from spmd_rl.config.prime_rl.read import read_files, read_table

__all__ = ["ROOT", "Converted", "convert", "read_files", "read_table"]
