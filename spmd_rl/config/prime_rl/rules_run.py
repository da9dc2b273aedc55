"""What several keys decide together: folder, names, lengths, batches and lag, ranks, checkpoints.

Each rule reads the user's keys and writes ours; where nothing is said it writes what prime-rl would do. It refuses to
know about algorithms and environments (`rules_algorithm.py`, `rules_tasks.py`).
"""

from __future__ import annotations

import math

from spmd_rl.config.check_engine import ENGINE_ARGS_ELSEWHERE, ENGINE_ARGS_FIXED
from spmd_rl.config.prime_rl.table_inference import VLLM
from spmd_rl.config.prime_rl.work import Work

READ_ALONE = {row.path for row in VLLM} - {"**", "enable_prefix_caching"}
PARTS = ("trainer", "orchestrator")
FRACTION = 0.3  # orchestrator.window_fraction, which is left as it is


def folder(w: Work) -> None:
    """output_dir / run.dir, where a run has a name."""
    name = w.get("run.dir", w.get("run.name"))
    if name or w.given("output_dir"):
        base = w.get("output_dir", "outputs")
        w.put("output_dir", f"{base}/{name}" if name else base, "output_dir", "run.dir", "run.name")


def model(w: Work) -> None:
    """One model, by one name, in one precision."""
    names = ("model.name", "trainer.model.name")
    name = w.one(*names, default=w.one("orchestrator.model.name", "inference.vllm.model", default="Qwen/Qwen3-0.6B"))
    everywhere = (*names, "orchestrator.model.name", "inference.vllm.model")
    w.put("model.name", name, *everywhere)
    for path in everywhere[2:]:
        if w.get(path, name) != name:
            w.note("later", path, f"engines get the weights that are trained ({name})", "leave it out")
    tokenizers = ("tokenizer.name", *(f"{part}.tokenizer.name" for part in PARTS))
    if tokenizer := w.one(*tokenizers):
        w.put("model.tokenizer", tokenizer, *tokenizers)
    w.put("trainer.model.dtype", "bfloat16", "trainer.model.optimization_dtype", "inference.vllm.dtype")
    if w.get("trainer.model.optimization_dtype") == "bfloat16":
        w.note("differs", "trainer.model.optimization_dtype", "master weights stay float32, computation is bfloat16")
    if w.get("inference.vllm.dtype", "auto") not in ("auto", "bfloat16"):
        w.note("never", "inference.vllm.dtype", "engines compute as the trainer does", "trainer.model.dtype = float32")
    impl = w.get("trainer.model.impl", "auto")
    w.put("trainer.model.impl", "hf" if impl == "hf" else "auto", "trainer.model.impl")
    attn = w.get("trainer.model.attn", "auto")
    w.put("trainer.model.attn", "flash_attention_4" if attn == "fa4" else attn, "trainer.model.attn")
    chunk = w.get("trainer.model.fused_lm_head_token_chunk_size")
    if isinstance(chunk, int):
        w.put("trainer.model.lm_head_chunk", chunk, "trainer.model.fused_lm_head_token_chunk_size")
    elif chunk == "disabled":
        w.note("differs", "trainer.model.fused_lm_head_token_chunk_size", "the LM head is always computed in chunks")


def lengths(w: Work) -> None:
    """Steps, and one length for rows, sequences and engines: the shortest that a sequence may have."""
    steps = ("max_steps", *(f"{part}.max_steps" for part in PARTS))
    if (limit := w.one(*steps)) is not None:
        w.put("max_steps", limit, *steps)
    else:
        w.by_hand("max_steps", "prime-rl runs without end where it is not set; 100 here")
    trainer = w.get("trainer.model.seq_len", w.get("seq_len", 2048))
    limits = {
        "trainer.model.seq_len": trainer,
        "orchestrator.seq_len": w.get("orchestrator.seq_len", w.get("seq_len", 2048)),
        "inference.vllm.max_model_len": w.get("inference.vllm.max_model_len", trainer),
    }
    w.put("seq_len", min(limits.values()), "seq_len", *limits)
    for path, limit in limits.items():
        if w.given(path) and limit != min(limits.values()):
            w.note("differs", path, f"rows, sequences and engines have one length: seq_len = {min(limits.values())}")
    seeds = ("inference.vllm.seed", "orchestrator.seed")
    if (seed := w.get(seeds[1], w.get(seeds[0]))) is not None:
        w.put("seed", seed, *seeds)


def batches(w: Work) -> None:
    """What one step consumes, and how far rollouts may run ahead."""
    group = w.get("orchestrator.group_size", 1)
    w.put("orchestrator.group_size", group, "orchestrator.group_size")
    sizes = ("orchestrator.batch_size", "orchestrator.token_batch_size")
    if all(w.get(path) for path in sizes):
        w.problems.append(f"{w.shown(sizes[0])} and {w.shown(sizes[1])}: prime-rl takes one of them")
    if tokens := w.get(sizes[1]):
        w.put("orchestrator.batch_unit", "tokens", sizes[1])
        w.put("orchestrator.batch_size", tokens, sizes[1])
        w.note("differs", sizes[1], "sampled tokens are counted, prompts are not")
        _lag(w, groups=64, rollouts=64 * group)
        return
    batch = w.get(sizes[0], 128)
    own = [
        path
        for i in w.numbers("orchestrator.train.source")
        if w.get(path := f"{_source(i)}.group_size", group) != group
    ]
    if own and batch % group == 0:  # in rollouts, groups of several sizes may not come out even
        w.put("orchestrator.batch_unit", "groups", *own)
        w.put("orchestrator.batch_size", batch // group, sizes[0], *own)
        w.note("differs", own[0], f"the batch is counted in groups: {batch} / {group}")
    else:
        w.put("orchestrator.batch_size", batch, sizes[0])
    _lag(w, groups=max(1, batch // max(1, group)), rollouts=batch)


def _source(number: int) -> str:
    return f"orchestrator.train.source.{number}"


def _lag(w: Work, groups: int, rollouts: int) -> None:
    """`max_off_policy_steps` bounds the age of what is trained, by dropping; here the window does, by waiting.

    So max_lag is the most that keeps the window's bound within it, and no more than the batches that may be in flight.
    """
    bound, level = "orchestrator.max_off_policy_steps", "orchestrator.max_async_level"
    most = w.get(bound, 8)
    if w.given(level):
        w.put("orchestrator.max_lag", w.get(level), level)
        w.put("orchestrator.max_off_policy_steps", most, bound)
        if w.given("orchestrator.oversampling_factor"):
            w.note("differs", "orchestrator.oversampling_factor", "in flight are (max_lag + 1) batches")
        return
    room, factor = "orchestrator.concurrency.max_inflight", w.get("orchestrator.oversampling_factor")
    unlimited = w.given(room) and w.get(room) is None
    flying = rollouts * factor if factor else w.get(room, 1024)
    ahead = most if unlimited else max(1, math.floor(flying / rollouts))
    fits = [lag for lag in range(1, min(ahead, most) + 1) if _oldest(lag, groups) <= most]
    because = (bound, room, "orchestrator.oversampling_factor")
    if most and not fits:
        w.put("orchestrator.order", "fifo", bound)
    w.put("orchestrator.max_lag", fits[-1] if fits else min(1, most), *because)
    w.put("orchestrator.max_off_policy_steps", most, bound)
    for path in because:
        if w.given(path):
            w.note(
                "differs",
                path,
                f"becomes max_lag = {w.written['orchestrator.max_lag']}: rollouts wait, few are dropped",
            )


def _oldest(lag: int, groups: int) -> int:
    """The bound of the window (spmd_rl/orchestrator/window.py) in order `window`."""
    size = max(1, math.floor(FRACTION * (lag + 1) * groups + 1e-9))
    return lag + math.ceil((size - 1) / groups)


def ranks(w: Work) -> None:
    """GPUs and nodes to ranks. Rank 0 is one process more."""
    d, inner = "deployment", "inference.deployment"
    per_node = w.one(f"{d}.gpus_per_node", f"{inner}.gpus_per_node", default=8)
    tp, copies = w.get("inference.vllm.tensor_parallel_size", 1), w.get("inference.vllm.data_parallel_size", 1)
    gpus = (f"{d}.num_train_gpus", f"{d}.num_infer_gpus")
    nodes = tuple(f"{d}.{name}" for name in ("type", "num_train_nodes", "num_infer_nodes", "num_infer_replicas"))
    if w.get(f"{inner}.type") == "disaggregated":
        w.note("later", f"{inner}.type", "prefill and decode are not separated", "multi_node: every replica does both")
    if w.get(nodes[0]) == "multi_node" or w.given(nodes[1]):
        infer_nodes = w.get(nodes[2], _nodes_of_inference(w)) * w.get(nodes[3], 1)
        train_nodes = w.get(nodes[1], 1)
        w.put("deployment.train_ranks", train_nodes * per_node, *nodes, f"{d}.gpus_per_node")
        w.put("deployment.infer_ranks", infer_nodes * per_node, *nodes, f"{inner}.num_nodes")
        w.note(
            "differs",
            nodes[0],
            f"{(train_nodes + infer_nodes) * per_node} ranks with a GPU each, and rank 0 beside them",
        )
        return
    ids = ("trainer_gpu_ids", "inference_gpu_ids")
    if w.given(ids[0]) or w.given(ids[1]):
        w.put("deployment.train_ranks", len(w.get(ids[0], [1])) or 1, ids[0])
        w.put("deployment.infer_ranks", max(len(w.get(ids[1], [0])), tp), ids[1])
        return
    silent = max(1, tp) if w.given(gpus[0]) else tp * copies
    if w.get(f"{inner}.type") == "multi_node":
        silent = _nodes_of_inference(w) * per_node
    infer = w.get(gpus[1], silent)
    w.put("deployment.train_ranks", w.get(gpus[0], 1), gpus[0])
    w.put(
        "deployment.infer_ranks",
        infer,
        gpus[1],
        "inference.vllm.data_parallel_size",
        "inference.vllm.tensor_parallel_size",
    )
    if w.given(gpus[1]) and w.given("inference.vllm.data_parallel_size") and copies * tp != infer:
        w.note("differs", "inference.vllm.data_parallel_size", f"{gpus[1]} decides: {infer} ranks in replicas of {tp}")
    if w.given("inference") and not w.on("inference"):
        w.note("never", "inference", "engines are part of the run; no other server is asked", "deployment.infer_ranks")


def _nodes_of_inference(w: Work) -> int:
    """As their `inference.deployment` has them."""

    def count(name: str) -> int:
        return int(w.get(f"inference.deployment.{name}", 1))

    kind = w.get("inference.deployment.type")
    if kind == "disaggregated":
        return count("prefill_nodes_per_replica") * count("num_prefill_replicas") + count(
            "decode_nodes_per_replica"
        ) * count("num_decode_replicas")
    return int(w.get("inference.deployment.num_nodes", 2)) if kind == "multi_node" else 1


def records(w: Work) -> None:
    """Checkpoints and W&B."""
    tables = ("ckpt", *(f"{part}.ckpt" for part in PARTS))
    if any(w.on(table) for table in tables):
        keys = {name: [f"{table}.{name}" for table in tables] for name in ("interval", "keep_last", "keep_interval")}
        end = w.written.get("max_steps", 100)
        w.put("ckpt.interval", w.one(*keys["interval"], default=end), *tables)
        w.put("ckpt.keep", w.one(*keys["keep_last"], default=0), *tables)
        w.put("ckpt.keep_every", w.one(*keys["keep_interval"], default=0), *tables)
    monitors = ("monitors.wandb", *(f"{part}.monitors.wandb" for part in PARTS))
    if any(w.on(monitor) for monitor in monitors):
        project = w.one(*(f"{monitor}.project" for monitor in monitors), default="prime-rl")
        w.put("log.wandb", True, *monitors)
        w.put("log.wandb_project", project, *monitors)
    patience = w.get("trainer.dist_timeout_seconds")
    if patience is not None:
        if patience > 1800:
            w.put("deadlines.collective_s", float(patience), "trainer.dist_timeout_seconds")
        else:
            why = "deadlines.collective_s must be above all other deadlines; it stays as it is"
            w.note("differs", "trainer.dist_timeout_seconds", why)


def engine(w: Work) -> None:
    """Arguments of vLLM that go through, but for those that have one right value here; and who holds experts."""
    prefix = "inference.vllm"
    divided = f"{prefix}.enable_expert_parallel"
    if w.get(divided) and w.get(f"{prefix}.tensor_parallel_size", 1) > 1:
        w.put("inference.expert_parallel", True, divided)
    elif w.get(divided):
        w.note("later", divided, "experts are divided within a replica only", "a larger inference.tp, or leave it out")
    for name, value in w.under(prefix):
        ours = name.replace("-", "_")
        why = ENGINE_ARGS_FIXED.get(ours) or (
            ours in ENGINE_ARGS_ELSEWHERE and f"is set by {ENGINE_ARGS_ELSEWHERE[ours]}"
        )
        if name in READ_ALONE or value is None:
            continue
        if why or ours.startswith("data_parallel_"):
            w.note(
                "never", f"{prefix}.{name}", why or "replicas are deployment.infer_ranks / inference.tp", "leave it out"
            )
        else:
            w.put(f"{prefix}.{ours}", value, f"{prefix}.{name}")
