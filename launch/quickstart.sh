#!/usr/bin/env bash
# From a fresh checkout to a trained tiny model: installs into .venv, makes the model, trains it with RL on three
# processes (orchestrator, trainer, inference). Arguments go to the run: bash launch/quickstart.sh --max-steps 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1 # spinning threads of several ranks on few cores make a step 10 times slower

bash launch/setup.sh
model=outputs/quickstart-model seed=${SEED:-0}
if [ "$(cat $model/made-with-seed 2>/dev/null)" != "$seed" ]; then
    .venv/bin/python tools/make_tiny.py --out $model --seed "$seed"
    echo "$seed" >$model/made-with-seed
fi
# Standalone takes a free port; the address is given because a laptop's host name often does not resolve.
exec .venv/bin/torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 3 \
    spmd_rl/main.py rl --config configs/quickstart.toml "$@"
