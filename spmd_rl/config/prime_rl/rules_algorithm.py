"""Algorithm, loss, optimizer and schedule: names that differ, numbers that mean the same.

prime-rl's loss has no cap on the importance ratio and other masks than our algorithms have by themselves, so its masks
are written out and ours turned off. It refuses to know about tasks. Invariant: where a mask or penalty of theirs has no
counterpart, a note says so.
"""

from __future__ import annotations

from spmd_rl.config.prime_rl.work import Work

ALGO, LOSS, OURS = "orchestrator.algo", "trainer.loss", "orchestrator.algorithm"
CORRECTION = f"{OURS}.correction"
NAMES = {
    "grpo": "grpo",
    "echo": "echo",
    "max_rl": "max_rl",
    "rae": "per_agent",
    "hierarchical_grpo": "hierarchical",
    "opd": "opd",
    "opsd": "opsd",
    "sft": "sft",
}
BY_GROUP = ("grpo", "echo", "max_rl", "hierarchical_grpo")
TEACHERS = {"opd": f"{ALGO}.teacher.name", "sft": f"{ALGO}.sampling.source.name"}
# Masks and the cap by the ratio, as prime-rl's loss has them: none.
NO_MASKS = {"ratio_cap": 0.0, "ipo": 0.0}
# Masks of version 0.4 → theirs where nothing is said.
VERSION_04 = {
    "token_mask_low": ("icepop_low", 0.125),
    "token_mask_high": ("icepop_high", 8.0),
    "geo_mask_low": ("geometric_low", 0.1),
    "geo_mask_high": ("geometric_high", 10.0),
}


def algorithm(w: Work) -> None:
    """`[orchestrator.algo]`: its name, its numbers, its teacher."""
    kind = w.get(f"{ALGO}.type", "grpo")
    w.put(f"{OURS}.type", NAMES[kind], f"{ALGO}.type")
    penalty = f"{ALGO}.length_penalty"
    if w.on(penalty) and w.get(f"{penalty}.type", "linear") == "linear":
        w.put(f"{OURS}.length_penalty", w.get(f"{penalty}.num_output_tokens_weight", 0.25), penalty)
        if not w.given(f"{penalty}.num_input_tokens_weight") or not w.given(f"{penalty}.num_turns_weight"):
            w.note(
                "differs", penalty, "only sampled tokens are penalised; input tokens and turns (0.1 each there) are not"
            )
    elif w.on(penalty):
        w.note("never", f"{penalty}.type", "there is one form, linear", "leave it out")
    if kind == "echo":
        _observations(w)
    if kind == "rae":
        w.put(f"{OURS}.baseline_decay", w.get(f"{ALGO}.decay", 0.95), f"{ALGO}.decay")
    agents = w.get(f"{ALGO}.episode_agents", [])
    if kind == "hierarchical_grpo" and agents:
        w.put(f"{OURS}.episode_agent", str(agents[0]), f"{ALGO}.episode_agents")
        if len(agents) > 1:
            w.note(
                "never",
                f"{ALGO}.episode_agents",
                f"one agent is compared in its episode: {agents[0]}",
                "leave out the rest",
            )
    if kind in TEACHERS:
        _teacher(w, kind)
    if kind == "opsd":
        w.by_hand(
            "orchestrator.source.0.hint", "opsd needs a hint: a format string, or the environment's method hint(task)"
        )
    elif w.given("trainer.optim.type") and w.get("trainer.optim.type") != "adamw":
        w.by_hand("trainer.optim.lr", "is that of another optimizer than AdamW")
    _zero_variance(w, kind)
    _own_advantage(w)


def _observations(w: Work) -> None:
    alphas = {role: w.get(f"{ALGO}.roles.{role}.alpha", 0.1) for role in ("tool", "user", "system", "assistant")}
    given = {role: alpha for role, alpha in alphas.items() if w.on(f"{ALGO}.roles.{role}")} or {"tool": 0.1}
    w.put(f"{OURS}.observation_weight", max(given.values()), *(f"{ALGO}.roles.{role}" for role in given))
    w.note("differs", f"{ALGO}.type", "all that was observed after the first answer has one weight, whatever its role")


def _teacher(w: Work, kind: str) -> None:
    path = TEACHERS[kind]
    if name := w.get(path):
        w.put(f"{OURS}.reference", name, path)
    else:
        w.by_hand(f"{OURS}.reference", f"{kind} needs a teacher: a model folder or Hub id")
    if kind == "sft":
        tp = w.get("inference.vllm.tensor_parallel_size", 1)
        w.put("deployment.teacher_ranks", tp, path)
        w.note(
            "differs",
            path,
            f"the teacher runs on deployment.teacher_ranks = {tp} more ranks; nothing is asked over HTTP",
        )


def _zero_variance(w: Work, kind: str) -> None:
    """Groups without a signal: an admission gate of theirs (or 0.5's filter) replaces them, else they stay."""
    gates = [
        path
        for i in w.numbers("orchestrator.train.source")
        if w.get(path := f"orchestrator.train.source.{i}.curriculum.gates")
    ]
    bounds = [(path, name, gate) for path in gates for name, gate in w.get(path).items()]
    old = "orchestrator.buffer.online_difficulty_filtering"
    refill = w.get(old, False)
    for path, name, gate in bounds:
        numbers = [gate.get(side, 0) for side in ("reject_min", "reject_max")] if isinstance(gate, dict) else [None]
        if numbers == [0, 0]:
            refill = True
        else:
            w.note("never", f"{path}.{name}", "groups are replaced for equal rewards only", "orchestrator.reward_gate")
    if kind in BY_GROUP:
        w.put(
            f"{OURS}.zero_variance",
            "refill" if refill else "keep",
            *gates,
            old,
            "orchestrator.train.filter_zero_advantages",
        )
        if refill and gates:
            w.note(
                "differs",
                gates[0],
                "for all sources; at most algorithm.max_refill groups are replaced per group of the batch",
            )
        if w.get("orchestrator.train.filter_zero_advantages", True) is False:
            w.note(
                "differs",
                "orchestrator.train.filter_zero_advantages",
                "tokens without an advantage count in the denominator",
            )
    elif refill:
        w.note("never", (gates or [old])[0], f"{kind} learns from every group", "leave it out")


def _own_advantage(w: Work) -> None:
    path = "orchestrator.advantage.import_path"
    if w.get("orchestrator.advantage.type") == "custom" and (name := w.get(path)):
        w.put(f"{OURS}.advantage", _import_path(name), path)
        w.by_hand(
            f"{OURS}.advantage", "has another signature here: fn(rewards, group) -> advantages (docs/algorithms.md)"
        )


def _import_path(theirs: str) -> str:
    """`module.function` to `module:function`."""
    return theirs if ":" in theirs else ":".join(theirs.rsplit(".", 1))


def loss(w: Work) -> None:
    """`[trainer.loss]`: masks by the ratio of trained and behaviour policy."""
    kind, algo = w.get(f"{LOSS}.type", "default"), w.get(f"{ALGO}.type", "grpo")
    if algo == "sft":
        return
    if algo in ("opd", "opsd"):
        w.put(f"{CORRECTION}.ratio_cap", 0.0, f"{ALGO}.type")
        return
    if kind == "sft":
        w.note("never", f"{LOSS}.type", "cross-entropy on a teacher's rollouts is an algorithm", f"{OURS}.type = sft")
        return
    if kind == "custom":
        if path := w.get(f"{LOSS}.import_path"):
            w.put(f"{OURS}.loss", _import_path(path), f"{LOSS}.import_path")
            w.by_hand(
                f"{OURS}.loss", "has another signature here: fn(inputs) -> float[T], weighted (docs/algorithms.md)"
            )
        else:
            w.by_hand(f"{OURS}.loss", "loss.type = custom without an import_path")
        return
    for name, value in (NO_MASKS | _masks(w, kind)).items():
        w.put(f"{CORRECTION}.{name}", value, f"{LOSS}.type", *(f"{LOSS}.{key}" for key, _ in w.under(LOSS)))
    if not w.given(f"{LOSS}.kl_tau"):
        why = "1e-3 × (log-ratio)² is part of prime-rl's loss; there is no such term here"
        w.note("differs", f"{LOSS}.kl_tau", why)


def _masks(w: Work, kind: str) -> dict[str, float]:
    old = [name for name in (*VERSION_04, "sequence_clip_high", "ratio_type") if w.given(f"{LOSS}.{name}")]
    if old:
        return _masks_of_04(w)
    if kind == "ipo":
        return {"ipo": _bound(w, f"{LOSS}.ipo_threshold", 0.1)}
    if w.given(f"{LOSS}.ipo_mask_low") or w.given(f"{LOSS}.ipo_mask_high"):
        return {"ipo": _narrower(w, "ipo_mask_low", "ipo_mask_high")}
    return {"dppo_tv": _narrower(w, "dppo_mask_low", "dppo_mask_high")}


def _narrower(w: Work, low: str, high: str) -> float:
    """Two bounds of theirs are one of ours."""
    bounds = {name: _bound(w, f"{LOSS}.{name}", 0.2) for name in (low, high)}
    if bounds[low] != bounds[high]:
        w.note("differs", f"{LOSS}.{low}", f"one bound for both sides, the narrower: {min(bounds.values())}")
    return min(bounds.values())


def _bound(w: Work, path: str, default: float) -> float:
    """A bound of 0 drops whatever moved at all; here 0 is off, so it becomes a tiny one."""
    return float(w.get(path, default)) or 1e-6


def _masks_of_04(w: Work) -> dict[str, float]:
    masks = {ours: float(w.get(f"{LOSS}.{name}", default)) for name, (ours, default) in VERSION_04.items()}
    if w.get(f"{LOSS}.ratio_type") == "sequence":
        masks["sequence_cap"] = float(w.get(f"{LOSS}.sequence_clip_high", 10.0))
    elif w.given(f"{LOSS}.sequence_clip_high"):
        w.note("needless", f"{LOSS}.sequence_clip_high", "only ratio_type = sequence clips")
    return masks


def optimizer(w: Work) -> None:
    """AdamW's betas, and the schedule."""
    betas = [float(w.get(f"trainer.optim.betas{i}", default)) for i, default in ((1, 0.9), (2, 0.999))]
    w.put("trainer.optim.betas", betas, "trainer.optim.betas1", "trainer.optim.betas2")
    theirs, ours = "trainer.scheduler", "trainer.scheduler"
    kind = w.get(f"{theirs}.type", "constant")
    keys = [f"{theirs}.{name}" for name in ("type", "warmup_steps", "decay_steps", "min_lr")]
    if kind == "constant":
        for key in keys[1:]:
            if w.given(key):
                w.note("needless", key, "a constant schedule reads nothing else")
        return
    warmup, decay = w.get(keys[1], 10), w.get(keys[2], 10)
    decays = kind == "cosine" or decay > 0
    w.put(f"{ours}.type", kind if decays else "constant", *keys)
    w.put(f"{ours}.warmup_steps", warmup, *keys)
    if not decays:
        return
    w.put(f"{ours}.min_lr", float(w.get(keys[3], 0.0)), *keys)
    steps = w.written.get("max_steps", 100)
    if kind == "linear" and warmup + decay != steps:
        w.note(
            "differs",
            keys[0],
            f"prime-rl stays at lr from step {warmup} to {max(warmup, steps - decay)} and decays then; here the decay "
            f"lasts from step {warmup} to the end",
        )
