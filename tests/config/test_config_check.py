"""Ranges and relations: each violation is found, named, and comes with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.config import Config, ConfigError, check, load
from spmd_rl.config.check import AT_LEAST, POSITIVE
from spmd_rl.config.schema import known_kinds

DATA = "--orchestrator.source.0.env= --orchestrator.source.0.data x.jsonl --orchestrator.source.0.reward exact"

OK = ["--model.name", "m"]
SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))

GOOD = [
    "",
    "--orchestrator.batch-size 12 --orchestrator.group-size 4",
    "--orchestrator.max-lag 0 --orchestrator.window-fraction 1.0",
    "--max-steps 0 --warmup.steps 1",
    "--trainer.optim.lr 0",
    "--trainer.optim.betas 0 0.999",
    "--trainer.scheduler.type cosine --trainer.scheduler.warmup-steps 99",
    "--trainer.scheduler.type linear --trainer.scheduler.warmup-steps 100 --trainer.scheduler.decay-steps 5",
    "--trainer.scheduler.min-lr 1.0",
    "--warmup.scheduler.type cosine",
    "--trainer.model.attn flash_attention_2 --trainer.model.dtype bfloat16",
    "--trainer.model.attn flash_attention_4 --trainer.model.dtype bfloat16",
    "--trainer.parallel.cp 2 --trainer.parallel.dp-replicate 2",
    "--trainer.moe.bias-rate 0.001 --trainer.router-replay",
    "--trainer.parallel.nodes-per-fsdp-group 2 --trainer.parallel.ep 0",
    "--deployment.infer-ranks 4 --inference.tp 2",
    "--inference.vllm.max_num_seqs 4 --inference.vllm.gpu_memory_utilization 0.5",
    "--weights.strict",
    "--weights.probe-sequences 0 --weights.probe-length 4000",
    "--seed 4294967295",
]


@pytest.mark.parametrize("line", GOOD)
def test_good(line):
    check(load([*OK, *line.split()]))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs(path):
    check(load(["@", str(path), *OK]))


BAD = [
    ("--model.name=", ["model.name is empty", "Hugging Face format"]),
    ("--output-dir=", ["output_dir is empty"]),
    ("--max-steps 0", ["max_steps = 0 and warmup.steps = 0", "nothing to do"]),
    ("--max-steps -1 --warmup.steps 1", ["max_steps = -1", "0 or more"]),
    ("--seed -1", ["seed = -1"]),
    ("--seed 4294967296", ["seed = 4294967296", "2**32"]),
    ("--orchestrator.batch-size 30", ["batch_size = 30", "group_size = 8", "24 or 32"]),
    ("--orchestrator.batch-size 3", ["batch_size = 3", "set batch_size to 8,"]),
    ("--orchestrator.group-size 0", ["orchestrator.group_size = 0", "1 or more"]),
    ("--orchestrator.batch-size 0", ["orchestrator.batch_size = 0", "1 or more"]),
    ("--orchestrator.max-lag -1", ["orchestrator.max_lag = -1", "0 or more"]),
    ("--orchestrator.window-fraction 0", ["orchestrator.window_fraction = 0.0"]),
    ("--orchestrator.window-fraction 1.1", ["orchestrator.window_fraction = 1.1"]),
    ("--orchestrator.max-error-rate 1.5", ["orchestrator.max_error_rate = 1.5", "share"]),
    ("--orchestrator.sampling.temperature 0", ["orchestrator.sampling.temperature = 0.0", "greater than 0"]),
    ("--orchestrator.sampling.top-p 0.9", ["top_p = 0.9", "full distribution", "set it to 1"]),
    ("--orchestrator.sampling.top-k 20", ["top_k = 20", "full distribution", "set it to 0"]),
    ("--orchestrator.sampling.max-tokens 64 --seq-len 64", ["max_tokens = 64", "seq_len = 64"]),
    ("--orchestrator.source.0.ratio 0", ["orchestrator.source.0.ratio = 0.0", "greater than 0"]),
    ("--orchestrator.source.0.env=", ["orchestrator.source.0: neither env nor data is set"]),
    ("--orchestrator.source.0.data x.jsonl --orchestrator.source.0.reward exact", ["both env and data are set"]),
    ("--orchestrator.source.0.env= --orchestrator.source.0.data x.jsonl", ["source.0.reward is empty", "exact, regex"]),
    ("--orchestrator.source.0.chat", ["source.0.chat belongs to a dataset", "env = reverse"]),
    ("--guard.on-collapse rollback", ["rollback with ckpt.interval = 0", "no checkpoint to go back to"]),
    ("--guard.on-collapse rollback --ckpt.interval 10", ["ckpt.keep = 2 with", "set keep to 4 or more"]),
    (f"{DATA} --orchestrator.source.0.heldout-share 1", ["heldout_share = 1.0"]),
    (f"{DATA} --orchestrator.source.0.max-tokens -1", ["max_tokens = -1"]),
    (f"{DATA} --orchestrator.source.0.reward-s 0", ["reward_s = 0.0"]),
    (f"{DATA} --orchestrator.source.0.weights.a high", ["weights.a = 'high'"]),
    (f"{DATA} --orchestrator.source.0.reward-workers 0", ["reward_workers = 0"]),
    (f"{DATA} --orchestrator.source.0.system Brief.", ["source.0.system is a chat message", "chat = true"]),
    (f"{DATA} --orchestrator.source.0.args.a 1", ["are reward_args"]),
    ("--orchestrator.algorithm.critic.lr 0", ["orchestrator.algorithm.critic.lr = 0.0"]),
    ("--trainer.optim.betas 0.9 1", ["trainer.optim.betas = [0.9, 1.0]"]),
    ("--warmup.optim.betas -0.1 0.9", ["warmup.optim.betas = [-0.1, 0.9]"]),
    ("--trainer.optim.lr -1e-3", ["trainer.optim.lr = -0.001"]),
    ("--trainer.scheduler.type linear --trainer.scheduler.min-lr 1", ["min_lr = 1.0", "trainer.optim.lr = 1e-06"]),
    (
        "--trainer.scheduler.type cosine --trainer.scheduler.warmup-steps 100",
        ["trainer.scheduler.warmup_steps = 100", "max_steps = 100"],
    ),
    (
        "--warmup.scheduler.type cosine --warmup.scheduler.warmup-steps 5 --warmup.steps 5",
        ["warmup.scheduler.warmup_steps = 5", "warmup.steps = 5"],
    ),
    ("--trainer.parallel.cp 0", ["trainer.parallel.cp = 0", "1 or more"]),
    ("--trainer.parallel.ep 2 --trainer.model.impl hf", ["trainer.parallel.ep = 2", "impl = hf", "set impl = custom"]),
    ("--trainer.parallel.ep 2 --trainer.model.impl titan", ["impl = titan", "torchtitan's models can't be divided"]),
    ("--trainer.parallel.cp 2 --trainer.model.impl titan", ["impl = titan", "torchtitan's models can't cut a row"]),
    ("--trainer.router-replay --trainer.model.impl titan", ["impl = titan", "torchtitan's routers can't be forced"]),
    ("--trainer.moe.bias-rate 0.001", ["trainer.moe.bias_rate = 0.001", "trainer.router_replay", "sequence_coef"]),
    ("--trainer.parallel.ep-comm-backend deepep", ["ep_comm_backend = deepep", "dtype = bfloat16"]),
    (
        "--trainer.parallel.ep-comm-backend deepep --trainer.model.dtype bfloat16 --deployment.device cpu",
        ["ep_comm_backend = deepep", "deployment.device"],
    ),
    ("--trainer.parallel.cp 2 --trainer.model.impl hf", ["trainer.parallel.cp = 2", "impl = hf", "set impl = custom"]),
    (
        "--trainer.parallel.dp-replicate 2 --trainer.parallel.nodes-per-fsdp-group 1",
        ["nodes_per_fsdp_group = 1 with dp_replicate = 2", "set one of them to its default"],
    ),
    ("--trainer.model.attn varlen", ["trainer.model.attn = varlen", "trainer.model.dtype = float32", "bfloat16"]),
    (
        "--trainer.model.attn varlen --trainer.model.dtype bfloat16 --deployment.device cpu",
        ["trainer.model.attn = varlen", "deployment.device = cpu", "sdpa"],
    ),
    ("--deployment.infer-ranks 3 --inference.tp 2", ["infer_ranks = 3", "inference.tp = 2", "set infer_ranks to 2"]),
    ("--inference.tp 0", ["inference.tp = 0"]),
    ("--weights.strict --weights.probe-sequences 0", ["weights.strict", "weights.probe_sequences = 0"]),
    ("--weights.probe-length 4000", ["weights.probe_length = 4000", "seq_len = 2048"]),
    ("--deadlines.step-s 7200", ["deadlines.collective_s = 7200.0", "deadlines.step_s = 7200.0", "raise"]),
    ("--deadlines.heartbeat-s 0", ["deadlines.heartbeat_s = 0.0", "greater than 0"]),
    ("--log.wandb --log.wandb-project=", ["log.wandb_project is empty"]),
    ("--inference.vllm.model x", ["inference.vllm.model = x", "model.name"]),
    ("--inference.vllm.dtype float16", ["inference.vllm.dtype = float16", "trainer.model.dtype"]),
    ("--inference.vllm.seed 1", ["inference.vllm.seed = 1", "set by seed"]),
    ("--inference.vllm.max-model-len 64", ["inference.vllm.max_model_len = 64", "seq_len"]),
    ("--inference.vllm.tensor-parallel-size 2", ["tensor_parallel_size = 2", "inference.tp"]),
    ("--inference.vllm.enable-expert-parallel true", ["enable_expert_parallel = ", "inference.expert_parallel"]),
    ("--inference.vllm.enable-eplb true", ["enable_eplb = ", "the one rank that holds it", "remove it"]),
    ("--inference.expert-parallel", ["inference.expert_parallel = true", "raise inference.tp"]),
    ("--inference.vllm.data-parallel-size 2", ["data_parallel_size = 2", "deployment.infer_ranks"]),
    ("--inference.vllm.logprobs-mode raw_logprobs", ["logprobs_mode = raw_logprobs", "remove it"]),
    ("--inference.vllm.worker-cls x", ["worker_cls = x", "remove it"]),
]


@pytest.mark.parametrize(("line", "says"), BAD, ids=[line for line, _ in BAD])
def test_bad(line, says):
    with pytest.raises(ConfigError) as error:
        check(load([*OK, *line.split()]))
    assert len(error.value.problems) == 1, error.value
    for part in says:
        assert part in str(error.value)


def test_engine_arguments_with_dashes(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[inference.vllm]\nmax-num-seqs = 4\nmax-model-len = 8")
    with pytest.raises(ConfigError) as error:
        check(load([*OK, "@", str(path)]))
    assert [p.split(":")[0] for p in error.value.problems] == [
        "inference.vllm.max-num-seqs",
        "inference.vllm.max-model-len = 8",
    ]
    assert "write max_num_seqs" in error.value.problems[0] and "set by seq_len" in error.value.problems[1]


def test_no_sources(tmp_path):
    (tmp_path / "a.toml").write_text("orchestrator.source = []")
    with pytest.raises(ConfigError, match=r"orchestrator\.source is empty"):
        check(load([*OK, "@", str(tmp_path / "a.toml")]))


def test_everything_is_reported_together():
    with pytest.raises(ConfigError) as error:
        check(load(["--seed", "-1", "--orchestrator.batch-size", "30", "--deadlines.step-s", "1e9"]))
    assert len(error.value.problems) == 4  # and model.name


PIECES = tuple(f"orchestrator.algorithm.{name}" for name in ("clip.", "correction.", "baseline_decay"))


def test_every_number_of_the_tree_has_a_bound():
    numbers = {path for path, kind in known_kinds().items() if kind in (int, float)}
    elsewhere = {
        "orchestrator.window_fraction",
        "orchestrator.sampling.top_p",
        "orchestrator.sampling.top_k",
        "orchestrator.eval.top_p",
        "orchestrator.eval.pass_reward",  # any reward may be enough
    }
    elsewhere |= {path for path in numbers if path.startswith("orchestrator.source.")}  # check_sources.py
    elsewhere |= {path for path in numbers if path.startswith("bench.")}  # bench.py
    elsewhere |= {path for path in numbers if path.startswith(PIECES)}  # spmd_rl/algorithms/check.py
    assert numbers == set(POSITIVE) | set(AT_LEAST) | elsewhere
    assert not set(POSITIVE) & set(AT_LEAST)


def test_only_the_model_is_missing_from_the_defaults():
    with pytest.raises(ConfigError) as error:
        check(Config())
    assert len(error.value.problems) == 1 and "model.name" in error.value.problems[0]


SFT = "--data.name rows.jsonl"
BAD_SFT = {
    "": ["data.name is empty", "type = fake"],
    f"{SFT} --data.prompt q": ["data.prompt = 'q' with data.completion = ''", "name both"],
    f"{SFT} --data.validation-share 1": ["validation_share = 1.0", "below 1"],
    f"{SFT} --data.eval-interval 5": ["eval_interval = 5 without", "nothing to validate on"],
    "--data.type fake --data.fake-length 99 --seq-len 64": ["fake_length = 99 is above seq_len = 64"],
    "--data.type fake --data.fake-length 9 --data.fake-min-length 10": ["fake_min_length = 10 is above"],
    f"{SFT} --max-steps 0": ["nothing to do"],
    f"{SFT} --data.batch-size 0": ["data.batch_size = 0"],
    f"{SFT} --ckpt.interval -1": ["ckpt.interval = -1"],
}


@pytest.mark.parametrize("flags", BAD_SFT)
def test_bad_sft(flags):
    with pytest.raises(ConfigError) as error:
        check(load(["--model.name", "x", *flags.split()]), "sft")
    for part in BAD_SFT[flags]:
        assert part in str(error.value)


def test_supervised_training_does_not_ask_for_what_engines_need():
    check(load(["--model.name", "x", *SFT.split(), "--seq-len", "64", "--orchestrator.group-size", "1"]), "sft")
