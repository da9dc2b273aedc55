"""Keys of prime-rl's orchestrator (`[orchestrator]` of an `rl.toml`)."""

from __future__ import annotations

from spmd_rl.config.prime_rl import table_run as run
from spmd_rl.config.prime_rl.keys import SECTION, Key, needless, never, ruled, same, under

NUMBER = (int, float)
ALGORITHMS = ("grpo", "echo", "max_rl", "rae", "hierarchical_grpo", "opd", "opsd", "sft")
TEACHER = "the teacher is a model of this run, loaded from its folder or Hub id; nothing is asked over HTTP"
RATES = "prompts and other observed tokens have one weight"
OWN_PARTS = "a source has its own advantages; the other parts of an algorithm are the run's"

# A model behind an endpoint: opd's teacher, the model that sft samples from.
ENDPOINT = (
    needless("base_url", (str, list), TEACHER),
    needless("api_key_var", str, TEACHER),
    needless("wait_for_ready_timeout", int, TEACHER),
    needless("headers", dict, TEACHER),
    needless("headers_from_env", dict, TEACHER),
    needless("extra_headers_from_state", dict, TEACHER),
    needless("skip_model_check", bool, TEACHER),
    needless("admin_base_url", (list, None), TEACHER),
)


def _algorithm(whole: bool) -> tuple[Key, ...]:
    """`algo` of the run, or of one source, where only its name is taken."""
    ours = "orchestrator.algorithm" if whole else "orchestrator.source.*.algorithm"

    def part(path: str, kinds: object, to: str, why: str = "") -> Key:
        if whole:
            return ruled(f"algo.{path}", kinds, f"{ours}.{to}", why)
        return never(f"algo.{path}", kinds, OWN_PARTS, f"orchestrator.algorithm.{to}, for all sources")

    return (
        ruled("algo", SECTION, ours),
        ruled("algo.type", ALGORITHMS, f"{ours}.type" if whole else ours, "rae: per_agent; …_grpo: hierarchical"),
        part("length_penalty", (SECTION, None), "length_penalty"),
        needless("algo.length_penalty.type", ("linear", "gr3"), "there is one form"),
        part("length_penalty.num_output_tokens_weight", NUMBER, "length_penalty"),
        *(
            never(f"algo.length_penalty.{name}", NUMBER, "only sampled tokens are penalised", "leave it out", (0, 0.0))
            for name in ("num_input_tokens_weight", "num_turns_weight")
        ),
        *(
            part(f"roles.{role}.alpha", NUMBER, "observation_weight", RATES)
            for role in ("tool", "user", "system", "assistant")
        ),
        *(
            part(f"roles.{role}", (SECTION, None), "observation_weight")
            for role in ("tool", "user", "system", "assistant")
        ),
        never("algo.filter", (SECTION, None), RATES, "leave it out", (None,)),
        needless("algo.filter.import_path", str, RATES),
        needless("algo.filter.kwargs", dict, RATES),
        part("decay", NUMBER, "baseline_decay"),
        part("episode_agents", list, "episode_agent", "one agent"),
        part("teacher.name", str, "reference"),
        *under("algo.teacher", ENDPOINT),
        part("sampling.source", (SECTION, "policy"), "reference"),
        part("sampling.source.name", str, "reference"),
        *under("algo.sampling.source", ENDPOINT),
        never("algo.demo_key", str, "a hint is a format string", "source.hint, or a method hint(task)"),
        never("algo.template", str, "a hint is a format string", "source.hint, or a method hint(task)"),
        needless("algo.renderer", dict, "a hint is rendered as its prompt is"),
    )


def _sampling(evaluating: bool) -> tuple[Key, ...]:
    ours = "orchestrator.eval" if evaluating else "orchestrator.sampling"
    more = (
        ruled("top_p", (float, int, None), "orchestrator.eval.top_p"),
        ruled("top_k", (int, None), "orchestrator.eval.top_k", "-1: 0"),
        never("min_p", (float, int, None), "there is no min-p", "top_p or top_k", (None, 0, 0.0)),
        never("reasoning_effort", (str, None), "no such switch", "say it in the tasks' system message", (None,)),
    )
    temperatures = (float, int, None) if evaluating else (float, int)
    return (
        ruled(
            "temperature", temperatures, f"{ours}.temperature", "0, in an evaluation: eval.greedy" if evaluating else ""
        ),
        ruled("max_completion_tokens", (int, None), f"{ours}.max_tokens", "absent: what seq_len leaves"),
        ruled("extra_body", dict, "", "top_k = -1, min_p = 0 and token ids are how things are; the rest is listed"),
        *(more if evaluating else ()),
        never(
            "repetition_penalty",
            (float, int, None),
            "it would not be the policy that is trained",
            "leave it out",
            (None, 1, 1.0),
        ),
        never("min_tokens", (int, None), "no answer is forced to go on", "leave it out", (None, 0)),
        needless("seed", (int, None), "seed is the run's"),
        *(
            ()
            if evaluating
            else (
                never("temp_scheduler", dict, "the temperature is constant", "temperature; or tools/steer.py, by hand"),
            )
        ),
    )


SOURCE = (
    ruled("env", dict, "orchestrator.source.*.env and args", "env.taskset.id: verifiers:<id>"),
    ruled("name", (str, None), "orchestrator.source.*.name"),
    ruled("serve", dict, "", "rollouts run in rank 0; source.workers for processes of their own"),
    ruled("max_retries", int, "orchestrator.max_retries", "0.5"),
    needless("extra_env_kwargs", dict, "0.5: filled in by their program"),
    needless("state_columns", list, "0.6: rollouts/ holds what was said"),
    never("max_total_completion_tokens", int, "0.6", "source.max_tokens bounds one answer", (-1,)),
    ruled("timeout", (float, int, None), "orchestrator.source.*.rollout_s", "0.6"),
)
TRAIN_SOURCE = (
    *SOURCE,
    ruled("ratio", (float, int, None), "orchestrator.source.*.ratio"),
    ruled("group_size", int, "orchestrator.source.*.group_size"),
    *under("sampling", _sampling(evaluating=False)),
    never("advantage", (dict, None), "0.6: " + OWN_PARTS, "orchestrator.algorithm.advantage", (None,)),
    *_algorithm(whole=False),
    ruled("curriculum.sampler.type", ("standard", "difficulty_pool"), "orchestrator.source.*.curriculum"),
    ruled("curriculum.sampler.pools", dict, "orchestrator.source.*.pool", "shares of groups, not weights of tasks"),
    needless("curriculum.sampler.seed", int, "seed is the run's"),
    ruled(
        "curriculum.gates", dict, "orchestrator.algorithm.zero_variance", "refill; only for advantages that are all 0"
    ),
    ruled("curriculum", SECTION, "orchestrator.source.*.curriculum"),
)
ELSEWHERE = "held-out tasks of the training sources are evaluated"
EVALUATE = "main.py eval --config THIS.toml --orchestrator.source.0.env verifiers:<id>, on an export of the run"
EVAL_SOURCE = (
    *(never(row.path, row.kinds, ELSEWHERE, EVALUATE) for row in SOURCE if row.path == "env"),
    *(needless(row.path, row.kinds, ELSEWHERE) for row in SOURCE if row.path != "env"),
    needless("ratio", (float, int, None), ELSEWHERE),
    ruled("num_examples", int, "orchestrator.eval.tasks", "the largest of the sources' counts"),
    ruled("group_size", int, "orchestrator.eval.samples", "the largest"),
    ruled("interval", int, "orchestrator.eval.interval", "the smallest"),
    needless("skip_first", int, ELSEWHERE),
    *(needless(f"sampling.{row.path}", row.kinds, ELSEWHERE) for row in _sampling(evaluating=True)),
)
EVAL = (
    ruled("eval", (SECTION, None), "orchestrator.eval", "none: eval.tasks = 0"),
    ruled("eval.num_examples", int, "orchestrator.eval.tasks", "-1: all; 64 here"),
    ruled("eval.group_size", int, "orchestrator.eval.samples"),
    ruled("eval.interval", int, "orchestrator.eval.interval"),
    *under("eval.sampling", _sampling(evaluating=True)),
    *under("eval.source.*", EVAL_SOURCE),
    never("eval.skip_first_step", bool, "step 0 is always evaluated", "leave it out", (False,)),
    needless("eval.retrigger_on_resume", bool, "an evaluation that was cut off goes on"),
    never("eval.eval_base_model", bool, "step 0 is always evaluated", "leave it out", (True,)),
    needless("eval.skip_eval_on_resume", bool, "an evaluation that was cut off goes on"),
    needless("eval.cancel_inflight_rollouts_on_eval", bool, "older rollouts go first, whatever they are for"),
)

OPD = "orchestrator.algorithm.type = opd or sft, with reference = NAME"
FILTERS = "no filter looks for gibberish or repetition"
ORCHESTRATOR = under(
    "orchestrator",
    (
        *_algorithm(whole=True),
        ruled("model.name", str, "model.name"),
        never("model.trust_remote_code", bool, "no code of a model's repository is run", "leave it out", (False,)),
        *under("model", run.VISION),
        needless("model.lora", (SECTION, None), "see trainer.model.lora"),
        needless("model.lora.name", (str, None), "see trainer.model.lora"),
        needless("model.lora.rank", (int, None), "see trainer.model.lora"),
        needless("model.lora.alpha", (int, float, None), "see trainer.model.lora"),
        *(needless(f"model.client.{row.path}", row.kinds, run.HTTP) for row in ENDPOINT),
        *under("train.source.*", TRAIN_SOURCE),
        *under("train.sampling", _sampling(evaluating=False)),
        ruled("train.filter_zero_advantages", bool, "orchestrator.algorithm.zero_variance", "keep: they weigh nothing"),
        same("train.max_retries", int, "orchestrator.max_retries", why="0.6"),
        needless("train.num_workers", (int, "auto"), "source.workers, for heavy environments"),
        *EVAL,
        *run.TOKENIZER,
        ruled("renderer", dict, "orchestrator.source.*.args.renderer", "default: template"),
        *run.LOG,
        run.ENV_VARS,
        *run.MONITORS,
        *run.PRIME,
        needless("collect_inference_metrics", bool, "the engines' numbers are in metrics.jsonl"),
        needless("inference_metrics_roles", (list, None), "the engines' numbers are in metrics.jsonl"),
        *run.CKPT,
        needless("ckpt.wait_for_weights_timeout", (int, None), "weights are not looked for on disk"),
        *(row for row in run.SKIP if row.path in ("ckpt.skip_progress", "ckpt.skip_buffer")),
        *run.RESUME,
        *run.BROADCAST,
        *run.ROLLOUTS,
        needless("output_dir", str, "there is one output_dir"),
        never(
            "tasks_per_minute", (int, None), "starts are not counted by time", "the environment's own limit", (None,)
        ),
        needless("env_server_base_port", int, "environments are not servers"),
        ruled("batch_size", (int, None), "orchestrator.batch_size"),
        ruled(
            "token_batch_size", (int, None), "orchestrator.batch_size", "batch_unit = tokens; sampled ones count here"
        ),
        ruled("group_size", int, "orchestrator.group_size"),
        ruled("concurrency.max_inflight", (int, None), "orchestrator.max_lag", "in flight are (max_lag + 1) batches"),
        needless("concurrency.initial_inflight", (int, None), "nothing is ramped up"),
        needless("concurrency.min_inflight", int, "nothing is ramped up"),
        ruled("seq_len", int, "seq_len"),
        needless("num_train_workers", int, "the mesh knows"),
        needless("pad_to_multiple_of", int, "the packer knows"),
        ruled("max_steps", (int, None), "max_steps"),
        ruled("max_off_policy_steps", int, "orchestrator.max_off_policy_steps and max_lag", "8 where nothing is said"),
        *run.HEARTBEAT,
        # Names of earlier versions.
        *(
            never(name, kinds, "a teacher is part of an algorithm", OPD, harmless)
            for name, kinds, harmless in (
                ("teacher", dict, ()),
                ("teacher_model", (dict, None), (None,)),
                ("teacher_rollout_model", (dict, None), (None,)),
                ("training_mode", ("rl", "opd", "sft"), ("rl",)),
            )
        ),
        ruled("max_async_level", int, "orchestrator.max_lag", "0.5"),
        never("strict_async_level", bool, "0.5", "orchestrator.order = fifo is nearest", (False,)),
        ruled("oversampling_factor", (int, float, None), "orchestrator.max_lag", "0.5"),
        never("optim.lr", (int, float), "0.5: of runs that share a trainer", "trainer.optim.lr"),
        needless("bench", bool, "0.5: --bench is a flag"),
        needless("log.env_worker_logs", bool, "0.4: logs/rank_00000.log"),
        needless("trajectory_strategy", str, "0.4: a history that was rewritten becomes several samples"),
        ruled("seed", (int, None), "seed", "0.5"),
        needless("use_token_client", bool, "0.5: only token ids go to and from the engines"),
        needless("max_concurrent", (int, None), "0.5: in flight are (max_lag + 1) batches"),
        never("buffer.skip_verification", bool, "0.4: every rollout has a reward", "leave it out", (False,)),
        never("verification.enabled", bool, "0.5: every rollout has a reward", "leave it out", (True,)),
        ruled("advantage.type", ("default", "custom"), "orchestrator.algorithm.advantage", "0.6"),
        ruled("advantage.import_path", str, "orchestrator.algorithm.advantage", "0.6; another signature"),
        never("advantage.kwargs", dict, "0.6: an advantage takes rewards and the group", "write them in", ({},)),
        never("advantage.length_penalty", (dict, None), "0.6", "algorithm.length_penalty", (None,)),
        never("advantage.length_shaping_alpha", (float, None), "0.5", "algorithm.length_penalty", (None,)),
        never("advantage.length_weighted_baseline", bool, "0.6", "leave it out", (False,)),
        *(
            never(name, list, FILTERS, "leave it out")
            for name in ("filters", "pre_batch_filters", "post_batch_filters")
        ),
        ruled("buffer.online_difficulty_filtering", bool, "orchestrator.algorithm.zero_variance", "0.5: refill"),
        ruled("buffer.env_ratios", (list, None), "orchestrator.source.*.ratio", "0.5"),
        *(
            never(
                f"buffer.{name}", (float, int, None), "0.5: tasks are not put away", "source.curriculum", (None, 0, 0.0)
            )
            for name in ("easy_threshold", "hard_threshold", "easy_fraction", "hard_fraction")
        ),
        needless("buffer.seed", (int, None), "0.5: seed is the run's"),
        needless("buffer.hash_keys", list, "0.5: tasks have numbers"),
        *(
            never(f"val.{name}", int, "0.5: held-out tasks are evaluated", "orchestrator.eval")
            for name in ("num_examples", "group_size", "interval")
        ),
        *(needless(f"client.{row.path}", row.kinds, run.HTTP) for row in ENDPOINT),
        *(
            needless(f"client.{name}", object, run.HTTP)
            for name in ("timeout", "connect_timeout", "dp_rank_count", "elastic", "router_url")
        ),
    ),
)
