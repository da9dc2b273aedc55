#!/usr/bin/env bash
# One of several machines: start this by hand (or by any tool) on each of them, with the same arguments.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash launch/node.sh rl --config FILE.toml
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash launch/node.sh rl --config FILE.toml
#
#   MASTER_ADDR         of the machine with NODE_RANK=0, as the others reach it
#   NPROC, FIRST_NPROC  processes on this machine, and on the first one; else one per GPU, and on the first machine one
#                       more for the orchestrator
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME   network interface; else the one over which the machines have met
#   SPMD_RL_MEET_S      seconds to wait for the other machines (60)
#   PYTHON              interpreter; else .venv's, else python3
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

[ -n "${NNODES:-}" ] || die "NNODES is not set: how many machines there are"
nproc=${NPROC:-}
if [ "${NODE_RANK:-0}" = 0 ]; then nproc=${FIRST_NPROC:-$nproc}; fi
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$root/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi
exec "$PYTHON" "$root/spmd_rl/main.py" "$@" ${nproc:+--nproc-per-node "$nproc"}
