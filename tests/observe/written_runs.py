"""Runs' folders with readable rollouts, made of plain words: a token is what the caller says it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.observe.samples import write_samples
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Sample, Status, Task

Part = tuple[int, list[str]]  # (1 = sampled by the policy, its tokens)


class Words:
    """Tokens of a run: every text that it is handed is one token."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def ids(self, texts: list[str]) -> list[int]:
        self._texts += [text for text in dict.fromkeys(texts) if text not in self._texts]
        return [self._texts.index(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return "".join(self._texts[i] for i in ids)


class WrittenRun:
    """Writes episodes as a run does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.words = folder, Words()
        folder.mkdir(parents=True, exist_ok=True)

    def sample(
        self,
        parts: list[Part],
        *,
        logprobs: list[float] | None = None,
        versions: list[int] | None = None,
        advantages: Any = None,
        **more: Any,
    ) -> Sample:
        """`logprobs` and `versions` by sampled token; by default -0.5 and 0."""
        texts = [text for _, tokens in parts for text in tokens]
        mask = np.array([said for said, tokens in parts for _ in tokens], np.uint8)
        columns = np.zeros(len(mask), np.float32), np.full(len(mask), -1, np.int32)
        count = int(mask.sum())
        columns[0][mask == 1] = logprobs if logprobs is not None else [-0.5] * count
        columns[1][mask == 1] = versions if versions is not None else [0] * count
        return Sample(
            tokens=np.array(self.words.ids(texts), np.int32),
            mask=mask,
            logprobs=columns[0],
            versions=columns[1],
            temperatures=np.ones(len(mask), np.float32),
            advantages=advantages,
            **more,
        )

    def episode(
        self,
        *samples: Sample,
        reward: float | str = 1.0,
        source: str = "shop",
        task: int = 0,
        status: Status = "ok",
        data: Any = None,
    ) -> Episode:
        """A reward that is a text is why there is none."""
        outcome = RewardError(reward) if isinstance(reward, str) else Reward(reward, {"exact": reward})
        return Episode(Task(source, task, data or {}), samples, outcome, status, seconds=1.5)

    def one(self, text: str = "yes", prompt: str = "?", advantages: Any = None, **more: Any) -> Episode:
        """The shortest episode."""
        return self.episode(self.sample([(0, [prompt]), (1, [text])], advantages=advantages), **more)

    def write(self, step: int, *episodes: Episode, kind: str = "train") -> Path:
        """One file of a step."""
        folder = self.folder if kind == "train" else self.folder / "eval"
        return write_samples(folder, step, episodes, self.words.decode, limit=len(episodes))

    def metrics(self, *records: dict[str, Any]) -> None:
        """metrics.jsonl"""
        lines = [json.dumps(record) + "\n" for record in records]
        (self.folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
