"""Everything that can be known to be wrong before the first rollout, found on rank 0 while other ranks still build.

Model folder, tokenizer, vocabulary, environments, length of prompts, a teacher where a warm-up wants one, room on the
disk. Each error names the thing and the way out.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.algorithms import resolve
from spmd_rl.config.tree import Config, SourceConfig
from spmd_rl.envs.load import load as load_env
from spmd_rl.envs.pool.environment import PooledEnvironment
from spmd_rl.envs.pool.errors import PoolError
from spmd_rl.envs.pool.pool import Pool
from spmd_rl.envs.pool.spec import EnvironmentSpec
from spmd_rl.envs.protocol import Environment
from spmd_rl.models.hf_config import read_config
from spmd_rl.models.hf_config import resolve as resolve_folder
from spmd_rl.orchestrator.lessons import can_teach

REWARDS_TRIED = 4  # tasks per source
BEHIND_S = 5.0  # a worker's own deadline comes so much later than that of rank 0, which cancels first
LOOKED_AT = 32  # tasks per source whose prompts are measured
MIN_FREE_BYTES = 64 * 2**20


class PreflightError(ValueError):
    """The run could not have worked."""


def load_tokenizer(config: Config) -> Any:
    """The model's tokenizer (or `model.tokenizer`). PreflightError when it does not load."""
    from transformers import AutoTokenizer

    name = config.model.tokenizer or config.model.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        # For some models a folder without a tokenizer gives one that knows nothing, and no error.
        if not tokenizer.encode("a", add_special_tokens=False):
            raise ValueError("what is there makes no token of a letter")
    except Exception as error:  # transformers raises a dozen kinds for a damaged or missing tokenizer
        reason = str(error).strip().splitlines()[0]
        raise PreflightError(
            f"no tokenizer in {name!r} ({reason}): set model.tokenizer to a folder or Hub id that holds one"
        ) from error
    return tokenizer


def check_vocabulary(tokenizer: Any, model_config: dict[str, Any], config: Config) -> None:
    """PreflightError when the tokenizer makes ids that the model has no row for, or there is no end token."""
    vocab_size = model_config.get("vocab_size") or model_config.get("text_config", {}).get("vocab_size")
    largest = max(tokenizer.get_vocab().values())
    if vocab_size is not None and largest >= vocab_size:
        raise PreflightError(
            f"the tokenizer {config.model.tokenizer or config.model.name!r} makes token ids up to {largest}, but the "
            f"model {config.model.name!r} has a vocabulary of {vocab_size}: they do not belong together"
        )
    if tokenizer.eos_token_id is None:
        raise PreflightError(
            "the tokenizer has no end-of-sequence token, so no rollout would ever end; set eos_token in it"
        )


def check_reference(model_config: dict[str, Any], config: Config) -> None:
    """PreflightError when a frozen model can't speak of the policy's tokens."""
    name = config.orchestrator.algorithm.reference
    if not name:
        return
    other = read_config(resolve_folder(name))
    sizes = [c.get("vocab_size") or c.get("text_config", {}).get("vocab_size") for c in (model_config, other)]
    if sizes[0] != sizes[1]:
        raise PreflightError(
            f"orchestrator.algorithm.reference {name!r} has a vocabulary of {sizes[1]} and the model "
            f"{config.model.name!r} one of {sizes[0]}: a teacher must know the same tokens; name one of the same family"
        )


def stop_tokens(tokenizer: Any, folder: str) -> list[int]:
    """Ids that end a generation: the tokenizer's end token and what the model's generation_config names."""
    import json

    ids = {tokenizer.eos_token_id}
    path = Path(folder) / "generation_config.json"
    if path.exists():
        named = json.loads(path.read_text()).get("eos_token_id")
        ids |= set(named if isinstance(named, list) else [named]) - {None}
    return sorted(ids)


def load_environments(config: Config, tokenizer: Any) -> list[Environment]:
    """One environment per source, tried on its first tasks. PreflightError names the source and the task."""
    envs = []
    for number, source in enumerate(config.orchestrator.source):
        label = f"orchestrator.source[{number}] ({source.env or source.data})"
        try:
            env = _load(source, tokenizer, config)
        except (ValueError, TypeError, ImportError, PoolError) as error:
            raise PreflightError(f"{label}: {error}") from error
        _check_prompts(env, label, config)
        _check_reward(env, label)
        if resolve(config.orchestrator.algorithm).teacher == "hint" and not getattr(env, "hint", None):
            raise PreflightError(
                f"{label} gives no hints, which orchestrator.algorithm.type = {config.orchestrator.algorithm.type} "
                "needs: set the source's `hint` (a prompt that gives the answer away), or give the environment a "
                "method hint(task)"
            )
        if config.warmup.steps and not can_teach(env):
            raise PreflightError(
                f"{label} has no teacher, which warmup.steps = {config.warmup.steps} needs; set it to 0"
            )
        envs.append(env)
    return envs


def _load(source: SourceConfig, tokenizer: Any, config: Config) -> Environment:
    """The source's environment, in processes of its own where it wants them."""
    if not source.workers:
        return load_env(source, tokenizer, config.seed)
    pool = Pool(
        source.workers, call_workers=0, memory_mb=source.memory_mb, hang_s=source.hang_s, name=source.env or source.data
    )
    rollout_s = source.rollout_s or config.deadlines.env_s
    spec = EnvironmentSpec(source, tokenizer, config.seed)
    return PooledEnvironment(spec, pool, deadline_s=rollout_s + BEHIND_S, method_s=config.deadlines.start_s)


def _check_prompts(env: Environment, label: str, config: Config) -> None:
    splits = ["train", "heldout"] if config.orchestrator.eval.tasks else ["train"]
    for split in splits:
        for index in range(LOOKED_AT):
            try:
                prompt = np.asarray(env.prompt(env.task(index, split)))
            except Exception as error:
                raise PreflightError(f"{label}: {split} task {index} raised {type(error).__name__}: {error}") from error
            if not 1 <= len(prompt) < config.seq_len:
                raise PreflightError(
                    f"{label}: the prompt of {split} task {index} has {len(prompt)} tokens; with seq_len = "
                    f"{config.seq_len} there is no room for an answer. Raise seq_len, or shorten the prompts"
                )


def _check_reward(env: Environment, label: str) -> None:
    """Where an environment offers to try its reward beforehand, it is tried."""
    check = getattr(env, "check_reward", None)
    if check is None:
        return
    try:
        asyncio.run(check(REWARDS_TRIED))
    except ValueError as error:
        raise PreflightError(f"{label}: {error}") from error


def check_disk(config: Config) -> None:
    """PreflightError when the output folder can't be written or its disk is nearly full."""
    folder = Path(config.output_dir)
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if free < MIN_FREE_BYTES:
        raise PreflightError(
            f"the disk of output_dir {config.output_dir!r} has {free / 2**20:.0f} MiB free; "
            f"a run needs {MIN_FREE_BYTES / 2**20:.0f} MiB at least: free some, or set output_dir to another disk"
        )
