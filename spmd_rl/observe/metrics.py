"""Metrics of a run: one JSON object per line in metrics.jsonl, and the same scalars for TensorBoard and W&B.

The file is the truth, the others are views of it. This module refuses to know what the metrics mean; it only asks
for `phase` and `step` (see names.py).

Invariants: every line is standard JSON (no NaN, no Infinity); a record that `log` returned from is in the file, also
when the process is killed the next moment.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from spmd_rl.observe.disk import explain_full_disk

FILE_NAME = "metrics.jsonl"


class _View(Protocol):
    """Another place where the scalars of a record go."""

    def log(self, phase: str, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Writes the records of one run into `folder`."""

    def __init__(
        self,
        folder: str | Path,
        *,
        tensorboard: bool = True,
        wandb_project: str = "",
        config: Mapping[str, Any] | None = None,
        append: bool = False,
    ) -> None:
        """Open the files, making `folder` if absent.

        wandb_project: empty = no W&B; config: what W&B shows as the run's configuration. append: go on with the file
        of an earlier start; otherwise that file is kept beside the new one as metrics.old.jsonl.
        Raises ModuleNotFoundError when W&B is asked for and not installed, OSError when the disk is full.
        """
        self.folder = Path(folder)
        self.path = self.folder / FILE_NAME
        with explain_full_disk(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not append and self.path.exists():
                self.path.replace(self.path.with_suffix(".old.jsonl"))
            # Unbuffered: a line reaches the kernel in `log`, and a full disk is noticed there and not at exit.
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            self._views: list[_View] = []
            if tensorboard:
                self._views.append(_TensorBoard(self.folder))
            if wandb_project:
                self._views.append(_WandB(self.folder, wandb_project, config or {}))

    def log(self, record: Mapping[str, Any]) -> None:
        """Write one record. It must hold `phase` and `step`; values are numbers, strings, or lists and dicts of them.

        NaN and infinities become null; their keys are listed under "nonfinite". Raises KeyError when `phase` or
        `step` is missing, OSError when the disk is full.
        """
        missing = [key for key in ("phase", "step") if key not in record]
        if missing:
            raise KeyError(f"a metrics record needs 'phase' and 'step'; {missing} missing among {sorted(record)}")
        clean = {key: _plain(value) for key, value in record.items()}
        nonfinite = sorted(key for key, value in clean.items() if not _is_finite(value))
        if nonfinite:
            clean = {key: _null_nonfinite(value) for key, value in clean.items()} | {"nonfinite": nonfinite}
        line = (json.dumps(clean, allow_nan=False) + "\n").encode()
        scalars = {
            key: float(value)
            for key, value in clean.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and key not in ("phase", "step")
        }
        with explain_full_disk(self.folder):
            while line:  # a nearly full disk may take a part
                line = line[self._file.write(line) :]
            for view in self._views:
                view.log(str(clean["phase"]), int(clean["step"]), scalars)

    def close(self) -> None:
        """Close the files; `log` may not be called afterwards."""
        with explain_full_disk(self.folder):
            for view in self._views:
                view.close()
            self._file.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def truncate_metrics(folder: str | Path, step: int, phases: Collection[str] = ()) -> None:
    """Take out what was logged after `step` (in these phases; empty = all), for a run that goes on from there.

    No file is fine.
    """

    def stays(record: dict[str, Any]) -> bool:
        return record["step"] <= step or bool(phases and record["phase"] not in phases)

    path = Path(folder) / FILE_NAME
    if not path.exists():
        return
    kept = [json.dumps(record) + "\n" for record in read_metrics(path) if stays(record)]
    writing = path.with_suffix(".tmp")
    writing.write_text("".join(kept), encoding="utf-8")
    writing.replace(path)


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, also of a run that is still writing: a last line without its end is left out."""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


class _TensorBoard:
    """Event files. Every start gets a folder of its own, so that curves of two starts never mix."""

    def __init__(self, folder: Path) -> None:
        # The writer of the tensorboard package itself: unlike torch.utils.tensorboard it imports no torch.
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder / "tensorboard" / time.strftime("%Y%m%d-%H%M%S")))

    def log(self, phase: str, step: int, scalars: dict[str, float]) -> None:
        for key, value in scalars.items():
            self._writer.add_scalar(f"{phase}/{key}", value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """Weights & Biases. Each phase counts its own steps, which W&B's single global step cannot say."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "log.wandb is on, but the package 'wandb' is not installed; "
                'install it with `pip install -e ".[wandb]"`, or set log.wandb = false'
            ) from error
        self._run = wandb.init(project=project, dir=str(folder), config=dict(config), name=folder.name)
        for phase in ("warmup", "rl", "eval"):
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def log(self, phase: str, step: int, scalars: dict[str, float]) -> None:
        self._run.log({f"{phase}/step": step} | {f"{phase}/{key}": value for key, value in scalars.items()})

    def close(self) -> None:
        self._run.finish()


def _plain(value: Any) -> Any:
    """numpy scalars and arrays as Python numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_is_finite(inner) for inner in value.values())
    return not isinstance(value, list) or all(_is_finite(inner) for inner in value)


def _null_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _null_nonfinite(inner) for key, inner in value.items()}
    return [_null_nonfinite(inner) for inner in value] if isinstance(value, list) else value
