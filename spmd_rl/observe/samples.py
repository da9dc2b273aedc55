"""Readable rollouts: a few per optimizer step, as JSON lines in rollouts/step_000012.jsonl, one line per sample.

They are for people, as text and token by token (`tools/view.py` makes a page of them). No training reads them back, so
text that cannot be decoded or encoded is shown as well as it can be and never fails a run. This module refuses to
know the tokenizer: it is handed a function from ids to text.

Invariants: every line is standard JSON (NaN and infinities become null); the columns `pieces`, `mask`, `logprobs` and
`versions` have one entry per token; the pieces joined are the text of the whole sample.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.observe.disk import explain_full_disk
from spmd_rl.observe.pieces import Decode, token_pieces
from spmd_rl.rollouts.types import Episode, Reward, Sample

MAX_DATA = 8192  # characters of a task's data; a longer one is cut
_NONE = np.empty(0, np.int32)
_NO_TOKENS = Sample(tokens=_NONE, mask=_NONE, logprobs=_NONE, versions=_NONE, temperatures=_NONE)


def write_samples(folder: str | Path, step: int, episodes: Iterable[Episode], decode: Decode, limit: int = 4) -> Path:
    """Write the first `limit` episodes of an optimizer step, one line per sample, and return the file.

    folder: the run's output folder. Raises OSError when the disk is full.
    """
    path = Path(folder) / "rollouts" / f"step_{step:06d}.jsonl"
    lines = [
        # A lone surrogate is no Unicode text; backslashreplace writes it as the JSON escape that it is.
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
        for number, episode in enumerate(itertools.islice(episodes, limit))
        for row in _rows(episode, step, number, decode)
    ]
    with explain_full_disk(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(lines))
    return path


def _rows(episode: Episode, step: int, number: int, decode: Decode) -> list[dict[str, Any]]:
    shared = {
        "step": step,
        "episode": number,
        "source": episode.task.source,
        "task": episode.task.index,
        **_outcome(episode),
        "status": episode.status,
        "seconds": round(episode.seconds, 3),
        "data": _plain_data(episode.task.data),
    }
    samples = episode.samples or (_NO_TOKENS,)  # a rollout that failed early is a line too
    return [shared | {"sample": i} | _sample_row(sample, decode) for i, sample in enumerate(samples)]


def _outcome(episode: Episode) -> dict[str, Any]:
    """A reward that is no number is no reward."""
    if not isinstance(episode.reward, Reward):
        return {"reward": None, "reward_error": episode.reward.why}
    value = _number(episode.reward.value)
    outcome = {"reward": value, "reward_parts": {name: _number(part) for name, part in episode.reward.parts.items()}}
    if value is None:
        outcome["reward_error"] = f"the reward is {episode.reward.value}"
    return outcome


def _sample_row(sample: Sample, decode: Decode) -> dict[str, Any]:
    """The prompt is everything before the first sampled token; the completion is the rest, tool answers included."""
    sampled = np.flatnonzero(sample.mask)
    start = int(sampled[0]) if sampled.size else len(sample.tokens)
    return {
        "agent": sample.agent,
        "sample_reward": _number(sample.reward),
        "prompt": _text(sample.tokens[:start], decode),
        "completion": _text(sample.tokens[start:], decode),
        "prompt_tokens": start,
        "sampled_tokens": int(sampled.size),
        "version_min": int(sample.versions[sampled].min()) if sampled.size else None,
        "version_max": int(sample.versions[sampled].max()) if sampled.size else None,
        "temperature": _number(sample.temperatures[sampled].mean()) if sampled.size else None,
        **_advantages(sample, sampled),
        "pieces": _pieces(sample.tokens, decode),
        "mask": sample.mask.tolist(),
        "logprobs": _rounded(sample.logprobs, 4),
        "versions": sample.versions.tolist(),
    }


def _advantages(sample: Sample, sampled: np.ndarray) -> dict[str, Any]:
    """`advantage`: the mean over sampled tokens. `advantages`: one number where all have it, else one per token."""
    if sample.advantages is None or not sampled.size:
        return {"advantage": None, "advantages": None}
    weights = np.broadcast_to(sample.advantages, len(sample.mask))
    each: Any = _rounded(weights, 6)
    if len({each[i] for i in sampled}) == 1:
        each = each[sampled[0]]
    return {"advantage": _number(weights[sampled].mean()), "advantages": each}


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _rounded(column_T: np.ndarray, digits: int) -> list[float | None]:
    """Short numbers: 0 rather than 0.0 or -0.0, and null for what is none."""
    exact = column_T.astype(np.float64)  # a rounded float32 would show all its digits again
    return [(x or 0) if math.isfinite(x) else None for x in np.round(exact, digits).tolist()]


def _plain_data(data: dict[str, Any]) -> Any:
    """The task's data as JSON can say it; cut where it is long."""
    try:
        text = json.dumps(data, ensure_ascii=False, default=str, allow_nan=False)
        return json.loads(text) if len(text) <= MAX_DATA else f"{text[:MAX_DATA]}… ({len(text)} characters)"
    except Exception as error:  # as in _text: keys that are no text, NaN, a circle
        return f"<not JSON: {error}>"


def _pieces(tokens_T: np.ndarray, decode: Decode) -> list[str]:
    ids = tokens_T.tolist()
    try:
        return token_pieces(ids, decode)
    except Exception:  # as in _text
        return [f"<{token}>" for token in ids]


def _text(tokens_T: np.ndarray, decode: Decode) -> str:
    ids = tokens_T.tolist()
    try:
        return decode(ids)
    except Exception as error:  # a viewer must not end a run, whatever the tokenizer thinks of the ids
        return f"<not decodable ({error}): ids {ids}>"
