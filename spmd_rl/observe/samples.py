"""Readable rollouts: a few per optimizer step, as JSON lines in rollouts/step_000012.jsonl.

They are for people. Nothing reads them back, so text that cannot be decoded or encoded is shown as well as it can be
and never fails a run. This module refuses to know the tokenizer: it is handed a function from ids to text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.observe.disk import explain_full_disk
from spmd_rl.rollouts.types import Episode, Reward, Sample

Decode = Callable[[list[int]], str]


def write_samples(folder: str | Path, step: int, episodes: Iterable[Episode], decode: Decode, limit: int = 4) -> Path:
    """Write the first `limit` episodes of an optimizer step, one line per sample, and return the file.

    folder: the run's output folder. Raises OSError when the disk is full.
    """
    path = Path(folder) / "rollouts" / f"step_{step:06d}.jsonl"
    lines = [
        # A lone surrogate is no Unicode text; backslashreplace writes it as the JSON escape that it is.
        json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") + b"\n"
        for episode in itertools.islice(episodes, limit)
        for row in _rows(episode, step, decode)
    ]
    with explain_full_disk(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(lines))
    return path


def _rows(episode: Episode, step: int, decode: Decode) -> list[dict[str, Any]]:
    reward = episode.reward
    if isinstance(reward, Reward):
        outcome: dict[str, Any] = {"reward": reward.value, "reward_parts": dict(reward.parts)}
    else:
        outcome = {"reward": None, "reward_error": reward.why}
    shared = {
        "step": step,
        "source": episode.task.source,
        "task": episode.task.index,
        **outcome,
        "status": episode.status,
        "seconds": round(episode.seconds, 3),
    }
    return [shared | {"sample": i} | _sample_row(sample, decode) for i, sample in enumerate(episode.samples)]


def _sample_row(sample: Sample, decode: Decode) -> dict[str, Any]:
    """The prompt is everything before the first sampled token; the completion is the rest, tool answers included."""
    sampled = np.flatnonzero(sample.mask)
    start = int(sampled[0]) if sampled.size else len(sample.tokens)
    row = {
        "prompt": _text(sample.tokens[:start], decode),
        "completion": _text(sample.tokens[start:], decode),
        "prompt_tokens": start,
        "sampled_tokens": int(sampled.size),
        "version_min": int(sample.versions[sampled].min()) if sampled.size else None,
        "version_max": int(sample.versions[sampled].max()) if sampled.size else None,
        "advantage": None,
    }
    if sample.advantages is not None and sampled.size:
        row["advantage"] = float(np.broadcast_to(sample.advantages, len(sample.mask))[sampled].mean())
    return row


def _text(tokens_T: np.ndarray, decode: Decode) -> str:
    ids = tokens_T.tolist()
    try:
        return decode(ids)
    except Exception as error:  # a viewer must not end a run, whatever the tokenizer thinks of the ids
        return f"<not decodable ({error}): ids {ids}>"
