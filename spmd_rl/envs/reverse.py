"""Reverse a short word, with a teacher that is mostly wrong: the smallest task that shows RL doing what SFT can't.

The teacher copies the word most of the time and reverses it now and then, so the supervised warm-up leaves a policy
that knows the format and is right only as often as its teacher; the exact reward does the rest. The letters of a
word are all different: no word reads the same backwards, so a policy that only copies scores exactly 0, and a tiny
model always finds the next letter by the last one (with repeated letters some seeds don't learn to copy in time).

Invariants: which words are held out depends on the word alone (not on the seed, the process or Python's hash);
training tasks and held-out tasks share no word; task `index` is the same for the same seed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from spmd_rl.envs.protocol import Policy, Split, Tokenizer, single_turn
from spmd_rl.rollouts.types import Episode, Reward, Task


class Reverse:
    """`<|im_start|>abcd` + newline → `dcba<|im_end|>`; reward 1 for exactly that text before the end token, else 0."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        letters: str = "abcdefgh",
        length: int = 4,
        wrong: float = 0.8,
        heldout: float = 0.1,
        hinted: float = 0.0,
        max_tokens: int = 6,
        start: str = "<|im_start|>",
        end: str = "<|im_end|>",
    ) -> None:
        """`wrong`: share of the teacher's answers that copy; `heldout`: share of all words kept from training;
        `hinted`: share of the teacher's lessons with a hint, so that the policy learns to use one; `max_tokens`: new
        tokens per attempt at most; `end` must be one token: the engine's end of sequence."""
        if not 0 <= wrong <= 1:
            raise ValueError(f"reverse: wrong = {wrong} is a share; it must lie in 0..1")
        if not 2 <= length <= len(set(letters)):
            raise ValueError(f"reverse: length = {length} must lie in 2..{len(set(letters))}, the number of letters")
        end_ids = list(tokenizer.encode(end))
        if len(end_ids) != 1:
            raise ValueError(f"reverse: the tokenizer makes {len(end_ids)} tokens of end = {end!r}; pass one it knows")
        self.tokenizer, self.seed, self.wrong, self.max_tokens = tokenizer, seed, wrong, max_tokens
        self.hinted = hinted
        self.start, self.end, self.end_id = start, end, int(end_ids[0])
        words = ["".join(w) for w in itertools.permutations(sorted(set(letters)), length)]
        self.words: dict[Split, list[str]] = {
            "train": [w for w in words if _fraction(w) >= heldout],
            "heldout": sorted((w for w in words if _fraction(w) < heldout), key=_fraction),
        }

    def task(self, index: int, split: Split) -> Task:
        """Training words come in a new order every time all were seen, held-out words always in the same order."""
        words = self.words[split]
        if not words:
            raise ValueError(
                f"reverse: no {split} words; use more letters, or a share heldout that leaves some on both sides"
            )
        epoch, place = divmod(index, len(words))
        if split == "train":
            place = int(np.random.default_rng([self.seed, epoch]).permutation(len(words))[place])
        return Task(source="reverse", index=index, data={"word": words[place], "split": split})

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]: the start token, the word, a newline."""
        return self._encode(f"{self.start}{task.data['word']}\n")

    def hint(self, task: Task) -> np.ndarray:
        """int32[H]: the prompt with the right answer in a line of its own."""
        word = task.data["word"]
        return self._encode(f"{self.start}{word}\n{word[::-1]}\n")

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """One prompt, one answer."""
        sampling = replace(policy.sampling, max_tokens=min(self.max_tokens, policy.sampling.max_tokens))
        prompt = self.prompt(task)
        generation = await policy.generate(prompt, sampling)
        return single_turn(task, prompt, generation, sampling.temperature, self.reward(task, generation.tokens))

    def reward(self, task: Task, answer: np.ndarray) -> Reward:
        """1 when the text before the end token (int32[n] → text) is the word reversed; 0 also when no end came."""
        ends = np.flatnonzero(answer == self.end_id)
        if len(ends) == 0:
            return Reward(0.0)
        text = self.tokenizer.decode(answer[: ends[0]].tolist())
        return Reward(float(text == task.data["word"][::-1]))

    def teacher(self, task: Task, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(prompt, answer): a copy of the word with probability `wrong`, else the word reversed; right with a hint."""
        word = task.data["word"]
        if self.hinted and rng.random() < self.hinted:
            return self.hint(task), self._encode(word[::-1] + self.end)
        answer = word if rng.random() < self.wrong else word[::-1]
        return self.prompt(task), self._encode(answer + self.end)

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer.encode(text), dtype=np.int32)


def _fraction(word: str) -> float:
    """A number in [0, 1) that depends on the word alone."""
    return int.from_bytes(blake2b(word.encode(), digest_size=6).digest(), "big") / 2**48
