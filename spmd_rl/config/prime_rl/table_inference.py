"""Keys of prime-rl's inference (`[inference]` of an `rl.toml`)."""

from __future__ import annotations

from spmd_rl.config.prime_rl import table_run as run
from spmd_rl.config.prime_rl.keys import SECTION, later, needless, never, ruled, same, under

NO_SPLIT = "prefill and decode are not separated"
WHOLE = "leave it out: every replica does both"
NO_OFFLOAD = "offloading of the KV cache is not built"
CACHE = "leave it out; inference.vllm.gpu_memory_utilization gives the cache more room"
PLACES = "an expert stays where weight sync sends it"
PARSERS = "answers are parsed where the conversation is rendered"
COPIES = "replicas are deployment.infer_ranks / inference.tp"

VLLM = (
    ruled("model", str, "model.name"),
    ruled("dtype", ("auto", "float16", "bfloat16", "float32"), "trainer.model.dtype", "one for trainer and engines"),
    ruled("max_model_len", (int, None), "seq_len"),
    same("enforce_eager", bool, "inference.vllm.enforce_eager"),
    never("trust_remote_code", bool, "no code of a model's repository is run", "leave it out", (False,)),
    never("chat_template", (str, None), "the template is the tokenizer's", "a copy of its folder", (None,)),
    needless("tool_call_parser", (str, None), PARSERS),
    needless("reasoning_parser", (str, None), PARSERS),
    never("rope_scaling", (dict, str, None), "the trainer must know it too", "write it into config.json", (None,)),
    same("tensor_parallel_size", int, "inference.tp"),
    ruled("data_parallel_size", int, "deployment.infer_ranks", "× inference.tp, where [deployment] is silent"),
    needless("data_parallel_size_local", (int, None), COPIES),
    needless("data_parallel_rpc_port", int, COPIES),
    needless("api_server_count", int, run.HTTP),
    needless("headless", bool, run.HTTP),
    ruled("seed", int, "seed"),
    same("gpu_memory_utilization", (float, int), "inference.vllm.gpu_memory_utilization"),
    ruled("enable_prefix_caching", (bool, None), "inference.vllm.enable_prefix_caching"),
    later("quantization", (str, None), "engines compute in trainer.model.dtype", "leave it out", (None,)),
    later("enable_lora", bool, "LoRA is not built", "leave it out", (False,)),
    needless("max_loras", int, "LoRA is not built"),
    needless("max_cpu_loras", int, "LoRA is not built"),
    needless("max_lora_rank", (int, None), "LoRA is not built"),
    needless("lora_target_modules", (list, None), "LoRA is not built"),
    ruled("enable_expert_parallel", bool, "inference.expert_parallel", "where tensor_parallel_size is above 1"),
    needless("all2all_backend", str, "ranks of a replica see the same tokens"),
    later("enable_eplb", bool, PLACES, "leave it out", (False,)),
    later("enable_dbo", bool, "batches do not overlap", "leave it out", (False,)),
    needless("enable_return_routed_experts", bool, "trainer.router_replay turns it on"),
    ruled("**", object, "inference.vllm.**", "any other argument of vLLM goes through"),
)

DEPLOYMENT = (
    ruled("type", ("single_node", "multi_node", "disaggregated"), "deployment.infer_ranks", "disaggregated: not yet"),
    ruled("gpus_per_node", int, "deployment.infer_ranks"),
    ruled("num_nodes", int, "deployment.infer_ranks", "× gpus_per_node"),
    *(
        later(name, int, NO_SPLIT, WHOLE)
        for name in (
            "prefill_nodes_per_replica",
            "decode_nodes_per_replica",
            "num_prefill_replicas",
            "num_decode_replicas",
            "num_prefill_nodes",
            "num_decode_nodes",
        )
    ),
    *(needless(name, int, run.HTTP) for name in ("prefill_port", "decode_port", "router_port", "backend_port")),
    *(
        later(f"{role}_{name}", dict, NO_SPLIT, WHOLE, ({},))
        for role in ("prefill", "decode")
        for name in ("env_vars", "vllm_overrides")
    ),
)

INFERENCE = under(
    "inference",
    (
        needless("server.host", (str, None), run.HTTP),
        needless("server.port", int, run.HTTP),
        needless("server.liveness_timeout_seconds", (int, float), "deadlines.heartbeat_s"),
        needless("backend_port", int, run.HTTP),
        needless("router", (SECTION, None), run.HTTP),
        needless("router.type", ("vllm-router", "llm-d"), run.HTTP),
        needless(
            "router.policy", str, "a rollout stays with the replica that has its prefix, unless its queue is deep"
        ),
        needless("router.scorers", dict, run.HTTP),
        needless("router.prefill_scorer_overrides", dict, run.HTTP),
        needless("router.decode_scorer_overrides", dict, run.HTTP),
        needless("router.non_cached_tokens", int, run.HTTP),
        needless("router.decode_sidecar_port", int, run.HTTP),
        *under("vllm", VLLM),
        *run.LOG,
        run.ENV_VARS,
        later("use_deep_gemm", bool, "FP8 is not built", "leave it out", (False,)),
        needless("weight_broadcast.type", ("nccl", "filesystem", "nixl"), run.TRANSPORT),
        later("kv_cache_offload", (SECTION, None), NO_OFFLOAD, CACHE, (None,)),
        needless("kv_cache_offload.type", ("native", "mooncake"), NO_OFFLOAD),
        needless("kv_cache_offload.device_name", str, NO_OFFLOAD),
        needless("kv_cache_offload.cpu", (SECTION, None), NO_OFFLOAD),
        needless("kv_cache_offload.cpu.num_bytes", int, NO_OFFLOAD),
        needless("kv_cache_offload.disk", (SECTION, None), NO_OFFLOAD),
        needless("kv_cache_offload.disk.path", str, NO_OFFLOAD),
        later("use_pd_kv_transfer", bool, NO_SPLIT, WHOLE, (False,)),
        later(
            "enable_fp32_lm_head",
            bool,
            "the engine's LM head computes in trainer.model.dtype",
            "weights.probe_sequences measures what that costs",
            (False,),
        ),
        later("enable_fp32_router_logits", bool, "routers are vLLM's", "leave it out", (False,)),
        *under("deployment", DEPLOYMENT),
        needless("output_dir", str, "there is one output_dir"),
        needless("dry_run", bool, "--dry-run is a flag"),
        *(needless(row.path, row.kinds, "the run's [slurm]") for row in run.SLURM),
    ),
)
