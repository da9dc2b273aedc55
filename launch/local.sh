#!/usr/bin/env bash
# This machine alone: as many processes as the config needs, or NPROC of them.
#
#   bash launch/local.sh rl --config configs/quickstart.toml [--KEY VALUE ...]
#
#   NPROC    processes; else the fewest that the config can run on
#   PYTHON   interpreter; else .venv's, else python3
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$root/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi
exec "$PYTHON" "$root/spmd_rl/main.py" "$@" ${NPROC:+--nproc-per-node "$NPROC"}
