"""Supervised fine-tuning: every rank trains, and makes its own orders from the same data.

    validate → (batch → train → [validate] [save] [export]) × max_steps → export

The loop that carries them out is RL's (`role.py`). Every rank draws and packs the whole batch and keeps its own rows,
so nothing travels but gradients. Rank 0 writes metrics and the picture. It refuses to know about rollouts and engines.
Invariant: the orders from step k on depend on the config and k alone, so a resumed run goes on exactly to the sequence.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from spmd_rl.algorithms.supervised import learned
from spmd_rl.config.tree import Config
from spmd_rl.data.sequences import Sequence, Sequences
from spmd_rl.models.hf_config import read_config, resolve
from spmd_rl.observe.logs import RankOutput
from spmd_rl.observe.metrics import Metrics, truncate_metrics
from spmd_rl.observe.plots import loss_png
from spmd_rl.observe.progress import Progress
from spmd_rl.rollouts.cost import TrainingCost
from spmd_rl.rollouts.packing import Packed, pack
from spmd_rl.rollouts.types import Row
from spmd_rl.trainer.role import TrainerRank, build_learner, silent
from spmd_rl.trainer.stopping import EarlyStop
from spmd_rl.world.checkpoints import CheckpointError, find, read_state
from spmd_rl.world.messages import Event, Export, Order, Restore, Save, Stop, Train, Trained, Validate, Validated
from spmd_rl.world.world import World

AHEAD = 2  # batches that are made while another one trains
# For a resumed run to be the same.
ALL_RANKS_MUST_AGREE = ("model.name", "model.tokenizer", "data", "seq_len", "seed", "trainer.model.dtype")

T = TypeVar("T")


def run(world: World, output: RankOutput | None = None) -> None:
    """Train from the first or the resumed step to the last; `output` is the first rank's."""
    config = replace(world.config, ckpt=replace(world.config.ckpt, resume=world.resume))
    with world.watchdog.stage("open the data", config.deadlines.start_s):
        start = _resumed_step(replace(config, model=world.given.model)) if config.ckpt.resume else 0
        sequences = Sequences(config, load_tokenizer(config))
    index = world.mesh.trainers.index(world.rank)
    store = dist.distributed_c10d._get_default_store()
    stop = EarlyStop(store, world.rank, config.output_dir, world.watchdog.hurry)
    stop.heed_signals()
    dims = world.mesh.dims
    orders = own_orders(config, sequences, start, dims.data_rank(index), dims.data_ranks, stop)
    if index:
        TrainerRank(world, build_learner(world), silent).follow(orders)
        return
    assert output is not None
    out = Path(config.output_dir)
    if config.ckpt.resume:
        truncate_metrics(out, start)
    metrics = Metrics(
        out,
        tensorboard=config.log.tensorboard,
        wandb_project=config.log.wandb_project if config.log.wandb else "",
        config=asdict(config),
        append=bool(config.ckpt.resume),
    )
    progress = Progress(config.log.progress, {"sft": config.max_steps}, output.screen)
    output.show = progress.write
    report = Report(metrics, progress, sequences)
    with metrics, progress:
        TrainerRank(world, build_learner(world), report.tell).follow(orders)
        picture = loss_png(metrics.path, out / "loss.png")
    if stop.stopped_at >= 0:
        print(f"\nstopped after step {stop.stopped_at}; go on with the same command and --ckpt.resume latest")
    else:
        print(farewell(report, out, picture))


def own_orders(
    config: Config,
    sequences: Sequences,
    start: int,
    index: int,
    ranks: int,
    stop: Callable[[int], bool] = lambda step: False,
) -> Iterator[Order]:
    """The orders of data rank `index` of `ranks`, from behind step `start` to the end, or until `stop` says so."""
    data, ckpt, last = config.data, config.ckpt, config.max_steps
    out = Path(config.output_dir).resolve()
    cost = TrainingCost.known(read_config(resolve(config.model.name)))

    def rows_of(batch: list[Sequence]) -> Packed | None:
        return pack(learned(batch), ranks, config.seq_len, cost) if batch else None

    held = rows_of(sequences.validation())
    if start:
        yield Restore(str(find(ckpt.resume, config.output_dir)))
    elif held:
        yield Validate(0, _columns(held.rows[index]))
    batches = ahead(lambda step: rows_of(sequences.batch(step)), range(start + 1, last + 1))
    for step, packed in batches:
        yield Train(step, "sft", [_columns(packed.rows[index])])
        if held and (step == last or (data.eval_interval and step % data.eval_interval == 0)):
            yield Validate(step, _columns(held.rows[index]))
        stops = step < last and stop(step)
        if stops or (ckpt.interval and (step % ckpt.interval == 0 or step == last)):
            yield Save(str(out / f"checkpoints/step_{step:06d}"), checkpoint_state(config, step))
        if ckpt.export_interval and step % ckpt.export_interval == 0 and step < last:
            yield Export(str(out / f"hf_step_{step:06d}"))
        if stops:
            yield Stop()
            return
    yield Export(str(out / "hf"))
    yield Stop()


def ahead(make: Callable[[int], T], steps: range, depth: int = AHEAD) -> Iterator[tuple[int, T]]:
    """(step, make(step)) in order, made on a thread up to `depth` steps early; what `make` raises is raised here."""
    made: queue.Queue[tuple[int, T | BaseException]] = queue.Queue(depth)

    def produce() -> None:
        for step in steps:
            try:
                made.put((step, make(step)))
            except BaseException as error:
                made.put((step, error))
                return

    threading.Thread(target=produce, name="sequences", daemon=True).start()
    for _ in steps:
        step, result = made.get()
        if isinstance(result, BaseException):
            raise result
        yield step, result


def checkpoint_state(config: Config, step: int) -> dict[str, Any]:
    """What goes with a checkpoint: where it stands, and what a run must have in common with it to go on."""
    table = asdict(config)
    common: dict[str, Any] = {}
    for path in ALL_RANKS_MUST_AGREE:
        value: Any = table
        for key in path.split("."):
            value = value[key]
        common[path] = value
    return {"command": "sft", "step": step, "config": common}


def load_tokenizer(config: Config) -> Any:
    """The model's tokenizer. ValueError when it does not load."""
    from transformers import AutoTokenizer

    name = config.model.tokenizer or config.model.name
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises a dozen kinds for a damaged or missing tokenizer
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"no tokenizer in {name!r} ({reason}): set model.tokenizer to a folder or Hub id that holds one"
        ) from error


class Report:
    """What the first rank writes and shows."""

    def __init__(self, metrics: Metrics, progress: Progress, sequences: Sequences) -> None:
        self._metrics, self._progress, self._sequences = metrics, progress, sequences
        self._at = time.monotonic()
        self.losses: list[float] = []
        self.validations: list[float] = []

    def tell(self, event: Event) -> None:
        """An event of the training loop."""
        match event:
            case Trained():
                self._trained(event)
            case Validated():
                self.validations.append(event.metrics["loss"])
                values = {f"eval/{name}": value for name, value in event.metrics.items()}
                self._log({"phase": "eval", "step": event.step, **values})

    def _trained(self, event: Trained) -> None:
        now = time.monotonic()
        step_s, self._at = now - self._at, now
        self.losses.append(event.metrics["loss"])
        tokens = event.metrics["tokens/packed"]
        lengths = {"data/dropped": self._sequences.dropped, "data/truncated": self._sequences.truncated}
        times = {"time/step_s": step_s, "perf/trainer_tokens_per_s": tokens / event.metrics["time/train_s"]}
        self._log({"phase": "sft", "step": event.step, **event.metrics, **lengths, **times})

    def _log(self, record: dict[str, Any]) -> None:
        self._metrics.log(record)
        self._progress.update(record)


def farewell(report: Report, out: Path, picture: Path) -> str:
    """What came out, and where it lies."""
    lines = [""]
    if report.losses:
        lines.append(f"training loss    {report.losses[0]:.4f} -> {report.losses[-1]:.4f}")
    if report.validations:
        lines.append(f"validation loss  {report.validations[0]:.4f} -> {report.validations[-1]:.4f}")
    lines += [
        f"model            {out / 'hf'}",
        f"picture          {picture}",
        f"metrics          {out / 'metrics.jsonl'}",
    ]
    return "\n".join([*lines, "", f"next: reinforcement learning from here, with --model.name {out / 'hf'}"])


def _resumed_step(config: Config) -> int:
    """The step that `ckpt.resume` names. CheckpointError when this run can't go on from there."""
    folder = find(config.ckpt.resume, config.output_dir)
    state, now = read_state(folder), checkpoint_state(config, 0)
    if state["command"] != "sft":
        raise CheckpointError(f"{folder} was written by main.py {state['command']}, and this is sft")
    changed = [
        f"{k} = {v!r}, was {state['config'].get(k)!r}" for k, v in now["config"].items() if v != state["config"].get(k)
    ]
    if changed:
        raise CheckpointError(
            f"{folder} belongs to another run: {'; '.join(changed)}. Set these back, or start afresh from its weights "
            "(model.name = an export) without ckpt.resume"
        )
    if state["step"] >= config.max_steps:
        raise CheckpointError(f"{folder} stands at step {state['step']}, and max_steps = {config.max_steps}: raise it")
    return int(state["step"])


def _columns(rows: list[Row]) -> list[dict[str, np.ndarray]]:
    return [{f.name: v for f in fields(Row) if (v := getattr(row, f.name)) is not None} for row in rows]
