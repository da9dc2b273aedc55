"""The job: ranks of a supervised run, nodes and GPUs of Slurm, and the environment's variables.

It refuses to know how a job is submitted (`spmd_rl.world.slurm`).
"""

from __future__ import annotations

import shlex

from spmd_rl.config.prime_rl.table_run import EXPORT
from spmd_rl.config.prime_rl.work import Work

COMPONENTS = ("trainer", "orchestrator", "inference")
TRAIN_NODES = ("deployment.num_train_nodes", "sft.deployment.num_nodes")
TRAIN_GPUS = ("deployment.num_train_gpus", "sft.deployment.num_gpus")


def processes(w: Work) -> None:
    """Ranks of `main.py sft`: all of them train, and their number is not in the config."""
    per_node = w.get("deployment.gpus_per_node", 8)
    if w.get("deployment.type") == "multi_node":
        nodes = w.one(*TRAIN_NODES, default=2)
        if not w.on("slurm"):
            w.by_hand("the number of processes", f"torchrun --nnodes {nodes} --nproc-per-node {per_node}: all train")
        _slurm(w, nodes, per_node)
    else:
        gpus = w.one(*TRAIN_GPUS, default=1)
        if gpus > 1 and not w.on("slurm"):
            w.by_hand("the number of processes", f"torchrun --nproc-per-node {gpus}: all train")
        _slurm(w, 1, gpus)


def job(w: Work) -> None:
    """Slurm's share of a run of RL. One process per GPU, and one more on the first node for rank 0."""
    ranks = w.written["deployment.train_ranks"] + w.written["deployment.infer_ranks"]
    ranks += w.written.get("deployment.teacher_ranks", 0)
    per_node = w.one("deployment.gpus_per_node", "inference.deployment.gpus_per_node", default=8)
    several = w.get("deployment.type") == "multi_node" or w.given("deployment.num_train_nodes")
    nodes = -(-ranks // per_node) if several else 1
    if several and w.on("slurm") and ranks % per_node:
        w.by_hand("deployment.infer_ranks", f"{ranks} ranks do not fill {nodes} nodes of {per_node} GPUs")
    _slurm(w, nodes, per_node if several else ranks)


def _slurm(w: Work, nodes: int, gpus: int) -> None:
    if w.on("slurm"):
        w.put("slurm.nodes", nodes, "slurm")
        w.put("slurm.gpus", gpus, "slurm")
        w.put("slurm.partition", w.get("slurm.partition", "cluster"), "slurm.partition")
    if template := w.get("slurm.template_path"):
        w.put("slurm.template_path", template, "slurm.template_path")
        w.by_hand("slurm.template_path", "the template's variables are others here: begin with launch/slurm.sbatch.j2")
    commands = []
    tables = ["env_vars", *(f"{part}.env_vars" for part in COMPONENTS)]
    for table in tables:
        if not w.get(table):
            continue
        if not w.on("slurm"):
            w.note("never", table, "environment variables are not part of a config", EXPORT)
            continue
        commands += [f"export {name}={shlex.quote(str(value))}" for name, value in w.get(table).items()]
        if table != "env_vars":
            w.note("differs", table, "all processes of a node have one environment")
    commands += [command] if (command := w.get("slurm.pre_run_command")) else []
    if commands:
        w.put("slurm.pre_run", "\n".join(commands), *tables, "slurm.pre_run_command")
