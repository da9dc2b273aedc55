"""What is asked of the policy: sources of tasks, how they are sampled, in what order, and how it is evaluated.

A part of the tree (`tree.py`), with the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class SamplingConfig:
    """How rollouts are sampled. Truncated distributions (top-p, top-k) are refused for training."""

    temperature: float = 1.0
    max_tokens: int = 256  # new tokens per generation
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    ignore_eos: bool = False  # go on to max_tokens whatever is sampled


@dataclass(frozen=True)
class PoolConfig:
    """A curriculum that asks often for tasks of medium difficulty, judged by the mean reward of their last group."""

    tasks: int = 1000  # the source's first so many training tasks are the pool
    easy: float = 0.9  # mean reward from which a task is easy
    hard: float = 0.1  # and down to which it is hard
    easy_share: float = 0.1  # of the groups, from the easy tasks; the rest is medium, or not tried yet
    hard_share: float = 0.2


@dataclass(frozen=True)
class SourceConfig:
    """One source of tasks: an environment's class (`env`), or a dataset and a reward (`data`, `reward`)."""

    env: str = ""  # a built-in name, `pkg.mod:Class` or `file.py:Class`
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the environment's class
    name: str = ""  # in metrics; empty: the environment's or the file's
    ratio: float = 1.0  # share of groups drawn from this source, relative to the other sources
    group_size: int = 0  # rollouts per task; 0 = orchestrator.group_size
    temperature: float = 0.0  # of training; 0 = orchestrator.sampling.temperature
    max_tokens: int = 0  # new tokens per generation at most; 0 = orchestrator.sampling.max_tokens
    workers: int = 0  # processes in which its rollouts run; 0 = in rank 0's, beside everything else
    memory_mb: int = 0  # MiB that one of them may allocate; 0 = no limit
    hang_s: float = 10.0  # one of them without a sign of life for so long is ended and replaced
    rollout_s: float = 0.0  # deadline of one rollout; 0 = deadlines.env_s
    algorithm: str = ""  # whose advantages its groups get; empty: orchestrator.algorithm
    curriculum: Literal["cyclic", "difficulty_pool"] = "cyclic"  # which task comes next
    pool: PoolConfig = field(default_factory=PoolConfig)  # of difficulty_pool
    data: str = ""  # *.jsonl, *.parquet (a folder, a pattern) or a Hub dataset id
    split: str = "train"  # of a Hub dataset
    heldout: str = ""  # dataset for evaluation, or the name of the Hub dataset's split; empty: a share of `data`
    heldout_share: float = 0.1  # of the rows, kept from training where `heldout` is empty
    prompt: str = "{prompt}"  # a format string over the row's columns
    chat: bool = False  # the prompt is a user's message, in the tokenizer's chat template
    system: str = ""  # a system message before it
    messages: str = ""  # column of chat messages, in place of `prompt`
    answer: str = ""  # column of the right answer: for built-in rewards, the warm-up and hints
    hint: str = ""  # like `prompt`, but giving the answer away: for self-distillation
    reward: str = ""  # exact, regex, json_schema, math, `pkg.mod:function` or `file.py:function`
    reward_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of a built-in reward
    weights: dict[str, Any] = field(default_factory=dict)  # of a reward's named parts; 1 where not named
    reward_s: float = 30.0  # deadline of one reward
    reward_workers: int = 2  # processes of the reward math; other rewards run in threads


@dataclass(frozen=True)
class EvalConfig:
    """Held-out tasks, evaluated on the training engines at step 0, every `interval` steps and at the end."""

    tasks: int = 64  # held-out tasks per source; 0 = never evaluate
    interval: int = 0  # optimizer steps between evaluations; 0 = only at the start and at the end
    samples: int = 4  # sampled rollouts per task: k of avg@k and pass@k
    greedy: bool = True  # and one greedy rollout per task
    temperature: float = 0.0  # of the sampled ones; 0 = that of training
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    max_tokens: int = 0  # new tokens per generation at most; 0 = as in training
    pass_reward: float = 1.0  # reward from which an attempt has passed


@dataclass(frozen=True)
class GenerateConfig:
    """What `main.py generate` completes, with `orchestrator.sampling`."""

    input: str = ""  # *.jsonl, *.parquet (a folder, a pattern) or a Hub dataset id
    split: str = "train"  # of a Hub dataset
    output: str = ""  # *.jsonl; empty: generations.jsonl in output_dir. What it holds already is not done again
    prompt: str = "{prompt}"  # a format string over the row's columns
    chat: bool = False  # the prompt is a user's message, in the tokenizer's chat template
    system: str = ""  # a system message before it
    messages: str = ""  # column of chat messages, in place of `prompt`
    samples: int = 1  # completions per row
    at_once: int = 512  # completions in flight


@dataclass(frozen=True)
class ServeConfig:
    """Where `main.py serve` answers OpenAI's chat and text completions."""

    host: str = "127.0.0.1"  # 0.0.0.0 lets other hosts in; there is no encryption
    port: int = 8000  # 0 = any that is free
    key: str = ""  # what clients must show; empty: a new one, which is printed
