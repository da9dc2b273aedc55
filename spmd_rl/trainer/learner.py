"""The model, its optimizer and what can be done with them: take steps, score sequences, hand out the weights.

What it refuses to know: where rows come from, where weights go, what step or policy version this is. Methods marked
"collective" are called by all trainer ranks in the same order; none of them talks to anybody else.

Invariants: ranks hold equal parts of the work in number of rows, not in tokens; gradients and metrics are sums over all
ranks and rows; the weights change only in `step`, and never by a non-finite number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spmd_rl.algorithms import resolve
from spmd_rl.config.tree import Config, OptimConfig
from spmd_rl.models import build as models
from spmd_rl.models.context import ContextParallel, context_problem
from spmd_rl.models.hf_config import read_config
from spmd_rl.models.moe import Routing
from spmd_rl.models.packed import Documents
from spmd_rl.rollouts.types import Row
from spmd_rl.trainer.checkpoint import Parts
from spmd_rl.trainer.critic import Critic
from spmd_rl.trainer.gather import Gather, everywhere, on_the_first
from spmd_rl.trainer.inputs import LossInputs
from spmd_rl.trainer.loss import Loss
from spmd_rl.trainer.optim import clip_gradients, gradient_norm, make_optimizer
from spmd_rl.trainer.parallel import TrainerMeshes, last_backward, parallelize, reshard
from spmd_rl.trainer.references import frozen_logprobs, hinted_logprobs
from spmd_rl.trainer.routing import ExpertLoad
from spmd_rl.trainer.row_stats import Stats
from spmd_rl.trainer.row_tensors import RowTensors, check_row, tensor
from spmd_rl.trainer.shards import Shards

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class _Work:
    """One row on this rank, and what was computed about it before the weights changed."""

    row: Row
    tensors: RowTensors
    routing: Routing | None = None
    reference_T: Tensor | None = None
    proximal_T: Tensor | None = None
    pg_weight_T: Tensor | None = None
    shares_T: Tensor | None = None  # of a critic's loss
    returns_T: Tensor | None = None


class Learner:
    """One trainer rank's share of the model."""

    def __init__(
        self,
        config: Config,
        meshes: TrainerMeshes | None,
        device: torch.device,
        group: dist.ProcessGroup | None,
        beat: Callable[[str], None] = lambda stage: None,
        span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        """Builds, shards and loads the model; of our own ones every rank reads just its part. Collective.

        meshes: over the trainer ranks; None for one rank in float32. group: the same ranks, on a back end that fits
        `device`; None for one rank. beat is called with the name of each phase that begins, span makes its context.
        """
        settings = config.trainer.model
        self.device, self.group, self.beat, self._span = device, group, beat, span
        self.dtype_name, self.dtype = settings.dtype, DTYPES[settings.dtype]
        self._config, self._meshes, self._keep = config, meshes, not config.trainer.parallel.reshard_after_forward
        style = config.trainer.parallel.cp_style
        self._context = ContextParallel(meshes.cp.get_group(), style) if meshes and meshes.cp else None
        self._algorithm = resolve(config.orchestrator.algorithm)
        self._loss = Loss.build(config.orchestrator.algorithm, self._algorithm)
        self._seconds: dict[str, float] = {}
        beat("load model")
        self.folder = models.resolve(config.model.name)
        self.model = self._load(self.folder)
        wires = models.wires(self.model)
        self._named = [(wire.name, wire.parameter) for wire in wires if wire.trained]
        self.shards = Shards(wires, self.dtype, group, meshes.copies if meshes else 1)
        self._experts = ExpertLoad(self.model, config.trainer.moe, group, self._context.size if self._context else 1)
        self._experts.reset(device)
        self._reference = self._build_reference()
        self._critic = self._build_critic() if self._algorithm.critic else None
        self.reset_optimizer(config.warmup.optim if config.warmup.steps else config.trainer.optim)

    def reset_optimizer(self, optim: OptimConfig) -> None:
        """A fresh AdamW with these settings: no moments, no step count."""
        self._max_norm = optim.max_norm
        self._optimizer = make_optimizer((parameter for _, parameter in self._named), optim)

    @torch.no_grad()
    def start_rl(self) -> None:
        """The weights as they are now are version 0: a fresh optimizer, and the reference where no folder is named."""
        self.reset_optimizer(self._config.trainer.optim)
        if self._reference is not None and not self._config.orchestrator.algorithm.reference:
            for frozen, parameter in zip(self._reference.parameters(), self.model.parameters(), strict=True):
                frozen.copy_(parameter)

    def free_gradients(self) -> None:
        """The memory of the last step's gradients, which the next one would reuse."""
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, minibatches: Sequence[Sequence[Row]], lr: float, train_policy: bool = True) -> dict[str, float]:
        """One optimizer step per minibatch, over this rank's rows; collective, equally many rows on every rank.

        A rank without work passes rows whose weights are all zero. Returns the metrics of all ranks together, summed
        or averaged over minibatches, and this rank's seconds per phase. Without `train_policy` only a critic learns.
        Raises ValueError for rows that do not fit together, FloatingPointError on all ranks alike when the loss or
        the gradient norm is not finite; the weights are untouched then.
        """
        if not minibatches or not all(minibatches):
            raise ValueError("a step needs at least one row per rank; a rank without work gets a row of zero weights")
        for row in (row for rows in minibatches for row in rows):
            check_row(row)
        self._seconds, sent = {}, self._context.sent_bytes if self._context else 0
        prepared = [[_Work(row, RowTensors.build(row, self.device)) for row in rows] for rows in minibatches]
        for works in prepared:
            routings = self._experts.routings([w.row for w in works], [w.tensors for w in works])
            for work, routing in zip(works, routings, strict=True):
                work.routing = routing
        self._prepare([work for works in prepared for work in works])
        results = [self._update(works, lr, train_policy) for works in prepared]
        common = [name for name in results[0] if all(name in result for result in results)]
        metrics = {name: sum(r[name] for r in results) / len(results) for name in common}
        metrics |= {name: value * len(results) for name, value in metrics.items() if name.startswith("tokens/")}
        if self._context:
            metrics["perf/cp_bytes"] = float(self._context.sent_bytes - sent)
        return metrics | {"lr": lr} | {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}

    @torch.no_grad()
    def validate(self, rows: Sequence[Row]) -> dict[str, float]:
        """The loss on this rank's rows, over all ranks; nothing is learned. Collective, as `step`."""
        for row in rows:
            check_row(row)
        with self._phase("validate"):
            stats = reduce(add, [self._evaluate(_Work(row, RowTensors.build(row, self.device)))[1] for row in rows])
            reshard(self.model)
            metrics = self._all_reduce(stats).metrics()
        return {name: metrics[name] for name in ("loss", "entropy", "tokens/ce")}

    def checkpoint_parts(self) -> Parts:
        """What a checkpoint holds: the policy, a critic where there is one, and a reference that no folder holds."""
        parts: Parts = {"policy": (self._named, self._optimizer), "routers": (self._experts.state(), None)}
        if self._critic is not None:
            parts["critic"] = (list(self._critic.model.named_parameters()), self._critic.optimizer)
        if self._reference is not None and not self._config.orchestrator.algorithm.reference:
            parts["reference"] = (list(self._reference.named_parameters()), None)
        return parts

    def _prepare(self, works: Sequence[_Work]) -> None:
        """What the losses compare with, from the weights as the batch begins."""
        if self._algorithm.policy.proximal:
            with self._phase("proximal"):
                for work in works:
                    work.proximal_T = frozen_logprobs(self.model, work.tensors, work.routing)
        if self._reference is not None:
            with self._phase("reference"):
                for work in works:
                    work.reference_T = frozen_logprobs(self._reference, work.tensors)
        if self._critic is not None:
            with self._phase("critic"):
                normalise = self._algorithm.std == "batch"
                pairs = self._critic.advantages([w.row for w in works], [w.tensors for w in works], normalise)
            for work, (advantages_T, returns_T) in zip(works, pairs, strict=True):
                work.shares_T = self._column(work, "pg_weight")
                work.pg_weight_T, work.returns_T = work.shares_T * advantages_T, returns_T

    def _update(self, works: Sequence[_Work], lr: float, train_policy: bool) -> dict[str, float]:
        """One optimizer step of the policy, and one of the critic."""
        self._optimizer.zero_grad(set_to_none=True)
        stats = reduce(add, [self._forward_backward(work, last=work is works[-1]) for work in works])
        with self._phase("reduce"):
            metrics = self._all_reduce(stats).metrics()
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the loss is {metrics['loss']}; the weights were not changed")
        with self._phase("optim"):
            metrics["grad_norm"] = self._apply_gradients(lr if train_policy or self._critic is None else 0.0)
            metrics |= self._experts.finish_step()
        if self._critic is not None:
            with self._phase("critic"):
                rows, columns = [w.tensors for w in works], [(w.returns_T, w.shares_T) for w in works]
                metrics |= self._critic.step(rows, [c[0] for c in columns], [c[1] for c in columns])
        return metrics

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
        tokens_T = tensor(np.concatenate(sequences), torch.int64, self.device)
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

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor in wire dtype) on every rank, in the order of `shards.table`. Collective."""
        for name, whole in everywhere(self._to_all):
            self.beat(f"gather {name}")
            yield name, whole

    @cached_property
    def _to_all(self) -> Gather:
        """Worked out once: ranks that infer too hand out every version this way."""
        return Gather.to(self.shards, self.shards.ranks)

    def export(self, folder: str | Path) -> None:
        """Writes the weights as a Hugging Face folder, in wire dtype. Collective; only trainer rank 0 writes.

        The other ranks may return before the folder is complete. Memory on rank 0 is what `models.export` buffers.
        """
        tensors = on_the_first(self.shards)
        kept = [piece.name for wire in self.shards.wires if not wire.trained for piece in wire.pieces]
        try:
            if self.group is None or dist.get_rank(self.group) == 0:
                models.export(tensors, self.folder, str(folder), self.dtype, kept=kept)
        finally:
            for _ in tensors:  # the ranks that only help to gather; and after a failed write, so that nobody hangs
                pass

    def _forward_backward(self, work: _Work, last: bool) -> Stats:
        """Adds one row's gradient; returns its sums."""
        last_backward(self.model, last)
        loss, stats = self._evaluate(work)
        with self._phase("backward"):
            loss.backward()
        return stats

    def _evaluate(self, work: _Work) -> tuple[Tensor, Stats]:
        """The loss of one row, and its sums."""
        reference_T = work.reference_T
        if self._algorithm.teacher == "hint":  # of the weights as they are now, not as the batch began
            with self._phase("reference"):
                reference_T = hinted_logprobs(self.model, work.row, self.device)
        with self._phase("forward"):
            logprobs_T, entropies_T = work.tensors.logprobs(self.model, work.routing)
            return self._loss(
                LossInputs(
                    logprobs_T=logprobs_T,
                    entropies_T=entropies_T,
                    behaviour_T=self._column(work, "logprobs"),
                    mask_T=tensor(work.row.mask, torch.bool, self.device),
                    document_T=work.tensors.document_T,
                    documents=len(work.row.cu_seqlens) - 1,
                    pg_weight_T=self._column(work, "pg_weight") if work.pg_weight_T is None else work.pg_weight_T,
                    ce_weight_T=self._column(work, "ce_weight"),
                    kl_weight_T=self._column(work, "kl_weight"),
                    entropy_weight_T=self._column(work, "entropy_weight"),
                    reference_T=reference_T,
                    proximal_T=work.proximal_T,
                )
            )

    def _column(self, work: _Work, name: str) -> Tensor:
        """A float32 column on the device; zeros where the row has none."""
        column = getattr(work.row, name)
        if column is None:
            return torch.zeros(len(work.row.tokens), device=self.device)
        return tensor(column, torch.float32, self.device)

    def _build(self, folder: str) -> nn.Module:
        """A model to shard and `finish`. Master weights are float32; compute and wire have the config's dtype."""
        settings = self._config.trainer.model
        if self._context is not None:
            about, ours = read_config(folder), models.is_ours(folder, settings.impl)
            if problem := context_problem(self._context.size, self._context.style, about, ours):
                raise ValueError(f"model folder {folder!r}: {problem}")
        model = models.begin(
            folder, models.ModelOptions(settings.impl, settings.attn, settings.lm_head_chunk, self.device)
        )
        if self._context is not None:
            model.context = self._context
        return model

    def _load(self, folder: str, frozen: bool = False) -> nn.Module:
        """This rank's part of a model."""
        model = self._build(folder).requires_grad_(not frozen)
        parallelize(model, self._meshes, self.dtype_name, self._keep)
        models.finish(model, folder, self.device)
        return model

    def _build_reference(self) -> nn.Module | None:
        """The frozen model, where the algorithm compares with one."""
        algorithm = self._config.orchestrator.algorithm
        if algorithm.kl.coef == 0 and self._algorithm.teacher != "reference":
            return None
        self.beat("load reference model")
        return self._load(models.resolve(algorithm.reference) if algorithm.reference else self.folder, frozen=True)

    def _build_critic(self) -> Critic:
        self.beat("load critic")
        config = self._config.orchestrator.algorithm.critic
        return Critic(
            self._build(self.folder),
            models.hidden_size(self.folder),
            config,
            replace(self._config.trainer.optim, lr=config.lr),
            self._meshes,
            self.device,
            self.dtype_name,
            self.group,
            self._keep,
            self._counts,
            lambda decoder: models.finish(decoder, self.folder, self.device),
        )

    @property
    def _counts(self) -> bool:
        """This rank counts its rows in sums over ranks: the first one of those that share them."""
        return self._context is None or self._context.rank == 0

    def _all_reduce(self, stats: Stats) -> Stats:
        if self.group is not None:
            if not self._counts:
                stats.sums_S.zero_()
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
        with self._span(name):
            yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started


def _finite(gradient: Tensor | None) -> bool:
    if gradient is None:
        return True
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(local.isfinite().all())
