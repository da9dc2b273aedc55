#!/usr/bin/env bash
# Everything that must hold before a change goes in: lint, format, types, unit tests, tests of process groups with every
# collective cross-checked by torch, and whole runs as a user starts them. Tests run in two processes, files of those
# that start ranks as a whole in one. Runs all parts, then fails if one failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
closing=() # the last line of each part
failed=0

part() { # part NAME command…
    local name=$1 verdict=ok
    shift
    printf '\n== %s: %s\n' "$name" "$*"
    "$@" 2>&1 | tee "$results/out" || { verdict=FAILED && failed=1; }
    closing+=("$(printf '%-7s%-24s%s' "$verdict" "$name" "$(tail -n 1 "$results/out")")")
}

part "lint" ruff check .
part "format" ruff format --check .
part "types" mypy
part "unit tests" pytest -n 2 tests --ignore tests/distributed --ignore tests/e2e
part "groups under DETAIL" env TORCH_DISTRIBUTED_DEBUG=DETAIL pytest -n 2 --dist loadfile tests/distributed
part "whole runs" pytest -n 2 --dist loadfile --durations 20 tests/e2e

printf '\n== result\n'
printf '%s\n' "${closing[@]}"
exit "$failed"
