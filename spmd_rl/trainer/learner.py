"""The model, its optimizer and what can be done with them: take a step, score sequences, hand out the weights.

What it refuses to know: where rows come from, where weights go, what step or policy version this is. Methods marked
"collective" are called by all trainer ranks in the same order; none of them talks to anybody else.

Invariants: ranks hold equal parts of the work in number of rows, not in tokens; gradients and metrics are sums over all
ranks and rows; the weights change only in `step`, and never by a non-finite number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spmd_rl.config.tree import Config, OptimConfig
from spmd_rl.models import build as models
from spmd_rl.models.packed import Documents
from spmd_rl.rollouts.types import Row
from spmd_rl.trainer.loss import Stats, row_loss
from spmd_rl.trainer.optim import clip_gradients, gradient_norm, make_optimizer
from spmd_rl.trainer.parallel import parallelize, reshard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Learner:
    """One trainer rank's share of the model."""

    def __init__(
        self,
        config: Config,
        mesh: DeviceMesh | None,
        device: torch.device,
        group: dist.ProcessGroup | None,
        beat: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """Builds, loads and shards the model; every rank reads the whole folder. Collective.

        mesh: over the trainer ranks; None for one rank in float32. group: the same ranks, on a back end that fits
        `device`; None for one rank. beat is called with the name of each phase that begins.
        """
        settings = config.trainer.model
        self.device, self.group, self.beat = device, group, beat
        self.dtype_name, self.dtype = settings.dtype, DTYPES[settings.dtype]
        self._bounds = config.orchestrator.algorithm
        self._seconds: dict[str, float] = {}
        beat("load model")
        self.folder = models.resolve(config.model.name)
        # Master weights are float32; settings.dtype is the dtype of compute and wire.
        self.model = models.build_and_load(
            self.folder, settings.impl, settings.attn, settings.lm_head_chunk, device, torch.float32
        )
        parallelize(self.model, mesh, settings.dtype)
        self._named = list(models.hf_named_parameters(self.model))
        self.reset_optimizer(config.warmup.optim if config.warmup.steps else config.trainer.optim)

    def reset_optimizer(self, optim: OptimConfig) -> None:
        """A fresh AdamW with these settings: no moments, no step count."""
        self._max_norm = optim.max_norm
        self._optimizer = make_optimizer((parameter for _, parameter in self._named), optim)

    def step(self, rows: Sequence[Row], lr: float) -> dict[str, float]:
        """One optimizer step over this rank's rows; collective, with equally many rows on every rank.

        A rank without work passes rows whose weights are all zero. Returns the metrics of all ranks together, and
        this rank's seconds per phase. Raises ValueError for rows that do not fit together, FloatingPointError on all
        ranks alike when the loss or the gradient norm is not finite; the weights are untouched then.
        """
        if not rows:
            raise ValueError("a step needs at least one row per rank; a rank without work gets a row of zero weights")
        for row in rows:
            check_row(row)
        self._seconds = {}
        self._optimizer.zero_grad(set_to_none=True)
        stats = reduce(add, [self._forward_backward(row) for row in rows])
        with self._phase("reduce"):
            metrics = self._all_reduce(stats).metrics()
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the loss is {metrics['loss']}; the weights were not changed")
        with self._phase("optim"):
            metrics["grad_norm"] = self._apply_gradients(lr)
        return metrics | {"lr": lr} | {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}

    @torch.no_grad()
    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probabilities of tokens 1 .. T-1 of each sequence, float32[T-1], at temperature 1.

        Collective: all ranks pass the same sequences, int[T] each, T >= 1, and get the same answer. They are packed
        into one row, so their total length is bounded by memory.
        """
        lengths = [len(sequence) for sequence in sequences]
        if not lengths or min(lengths) < 1:
            raise ValueError(f"score needs sequences of at least one token, got lengths {lengths}")
        cu_seqlens = np.cumsum([0, *lengths])
        tokens_T = self._tensor(np.concatenate(sequences), torch.int64)
        documents = Documents.build(cu_seqlens, self.device)
        with self._phase("score"):
            # The last token of a sequence is "followed" by the first of the next one; that column is cut off below.
            logprobs_T, _ = self.model(
                tokens_T, documents, tokens_T.roll(-1), torch.ones(len(tokens_T), device=self.device)
            )
            # Without a backward nothing else gives back what the forward gathered.
            reshard(self.model)
            columns = np.split(logprobs_T.float().cpu().numpy(), cu_seqlens[1:-1])
        return [column[:-1].copy() for column in columns]

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor in wire dtype), one at a time, in the order of `parameter_table`.

        Collective: every rank walks through all of them. On one rank in float32 a tensor is the parameter itself,
        so copy what must outlive the next `step`, and never write to it.
        """
        for name, parameter in self._named:
            self.beat(f"gather {name}")
            shard = parameter.detach().to(self.dtype)  # cast before gathering: half the bytes
            yield name, shard.full_tensor() if isinstance(shard, DTensor) else shard

    def parameter_table(self) -> list[tuple[str, tuple[int, ...], str]]:
        """(Hugging Face name, whole shape, wire dtype such as "bfloat16") per parameter. No communication."""
        return [(name, tuple(parameter.shape), self.dtype_name) for name, parameter in self._named]

    def export(self, folder: str | Path) -> None:
        """Writes the weights as a Hugging Face folder, in wire dtype. Collective; only trainer rank 0 writes.

        The other ranks may return before the folder is complete. Memory on rank 0 is what `models.export` buffers.
        """
        tensors = self.full_tensors()
        try:
            if self.group is None or dist.get_rank(self.group) == 0:
                models.export(tensors, self.folder, str(folder), self.dtype)
        finally:
            for _ in tensors:  # the ranks that only help to gather; and after a failed write, so that nobody hangs
                pass

    def _forward_backward(self, row: Row) -> Stats:
        """Adds one row's gradient; returns its sums."""
        with self._phase("forward"):
            logprobs_T, entropies_T = self.model(
                self._tensor(row.tokens, torch.int64),
                Documents.build(row.cu_seqlens, self.device),
                self._tensor(row.targets, torch.int64),
                self._tensor(row.temperatures, torch.float32),
            )
            loss, stats = row_loss(
                logprobs_T,
                entropies_T,
                self._tensor(row.logprobs, torch.float32),
                self._tensor(row.mask, torch.uint8),
                self._tensor(row.pg_weight, torch.float32),
                self._tensor(row.ce_weight, torch.float32),
                ipo_threshold=self._bounds.ipo_threshold,
                ratio_cap=self._bounds.ratio_cap,
            )
        with self._phase("backward"):
            loss.backward()
        return stats

    def _all_reduce(self, stats: Stats) -> Stats:
        if self.group is not None:
            dist.all_reduce(stats.sums_S, group=self.group)
            dist.all_reduce(stats.maxima_M, op=dist.ReduceOp.MAX, group=self.group)
        return stats

    def _apply_gradients(self, lr: float) -> float:
        """Clips, steps and returns the global gradient norm before clipping."""
        parameters = [parameter for _, parameter in self._named]
        norm = gradient_norm(parameters)
        if not torch.isfinite(norm):
            names = [name for name, parameter in self._named if not _finite(parameter.grad)]
            raise FloatingPointError(
                f"the gradient norm is {norm.item()}, first bad gradients on this rank: {names[:3]}; "
                "the weights were not changed"
            )
        clip_gradients(parameters, norm, self._max_norm)
        for parameter_group in self._optimizer.param_groups:
            parameter_group["lr"] = lr
        self._optimizer.step()
        return norm.item()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Announces a phase and adds up its seconds."""
        self.beat(name)
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def _tensor(self, column: np.ndarray, dtype: torch.dtype) -> Tensor:
        """A copy on the device: columns off the wire are read-only."""
        return torch.tensor(column, dtype=dtype, device=self.device)


def check_row(row: Row) -> None:
    """Raises ValueError, naming the column, unless all columns of a row have one length that cu_seqlens ends with."""
    length = len(row.tokens)
    columns = ("targets", "mask", "logprobs", "temperatures", "pg_weight", "ce_weight")
    wrong = {name: len(getattr(row, name)) for name in columns if len(getattr(row, name)) != length}
    if wrong:
        raise ValueError(f"a row of {length} tokens has columns of other lengths: {wrong}")
    if not len(row.cu_seqlens) or row.cu_seqlens[-1] != length:
        raise ValueError(f"a row of {length} tokens has cu_seqlens {row.cu_seqlens}; they must end with {length}")


def _finite(gradient: Tensor | None) -> bool:
    if gradient is None:
        return True
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(local.isfinite().all())
