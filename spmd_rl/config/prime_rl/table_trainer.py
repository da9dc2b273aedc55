"""Keys of prime-rl's trainer (`[trainer]` of an `rl.toml`; an `sft.toml` has many of them at its top)."""

from __future__ import annotations

from spmd_rl.config.prime_rl import table_run as run
from spmd_rl.config.prime_rl.keys import SECTION, later, needless, never, ruled, same, under

MEMORY = "leave it out; until then, more trainer ranks (deployment.train_ranks) or a smaller seq_len"
FULL = "train all weights, with trainer.optim.lr about a tenth of an adapter's"
NO_FP8 = "FP8 training is not built"
NO_LORA = "LoRA is not built"

PARALLEL = (
    same("dp_replicate", int, "trainer.parallel.dp_replicate"),
    same("ep", (int, "auto"), "trainer.parallel.ep", read=lambda ep: 0 if ep == "auto" else ep, why="auto is 0 here"),
    same("ep_comm_backend", ("torch", "deepep"), "trainer.parallel.ep_comm_backend"),
    same("deepep_num_sms", int, "trainer.parallel.deepep_num_sms"),
    same("deepep_token_chunk_size", (int, None), "trainer.parallel.deepep_token_chunk_size", read=lambda n: n or 0),
    same("cp", int, "trainer.parallel.cp"),
    same("cp_style", ("ring", "ulysses"), "trainer.parallel.cp_style", "ring"),
)
SAVINGS = (
    later("compile", (SECTION, None), "torch.compile of the trainer is not built", "leave it out", (None,)),
    needless("compile.fullgraph", bool, "torch.compile of the trainer is not built"),
    later("ac", (SECTION, None), "activation checkpointing is not built", MEMORY, (None,)),
    needless("ac.mode", ("full", "selective"), "activation checkpointing is not built"),
    needless("ac.freq", int, "activation checkpointing is not built"),
    needless("ac.targets", list, "activation checkpointing is not built"),
    later("ac_offloading", (SECTION, None), "offloading of activations is not built", MEMORY, (None,)),
    needless("ac_offloading.pin_memory", bool, "offloading of activations is not built"),
    needless("ac_offloading.max_inflight_activations", int, "offloading of activations is not built"),
    later("fsdp_cpu_offload", bool, "offloading of weights is not built", MEMORY, (False,)),
    later("optim_cpu_offload", bool, "offloading of the optimizer is not built", MEMORY, (False,)),
    later("full_offload", (SECTION, bool, None), "offloading of the optimizer is not built", MEMORY, (None, False)),
    needless("full_offload.cpu_optimizer_backend", ("native", "torch"), "offloading of the optimizer is not built"),
    needless("full_offload.numa_bind", bool, "offloading of the optimizer is not built"),
    same("reshard_after_forward", bool, "trainer.parallel.reshard_after_forward"),
)
PRECISION = (
    ruled("optimization_dtype", ("bfloat16", "float32"), "trainer.model.dtype", "master weights are float32 here"),
    never("reduce_dtype", ("bfloat16", "float32"), "gradients are summed in float32", "leave it out", ("float32",)),
    never("moe_router_dtype", ("bfloat16", "float32"), "routers compute in float32", "leave it out", ("float32",)),
    needless("moe_use_grouped_mm", bool, "a choice of kernel"),
    later("moe_fused_kernel", bool, "mixtures have no kernels of their own", "leave it out", (False,)),
    later("quantization", (SECTION, None), NO_FP8, "train in trainer.model.dtype = bfloat16", (None,)),
    needless("quantization.type", ("fp8", "mxfp8"), NO_FP8),
    *(
        needless(f"quantization.{name}", kinds, NO_FP8)
        for name, kinds in (
            ("recipe", ("mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp")),
            ("enable_grouped_gemm", bool),
            ("enable_a2a", bool),
            ("ignore_patterns", list),
        )
    ),
)
LORA = (
    later("lora", (SECTION, None), NO_LORA, FULL, (None,)),
    needless("lora.rank", int, NO_LORA),
    needless("lora.alpha", (int, float), NO_LORA),
    needless("lora.dropout", (int, float), NO_LORA),
    needless("lora.target_modules", list, NO_LORA),
    needless("lora.modules_to_save", list, NO_LORA),
)
MODEL = (
    ruled("name", str, "model.name"),
    never(
        "trust_remote_code",
        bool,
        "no code of a model's repository is run",
        "use a model that transformers knows",
        (False,),
    ),
    *run.VISION,
    ruled("seq_len", int, "seq_len", "rows and sequences have one length here"),
    ruled("impl", ("hf", "custom", "auto"), "trainer.model.impl", "custom: auto, our own code where there is some"),
    ruled(
        "attn",
        ("auto", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "fa4"),
        "trainer.model.attn",
    ),
    *PARALLEL,
    *SAVINGS,
    *PRECISION,
    *LORA,
    ruled(
        "fused_lm_head_token_chunk_size",
        (int, "disabled", "auto"),
        "trainer.model.lm_head_chunk",
        "the LM head is always computed in chunks",
    ),
    needless("conversion_dir", (str, None), "weights are not converted on disk"),
    later("index_cache", (SECTION, None), "sparse attention is not built", "leave it out", (None,)),
    needless("index_cache.topk_freq", int, "sparse attention is not built"),
    needless("index_cache.topk_pattern", (str, None), "sparse attention is not built"),
    later("freeze_moe_router", bool, "all weights learn", "leave it out", (False,)),
    never("debug.num_layers", (int, None), "models come as they are", "tools/make_tiny.py makes a small one", (None,)),
    never("debug.random_init", bool, "models come as they are", "tools/make_tiny.py makes a small one", (False,)),
    never("debug.force_balanced_routing", bool, "models come as they are", "leave it out", (False,)),
)

ADAMW = "AdamW is the optimizer"
OPTIM = (
    later(
        "optim.type",
        ("adamw", "sgd", "muon", "sign_sgd"),
        ADAMW,
        "leave it out: it becomes AdamW, with the learning rate of the other one",
        ("adamw",),
    ),
    same("optim.lr", (int, float), "trainer.optim.lr", 1e-6),
    same("optim.weight_decay", (int, float), "trainer.optim.weight_decay", 0.01),
    same("optim.max_norm", (int, float, None), "trainer.optim.max_norm", 1.0, lambda norm: norm or 0.0, "None: 0"),
    ruled("optim.betas1", (int, float), "trainer.optim.betas"),
    ruled("optim.betas2", (int, float), "trainer.optim.betas", "0.999 there, 0.95 here where nothing is said"),
    needless("optim.momentum", (int, float), ADAMW),
    needless("optim.nesterov", bool, ADAMW),
    needless("optim.mu", (int, float), ADAMW),
)
SCHEDULER = (
    ruled("scheduler.type", ("constant", "linear", "cosine"), "trainer.scheduler.type"),
    ruled(
        "scheduler.warmup_steps", int, "trainer.scheduler.warmup_steps", "rises from lr / warmup_steps, not from min_lr"
    ),
    ruled(
        "scheduler.decay_steps", int, "trainer.scheduler.decay_steps", "the last steps there, those after warm-up here"
    ),
    ruled("scheduler.min_lr", (int, float), "trainer.scheduler.min_lr"),
)
LOSS = (
    ruled("loss.type", ("default", "ipo", "custom", "sft"), "orchestrator.algorithm.correction"),
    ruled("loss.dppo_mask_low", (int, float), "orchestrator.algorithm.correction.dppo_tv", "one bound for both sides"),
    ruled("loss.dppo_mask_high", (int, float), "orchestrator.algorithm.correction.dppo_tv"),
    ruled("loss.ipo_threshold", (int, float), "orchestrator.algorithm.correction.ipo"),
    never("loss.adv_tau", (int, float), "advantages have no factor", "scale the rewards (source.weights)", (1, 1.0)),
    never("loss.kl_tau", (int, float), "there is no squared log-ratio term", "orchestrator.algorithm.kl", (0, 0.0)),
    ruled("loss.import_path", str, "orchestrator.algorithm.loss", "another signature: docs/algorithms.md"),
    never("loss.kwargs", dict, "a loss takes its inputs alone", "write them into the function", ({},)),
    # Names of earlier versions.
    ruled("loss.ratio_type", ("token", "sequence"), "orchestrator.algorithm.correction"),
    ruled("loss.ipo_mask_low", (int, float), "orchestrator.algorithm.correction.ipo", "0.5: one bound for both sides"),
    ruled("loss.ipo_mask_high", (int, float), "orchestrator.algorithm.correction.ipo", "0.5"),
    ruled("loss.token_mask_low", (int, float), "orchestrator.algorithm.correction.icepop_low", "0.4"),
    ruled("loss.token_mask_high", (int, float), "orchestrator.algorithm.correction.icepop_high", "0.4"),
    ruled("loss.geo_mask_low", (int, float), "orchestrator.algorithm.correction.geometric_low", "0.4"),
    ruled("loss.geo_mask_high", (int, float), "orchestrator.algorithm.correction.geometric_high", "0.4"),
    ruled("loss.sequence_clip_high", (int, float), "orchestrator.algorithm.correction.sequence_cap", "0.4"),
    *(
        never(
            f"loss.sequence_mask_{side}",
            (int, float),
            "no mask drops a sequence for one token of it (0.4)",
            "orchestrator.algorithm.correction.icepop_low and icepop_high drop the token",
            harmless,
        )
        for side, harmless in (("low", (0, 0.0)), ("high", ()))
    ),
    never("loss.teacher_tau", (int, float), "a teacher is an algorithm", "algorithm.type = opd, or kl.coef", (0, 0.0)),
)

# What an sft.toml has at its top and an rl.toml under [trainer].
COMMON = (
    *under("model", MODEL),
    *run.TOKENIZER,
    *OPTIM,
    *SCHEDULER,
    *run.CKPT,
    run.CKPT_FOLDER,
    *run.SKIP,
    *run.RESUME,
    *run.LOG,
    *run.MONITORS,
    run.ENV_VARS,
    ruled("max_steps", (int, None), "max_steps"),
    never(
        "matmul_precision",
        ("highest", "high", "medium"),
        "float32 products are computed in float32",
        "leave it out",
        ("highest", "high"),
    ),
    never("memory_profiler_path", (str, None), "memory is not profiled", "leave it out", (None,)),
    never("trace_path", (str, None), "no profiler runs inside", "timeline.png and timeline/trace.json", (None,)),
    needless("gc", (SECTION, None), "Python's garbage collector is left alone"),
    needless("gc.interval", int, "Python's garbage collector is left alone"),
    ruled("dist_timeout_seconds", int, "deadlines.collective_s", "must be above all other deadlines"),
    *run.HEARTBEAT,
)

TRAINER = under(
    "trainer",
    (
        *COMMON,
        needless("output_dir", str, "there is one output_dir"),
        never(
            "data.fake",
            (SECTION, None),
            "the trainer does not run alone",
            "main.py rl --bench measures it",
            (None,),
        ),
        needless("data.fake.batch_size", int, "main.py rl --bench makes its own"),
        needless("data.fake.generate_samples", bool, "main.py rl --bench makes its own"),
        *LOSS,
        *run.BROADCAST,
        *run.ROLLOUTS,
        same("enable_router_replay", bool, "trainer.router_replay"),
        needless("metrics_server", (SECTION, None), "metrics.jsonl and tensorboard/ say it"),
        needless("metrics_server.host", str, "metrics.jsonl and tensorboard/ say it"),
        needless("metrics_server.port", int, "metrics.jsonl and tensorboard/ say it"),
        never("enable_token_export", bool, "rollouts/ holds readable samples", "log.rollouts_per_step", (False,)),
        never("max_concurrent_runs", int, "one run per program", "leave it out", (1,)),
        needless("bench", (SECTION, bool, None), "--bench is a flag"),
        needless("bench.output_json", (str, None), "--json FILE is a flag"),
    ),
)
