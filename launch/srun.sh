#!/usr/bin/env bash
# One task of srun on every node of a Slurm job: work out which node this is, then go on as launch/node.sh does.
# The job that main.py submits runs it; in an allocation or a script of one's own:
#
#   srun --ntasks-per-node=1 bash launch/srun.sh rl --config FILE.toml [--KEY VALUE ...]
#
#   NPROC, FIRST_NPROC        processes on a node, and on the first one; else as launch/node.sh has it
#   MASTER_ADDR, MASTER_PORT  else the first node of the job, and a port that follows from the job's number
set -euo pipefail

die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] && [ -n "${SLURM_NODEID:-}" ] ||
    die "this is no task of Slurm: start it by srun --ntasks-per-node=1, or use launch/node.sh by hand"
[ "${SLURM_NTASKS:-1}" -le "${SLURM_STEP_NUM_NODES:-1}" ] ||
    die "$SLURM_NTASKS tasks on $SLURM_STEP_NUM_NODES nodes: every node runs one, so say srun --ntasks-per-node=1"

# By the address that Slurm itself uses: a node's name need not resolve.
first_address() {
    local first
    first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
    scontrol --oneliner show node "$first" | grep -o ' NodeAddr=[^ ]*' | cut -d = -f 2
}

export NNODES=$SLURM_STEP_NUM_NODES NODE_RANK=$SLURM_NODEID
export MASTER_ADDR=${MASTER_ADDR:-$(first_address)}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000 + SLURM_STEP_ID % 100))}
exec bash "$(dirname "${BASH_SOURCE[0]}")/node.sh" "$@"
