"""Keys of prime-rl's `sft.toml`. What it shares with the trainer is read there; its own tables lie under `sft`."""

from __future__ import annotations

from spmd_rl.config.prime_rl import table_run as run
from spmd_rl.config.prime_rl.keys import SECTION, needless, never, ruled, same, under
from spmd_rl.config.prime_rl.table_orchestrator import EVAL

MIXED = "one table of rows is trained on"
MIX = "write the rows into one *.jsonl or *.parquet file"
ONLINE = "main.py sft evaluates no rollouts"
LATER_ON = "main.py eval on an export (ckpt.export_interval)"
ROLES = "data.loss_on knows assistant, last_assistant and all"

DATA = (
    ruled("type", ("sft", "fake"), "data.type"),
    same("name", str, "data.name"),
    ruled("splits", (list, None), "data.split", "one"),
    never("subsets", (list, None), MIXED, MIX, (None, ["default"])),
    never("probabilities", (list, None), MIXED, MIX, (None,)),
    needless("stopping_strategy", ("first_exhausted", "all_exhausted"), MIXED),
    never("shuffle", bool, "rows are always shuffled, by the seed", "leave it out", (True,)),
    ruled("seed", int, "seed"),
    ruled("batch_size", int, "data.batch_size", "128 where nothing is said"),
    ruled("seq_len", int, "seq_len", "128 where nothing is said"),
    needless("micro_batch_size", int, "rows are packed to seq_len"),
    needless("num_workers", int, "rows are made ready beside the training"),
    *(ruled(f"loss_mask.{role}", bool, "data.loss_on", ROLES) for role in ("system", "user", "assistant", "tool")),
    ruled("length", ("fixed", "variable"), "data.fake_length and fake_min_length"),
    needless("input_ids", ("increasing", "random"), "random"),
)
SFT = under(
    "sft",
    (
        *under("data", DATA),
        ruled("val", (SECTION, None), "data.validation"),
        ruled("val.interval", int, "data.eval_interval", "50 where nothing is said"),
        needless("val.eval_on_start", bool, "validated at the start and at the end"),
        *under("val.data", tuple(row for row in DATA if row.path in ("name", "splits", "type"))),
        *under(
            "val.data",
            tuple(
                needless(r.path, r.kinds, "as in training") for r in DATA if r.path not in ("name", "splits", "type")
            ),
        ),
        *(never(row.path, row.kinds, ONLINE, LATER_ON) for row in EVAL if row.path == "eval"),
        *(needless(row.path, row.kinds, ONLINE) for row in EVAL if row.path != "eval"),
        needless("eval.concurrency", dict, ONLINE),
        needless("eval.env_server_base_port", int, ONLINE),
        needless("eval.client", dict, ONLINE),
        never("inference", dict, ONLINE, LATER_ON),
        *run.BROADCAST,
        never(
            "renderer",
            dict,
            "chats are rendered by the tokenizer's template",
            "see model.tokenizer",
            ({}, {"name": "auto"}),
        ),
        ruled("deployment.num_gpus", int, "the number of processes"),
        ruled("deployment.num_nodes", int, "slurm.nodes"),
        needless("deployment.num_eval_gpus", int, ONLINE),
        needless("deployment.num_eval_nodes", int, ONLINE),
    ),
)
