"""Small engines and the trainer's view of the same weights, shared by the tests of this folder.

An engine is vLLM's own, on the CPU, in this process, over a group of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.config.tree import Config, InferenceConfig, ModelConfig, OptimConfig, TrainerConfig, TrainerModelConfig
from spmd_rl.inference.build import build_engine
from spmd_rl.inference.engine import Engine
from spmd_rl.models.packed import Documents
from spmd_rl.rollouts.packing import pack
from spmd_rl.rollouts.types import TrainSample
from spmd_rl.trainer.learner import Learner
from spmd_rl.world.messages import Generate, Generated, Probed, Refused

SEQ_LEN, VOCAB, LEARNING_RATE = 256, 265, 3e-4
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def make_config(folder: str, **vllm) -> Config:
    settings = {"max_num_seqs": 64, "num_gpu_blocks_override": 256} | vllm  # 256 blocks of 32: a small KV cache
    return Config(
        model=ModelConfig(name=folder),
        seq_len=SEQ_LEN,
        trainer=TrainerConfig(model=TrainerModelConfig(impl="auto"), optim=OptimConfig(lr=LEARNING_RATE)),
        inference=InferenceConfig(vllm=settings),
    )


def make_engine(folder: str, group: dist.ProcessGroup, **vllm) -> Engine:
    return Engine(build_engine(make_config(folder, **vllm), folder, group, 0, 0, CPU), rank=0, version=0)


def make_learner(folder: str) -> Learner:
    return Learner(make_config(folder), None, CPU, None)


def prompts(count: int, length: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, VOCAB, (count, length)).astype(np.int32))


def request(id: int, tokens: np.ndarray, max_tokens: int = 12, temperature: float = 1.0, **fields) -> Generate:
    """A request whose seed follows from its id, without stop tokens unless given."""
    defaults = {"seed": 1000 + id, "stop_token_ids": []}
    return Generate(id, tokens, max_tokens, temperature, **(defaults | fields))


def add(engine: Engine, requests: Iterable[Generate]) -> None:
    for item in requests:
        refused = engine.add(item)
        assert refused is None, refused


def drain(engine: Engine) -> dict[int, Generated]:
    """Step until nothing is left; the generations by id."""
    done: dict[int, Generated] = {}
    while engine.busy:
        done |= {event.id: event for event in engine.step() if isinstance(event, Generated)}
    return done


def serve(engine: Engine, requests: Iterable[Generate]) -> dict[int, Generated]:
    add(engine, requests)
    return drain(engine)


def refusal(engine: Engine, item: Generate) -> Refused:
    answer = engine.add(item)
    assert isinstance(answer, Refused), answer
    return answer


def probe(engine: Engine, sequences: list[np.ndarray]) -> Probed:
    """Score sequences; other requests in flight go on meanwhile."""
    engine.probe(sequences)
    while True:
        for event in engine.step():
            if isinstance(event, Probed):
                assert not engine.probing
                return event


def weights_of(learner: Learner) -> Tensors:
    return {name: tensor.clone() for name, tensor in learner.full_tensors()}


def load(engine: Engine, version: int, learner: Learner) -> None:
    """Swap the learner's weights in."""
    tensors = weights_of(learner)
    engine.swap(version, tensors.items(), list(tensors))


def take_step(learner: Learner, lr: float) -> None:
    """One optimizer step on random sequences."""
    ones = np.ones(30, dtype=np.float32)
    weight = np.append(0, ones[1:] / 116).astype(np.float32)  # nothing predicts a first token
    mask = (weight > 0).astype(np.uint8)
    samples = [TrainSample(tokens, mask, 0 * ones, ones, 0 * ones, weight) for tokens in prompts(4, 30, seed=9)]
    learner.step([pack(samples, 1, SEQ_LEN).rows[0]], lr)


@torch.no_grad()
def trainer_logprobs(learner: Learner, sequence: np.ndarray, prompt: int, temperature: float = 1.0) -> np.ndarray:
    """What the trainer thinks of everything after the first `prompt` tokens."""
    tokens_T = torch.tensor(sequence[:-1]).long()
    documents = Documents.build(np.array([0, len(tokens_T)]), CPU)
    targets_T, temperatures_T = torch.tensor(sequence[1:]).long(), torch.full((len(tokens_T),), temperature)
    return learner.model(tokens_T, documents, targets_T, temperatures_T)[0][prompt - 1 :].numpy()
