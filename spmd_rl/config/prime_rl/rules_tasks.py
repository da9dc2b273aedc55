"""Environments, sampling, evaluation; and the rows of supervised fine-tuning.

Their environments are tasksets and agents of the package `verifiers`, which the source `verifiers:<id>` plays in
process. It refuses to know whether one is installed: that is tried when the run starts.
"""

from __future__ import annotations

from typing import Any

from spmd_rl.config.prime_rl.rules_algorithm import NAMES
from spmd_rl.config.prime_rl.work import Work

TRAIN, EVAL = "orchestrator.train.source", "orchestrator.eval"
OF_THE_ENV = ("timeout", "retries", "interception")  # tables of an environment that are no agents
PLAYED = ("null", "bash")  # harnesses that the adapter stands for
HARMLESS_BODY = {"top_k": (-1,), "min_p": (0, 0.0), "return_token_ids": (True,)}
OWN_ADVANTAGES = ("grpo", "echo", "max_rl", "rae", "hierarchical_grpo")


def sampling(w: Work) -> None:
    """How rollouts are sampled. Without a limit an answer may be as long as a row leaves room for."""
    path = "orchestrator.train.sampling"
    temperature = float(w.get(f"{path}.temperature", 1.0))
    if temperature == 0:
        w.problems.append(
            f"{w.shown(f'{path}.temperature')} = 0: nothing can be learned from greedy rollouts; raise it"
        )
    else:
        w.put("orchestrator.sampling.temperature", temperature, f"{path}.temperature")
    limit, room = w.get(f"{path}.max_completion_tokens"), w.written["seq_len"] - 1
    answers = min(room if limit is None else limit, room)
    w.put("orchestrator.sampling.max_tokens", answers, f"{path}.max_completion_tokens", *w.because["seq_len"])
    if limit and limit > room:
        w.note("differs", f"{path}.max_completion_tokens", f"is what seq_len leaves: {room}")
    _extra_body(w, path)


def _extra_body(w: Work, path: str) -> None:
    for name, value in w.get(f"{path}.extra_body", {}).items():
        if value not in HARMLESS_BODY.get(name, ()):
            instead = "args.renderer of the source" if name == "chat_template_kwargs" else "leave it out"
            w.note("never", f"{path}.extra_body.{name}", "requests carry the run's sampling alone", instead)


def sources(w: Work) -> None:
    """Training sources."""
    numbers = w.numbers(TRAIN)
    if not numbers:
        w.by_hand("orchestrator.source", "the files name no environment to train on; the task here is `reverse`")
        return
    ratios = w.get("orchestrator.buffer.env_ratios")
    for i in numbers:
        here = f"{TRAIN}.{i}"
        source = _environment(w, here)
        if name := w.get(f"{here}.name"):
            source["name"] = name
        ratio = w.get(f"{here}.ratio", ratios[i] if ratios and i < len(ratios) else None)
        if isinstance(ratio, int | float):
            source["ratio"] = ratio
        group = w.get(f"{here}.group_size")
        if group not in (None, w.written["orchestrator.group_size"]):
            source["group_size"] = group
        _of_its_own(w, here, source)
        w.sources.append(source)
    if ratios and len(ratios) != len(numbers):
        w.problems.append(
            f"{w.shown('orchestrator.buffer.env_ratios')}: {len(ratios)} ratios for {len(numbers)} environments"
        )
    retries = [w.get(f"{TRAIN}.{i}.max_retries") for i in numbers if w.given(f"{TRAIN}.{i}.max_retries")]
    if retries:
        w.put("orchestrator.max_retries", max(retries), f"{TRAIN}.{numbers[0]}.max_retries")


def _environment(w: Work, here: str) -> dict[str, Any]:
    """`env` of a source: the taskset, the environment around it, its agents."""
    env = dict(w.get(f"{here}.env", {}))
    taskset = env.pop("taskset", {})
    kind = env.pop("id", "")
    options = dict(taskset) if isinstance(taskset, dict) else {}
    name = options.pop("id", "") or kind
    if not name:
        w.by_hand(f"orchestrator.source.{here.rpartition('.')[2]}.env", f"{w.shown(here)} names no taskset")
        return {"env": "reverse"}
    args: dict[str, Any] = {"options": options} if options else {}
    if kind and kind != name:
        args["env"] = str(kind)
    agents = {seat: value for seat, value in env.items() if isinstance(value, dict) and seat not in OF_THE_ENV}
    settings = {seat: value for seat, value in env.items() if seat not in agents}
    for seat, agent in agents.items():
        _seat(w, f"{here}.env.{seat}", agent)
    args |= {"env_options": settings} if settings else {}
    args |= {"agents": agents} if agents else {}
    renderer = w.get("orchestrator.renderer")
    if renderer:
        words = {"default": "template", "auto": "auto"}
        only_name = words.get(str(renderer.get("name", "auto")), renderer.get("name", "auto"))
        args["renderer"] = only_name if len(renderer) == 1 else renderer | {"name": only_name}
    return {"env": f"verifiers:{name}", "args": _without_none(args)} if args else {"env": f"verifiers:{name}"}


def _seat(w: Work, path: str, agent: dict[str, Any]) -> None:
    """What of an agent can't be played in process."""
    tables = {name: value for name, value in agent.items() if isinstance(value, dict)}
    harness, runtime = tables.get("harness", {}), tables.get("runtime", {})
    if harness.get("id", "bash") not in PLAYED:
        w.note(
            "later", f"{path}.harness.id", "harnesses that are programs of their own are not run", 'id = "null": a chat'
        )
    elif harness.get("id", "bash") == "bash":
        w.note("differs", f"{path}.harness.id", "an agent chats with its taskset's tools; a shell is not offered")
    if runtime.get("type", "prime") not in ("prime", "subprocess"):
        w.note("later", f"{path}.runtime.type", "containers are not run for tasksets", 'type = "subprocess"')


def _of_its_own(w: Work, here: str, source: dict[str, Any]) -> None:
    """What a source has of its own: sampling, advantages, curriculum."""
    if (temperature := w.get(f"{here}.sampling.temperature")) is not None:
        source["temperature"] = float(temperature)
    if limit := w.get(f"{here}.sampling.max_completion_tokens"):
        source["max_tokens"] = min(limit, w.written["seq_len"] - 1)
    _extra_body(w, f"{here}.sampling")
    if (deadline := w.get(f"{here}.timeout")) is not None:
        source["rollout_s"] = float(deadline)
    kind = w.get(f"{here}.algo.type")
    if kind in OWN_ADVANTAGES:
        source["algorithm"] = NAMES[kind]
    elif kind:
        w.note("never", f"{here}.algo.type", f"{kind} is more than a rule for advantages", "a run of its own")
    if w.get(f"{here}.serve"):
        w.note("differs", f"{here}.serve", "rollouts run beside rank 0, or in source.workers processes")
    if w.get(f"{here}.curriculum.sampler.type") == "difficulty_pool":
        _pools(w, here, source)


def _pools(w: Work, here: str, source: dict[str, Any]) -> None:
    path = f"{here}.curriculum.sampler.pools"
    pools = w.get(
        path, {"hard": {"threshold": 0.25, "weight": 0.2}, "normal": {"threshold": 0.75}, "easy": {"threshold": 1}}
    )
    try:
        hard, medium, easy = sorted(pools.values(), key=lambda pool: float(pool["threshold"]))
        weights = [float(pool.get("weight", 1.0)) for pool in (hard, medium, easy)]
        total = sum(weights) or 1.0
        pool = {"hard": float(hard["threshold"]), "easy": float(medium["threshold"])}
        pool |= {"hard_share": weights[0] / total, "easy_share": weights[2] / total}
    except (AttributeError, KeyError, TypeError, ValueError):
        w.note("never", path, "there are three pools: hard, medium, easy", "source.pool")
        return
    source |= {"curriculum": "difficulty_pool", "pool": pool}
    w.note("differs", path, "weights of tasks become shares of groups; medium begins above `hard`, easy at `easy`")


def evaluation(w: Work) -> None:
    """Theirs has tasksets of its own; ours asks held-out tasks of the training sources."""
    if not w.on(EVAL):
        w.put("orchestrator.eval.tasks", 0, EVAL)
        return
    numbers = w.numbers(f"{EVAL}.source")
    own = {
        name: [w.get(f"{EVAL}.source.{i}.{name}") for i in numbers if w.given(f"{EVAL}.source.{i}.{name}")]
        for name in ("num_examples", "group_size", "interval")
    }
    tasks = max([w.get(f"{EVAL}.num_examples", -1), *own["num_examples"]])
    w.put("orchestrator.eval.tasks", tasks if tasks >= 0 else 64, EVAL)
    if tasks < 0:
        w.note("differs", EVAL, "all examples there; eval.tasks = 64 of every source here")
    samples = max([w.get(f"{EVAL}.group_size", 1), *own["group_size"]])
    greedy = w.get(f"{EVAL}.sampling.temperature") == 0
    w.put("orchestrator.eval.samples", 0 if greedy else samples, EVAL)
    w.put("orchestrator.eval.greedy", greedy, EVAL)
    w.put("orchestrator.eval.interval", min([w.get(f"{EVAL}.interval", 100), *own["interval"]]), EVAL)
    for name, ours in (("temperature", "temperature"), ("top_p", "top_p"), ("top_k", "top_k")):
        if (value := w.get(f"{EVAL}.sampling.{name}")) is not None:
            w.put(f"orchestrator.eval.{ours}", max(0, value), f"{EVAL}.sampling.{name}")
    if limit := w.get(f"{EVAL}.sampling.max_completion_tokens"):
        w.put(
            "orchestrator.eval.max_tokens",
            min(limit, w.written["seq_len"] - 1),
            f"{EVAL}.sampling.max_completion_tokens",
        )
    _extra_body(w, f"{EVAL}.sampling")


def rows(w: Work) -> None:
    """`[data]` and `[val]` of an sft.toml."""
    d, v = "sft.data", "sft.val"
    length = w.get(f"{d}.seq_len", 128)
    w.put("seq_len", length, f"{d}.seq_len")
    w.put("data.batch_size", w.get(f"{d}.batch_size", 128), f"{d}.batch_size")
    if (seed := w.get(f"{d}.seed")) is not None:
        w.put("seed", seed, f"{d}.seed")
    if w.get(f"{d}.type") == "fake":
        w.put("data.type", "fake", f"{d}.type")
        w.put("data.fake_length", length, f"{d}.type")
        if w.get(f"{d}.length") == "variable":
            w.put("data.fake_min_length", 2, f"{d}.length")
    elif not w.given(f"{d}.name"):
        w.put("data.name", "PrimeIntellect/Reverse-Text-SFT", f"{d}.name")
    splits = w.get(f"{d}.splits", [])
    if splits:
        w.put("data.split", str(splits[0]), f"{d}.splits")
    if len(splits) > 1:
        w.note("never", f"{d}.splits", "one table of rows is trained on", "write the rows into one file")
    w.put("data.too_long", "truncate", f"{d}.seq_len")
    learned = {
        role for role in ("system", "user", "assistant", "tool") if w.get(f"{d}.loss_mask.{role}", role == "assistant")
    }
    everyone = {"system", "user", "assistant", "tool"}
    w.put("data.loss_on", "all" if learned == everyone else "assistant", f"{d}.loss_mask")
    if learned not in ({"assistant"}, everyone):
        w.note(
            "never", f"{d}.loss_mask", f"data.loss_on can't be {sorted(learned)}", "assistant, last_assistant or all"
        )
    if w.on(v):
        w.put("data.eval_interval", w.get(f"{v}.interval", 50), v)
        held = w.get(f"{v}.data.name", "PrimeIntellect/Reverse-Text-SFT")
        w.put("data.validation", held, v)
        if w.get(f"{v}.data.splits"):
            w.by_hand("data.validation", "the name of a split of data.name, or another dataset")


def steps(w: Work) -> None:
    """The number of optimizer steps."""
    limit = w.one("max_steps", "trainer.max_steps")
    if limit is not None:
        w.put("max_steps", limit, "max_steps", "trainer.max_steps")
    else:
        w.by_hand("max_steps", "prime-rl runs without end where it is not set; 100 here")


def _without_none(value: Any) -> Any:
    """Free tables hold no None: a key without a value is left out."""
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value if inner is not None] if isinstance(value, list) else value
