"""Keys of prime-rl that speak of the whole run: the top of an `rl.toml`, and tables that several parts have alike."""

from __future__ import annotations

from spmd_rl.config.prime_rl.keys import SECTION, Key, later, needless, never, ruled, same, under

EXPORT = "export them in the shell that starts the run"
TRANSPORT = "weights and batches travel by torch.distributed, over the groups of the mesh: there is nothing to address"
HTTP = "the engines run inside the program: there is no server, no client and no router"
ONE_LOG = "every rank writes logs/rank_*.log; there are no levels"
WEIGHTS = "their checkpoints are not read here: start from exported weights, model.name = FOLDER in Hugging Face format"

ENV_VARS = ruled("env_vars", dict, "slurm.pre_run", f"in a job; else {EXPORT}")

HOSTED = "opd's teacher runs on the trainer ranks"

LOG = tuple(needless(f"log.{name}", object, ONE_LOG) for name in ("level", "vf_level", "json_logging", "log_data"))
LOG += (
    needless("log.interval", (int, float), "a line is printed for every step"),
    needless("log.ranks_filter", list, "only rank 0 writes to the console"),
)

WANDB = (
    ruled("monitors.wandb", (SECTION, None), "log.wandb"),
    ruled("monitors.wandb.project", (str, None), "log.wandb_project"),
    *(
        never(
            f"monitors.wandb.{name}",
            kinds,
            "there is no key for it",
            f"export {variable}, which W&B reads by itself",
            harmless=(None, False),
        )
        for name, kinds, variable in (
            ("entity", (str, None), "WANDB_ENTITY"),
            ("name", (str, None), "WANDB_NAME"),
            ("group", (str, None), "WANDB_RUN_GROUP"),
            ("tags", (list, None), "WANDB_TAGS"),
            ("offline", bool, "WANDB_MODE=offline"),
        )
    ),
)
MONITORS = (
    *WANDB,
    needless("monitors.file", (SECTION, None), "metrics.jsonl is always written"),
    needless("monitors.file.path", str, "metrics.jsonl lies in output_dir"),
)
PRIME = (
    never("monitors.prime", (SECTION, None), "no platform is spoken to", "use log.wandb, or tensorboard/", (None,)),
    needless("monitors.prime.name", (str, None), "no platform is spoken to"),
)

CKPT = (
    needless("ckpt.weights", (dict, None), "0.6: checkpoints are sharded, exports are Hugging Face's"),
    needless("ckpt.weights_only", bool, "0.5: exports are ckpt.export_interval"),
    needless("ckpt.skip_gather_master_weights", bool, "0.5: checkpoints are sharded"),
    ruled("ckpt", (SECTION, None), "ckpt.interval", "without an interval prime-rl saves at the end only"),
    ruled("ckpt.interval", (int, None), "ckpt.interval"),
    ruled("ckpt.keep_last", (int, None), "ckpt.keep", "absent: all stay, there; 2 stay here where nothing is said"),
    ruled("ckpt.keep_interval", (int, None), "ckpt.keep_every"),
)
CKPT_FOLDER = never(
    "ckpt.output_dir", (str, None), "checkpoints lie in output_dir", "make output_dir/checkpoints a link", (None,)
)
SKIP = tuple(
    never(f"ckpt.skip_{name}", bool, "a resumed run goes on whole", "start a new run from exported weights", (False,))
    for name in ("progress", "scheduler", "dataloader", "optimizer", "buffer")
)
RESUME = (
    never("resume", (SECTION, None), WEIGHTS, "then --ckpt.resume latest goes on with a run of this program", (None,)),
    never("resume.step", (int, None), WEIGHTS, "--ckpt.resume FOLDER for a run of this program", (None,)),
    never("resume.dir", (str, None), WEIGHTS, "--ckpt.resume FOLDER for a run of this program", (None,)),
)
HEARTBEAT = (
    never(
        "heartbeat.url",
        str,
        "a hung or dead rank ends the run within deadlines.heartbeat_s, and nobody is called",
        "watch the exit code of the job",
    ),
)

BROADCAST = (
    needless("weight_broadcast.type", ("filesystem", "nccl", "nixl"), TRANSPORT),
    needless("weight_broadcast.host", str, TRANSPORT),
    needless("weight_broadcast.port", int, TRANSPORT),
    needless("weight_broadcast.timeout", int, "deadlines.step_s bounds a weight pull"),
    needless("weight_broadcast.session_id", str, TRANSPORT),
    needless("weight_broadcast.inference_world_size", int, TRANSPORT),
    later(
        "weight_broadcast.quantize_in_weight_transfer",
        bool,
        "weights travel in trainer.model.dtype; FP8 is not built",
        "leave it out: weights.mode and weights.staging say how they are swapped",
        (False,),
    ),
)
ROLLOUTS = (
    needless("rollout_transport.type", ("filesystem", "zmq"), TRANSPORT),
    needless("rollout_transport.host", str, TRANSPORT),
    needless("rollout_transport.port", int, TRANSPORT),
    needless("rollout_transport.hwm", int, TRANSPORT),
)

TOKENIZER = (
    ruled("tokenizer.name", (str, None), "model.tokenizer"),
    never(
        "tokenizer.trust_remote_code",
        (bool, None),
        "no code of a model's repository is run",
        "use a model that transformers knows",
        (None, False),
    ),
    never(
        "tokenizer.chat_template",
        (str, None),
        "the template is the tokenizer's",
        "save it as chat_template.jinja in a copy of the tokenizer's folder and name that as model.tokenizer",
        (None,),
    ),
)
VISION = (
    never("vlm", (SECTION, None), "text only", "train the language model alone", (None,)),
    needless("vlm.vision_encoder_attr", str, "text only"),
    needless("vlm.language_model_attr", str, "text only"),
    needless("vlm.freeze_vision_encoder", bool, "text only"),
)

SLURM = (
    ruled("slurm", (SECTION, None), "slurm.nodes and gpus"),
    *(
        same(f"slurm.{name}", (str, None), f"slurm.{name}")
        for name in ("job_name", "nodelist", "exclude", "account", "time")
    ),
    ruled("slurm.partition", str, "slurm.partition", "`cluster` where nothing is said"),
    ruled("slurm.template_path", (str, None), "slurm.template_path", "with other variables: launch/slurm.sbatch.j2"),
    ruled("slurm.pre_run_command", (str, None), "slurm.pre_run"),
    needless("slurm.project_dir", str, "the job runs in the folder it was submitted from"),
    needless("slurm.cleanup_grace_period", int, "a run that fails ends on all nodes; complete checkpoints are on disk"),
    needless("slurm.shared_fs", bool, "no environment is installed by a job"),
    needless("slurm.dry_run", bool, "--dry-run shows what would be started"),
)

DEPLOYMENT = (
    ruled("deployment.type", ("single_node", "multi_node"), "deployment"),
    ruled("deployment.gpus_per_node", int, "deployment"),
    ruled("deployment.num_train_gpus", int, "deployment.train_ranks", "rank 0 is one process more, on the CPU"),
    ruled("deployment.num_infer_gpus", int, "deployment.infer_ranks"),
    ruled("deployment.num_train_nodes", int, "deployment.train_ranks", "× gpus_per_node; into slurm.nodes too"),
    ruled("deployment.num_infer_nodes", (int, None), "deployment.infer_ranks", "× replicas × gpus_per_node"),
    ruled("deployment.num_infer_replicas", int, "deployment.infer_ranks"),
    same(
        "deployment.nodes_per_fsdp_group", (int, None), "trainer.parallel.nodes_per_fsdp_group", read=lambda n: n or 0
    ),
    needless("deployment.orchestrator_on_inference", bool, "rank 0 is a process of its own, on the CPU"),
    # Names of earlier versions.
    ruled("trainer_gpu_ids", list, "deployment.train_ranks", "0.4: their number"),
    ruled("inference_gpu_ids", list, "deployment.infer_ranks", "0.4: their number"),
    *(
        never(name, kinds, HOSTED, "deployment.teacher_ranks, for orchestrator.algorithm.type = sft", (None,))
        for name, kinds in (
            ("deployment.num_teacher_gpus", (int, None)),
            ("deployment.num_teacher_nodes", (int, None)),
            ("teacher_gpu_ids", (list, None)),
        )
    ),
    never("teacher_inference", (dict, None), HOSTED, "orchestrator.algorithm.reference is its name", (None,)),
)

RUN = (
    ruled("output_dir", str, "output_dir"),
    ruled("run.name", (str, None), "output_dir", "the run's folder is output_dir/run.name"),
    ruled("run.dir", (str, None), "output_dir"),
    needless("clean", bool, "a second run with the same output_dir moves the first aside"),
    needless("dry_run", bool, "--dry-run is a flag"),
    never("toml_files", list, "0.5: a file does not name others", "pass them all, in their order", ([],)),
    ENV_VARS,
    *(row for row in LOG if row.path in ("log.level", "log.json_logging")),
    needless("log.file", bool, ONE_LOG),
    *CKPT,
    CKPT_FOLDER,
    *RESUME,
    *MONITORS,
    *PRIME,
    ruled("model.name", str, "model.name"),
    *under("model", VISION),
    *TOKENIZER,
    ruled("max_steps", (int, None), "max_steps", "without it prime-rl runs for ever"),
    ruled("seq_len", int, "seq_len"),
    *BROADCAST,
    *ROLLOUTS,
    *DEPLOYMENT,
    *SLURM,
    ruled("trainer", SECTION, "trainer"),
    ruled("orchestrator", SECTION, "orchestrator"),
    ruled("inference", (SECTION, None), "inference", "engines are always part of the run"),
)


def shared(rows: tuple[Key, ...], *parts: str) -> tuple[Key, ...]:
    """The rows under each of the parts that have them too."""
    return tuple(row for part in parts for row in under(part, rows))
