"""What a run says about itself: one record per optimizer step, one per evaluation, readable samples, the screen.

It only reads; leaving it out would change no training step. Names of metrics are in `docs/metrics.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmd_rl.config.tree import Config
from spmd_rl.observe.evaluations import write_evaluation
from spmd_rl.observe.metrics import Metrics
from spmd_rl.observe.progress import Progress
from spmd_rl.observe.samples import write_samples
from spmd_rl.orchestrator import first_step
from spmd_rl.orchestrator.batch import Batch
from spmd_rl.orchestrator.evaluate import Evaluation
from spmd_rl.orchestrator.guard import ADVICE, Collapse
from spmd_rl.orchestrator.link import Link
from spmd_rl.rollouts.packing import Packed
from spmd_rl.rollouts.types import Episode
from spmd_rl.world.messages import Trained


class Report:
    """Writes into the run's output folder.

    Args:
        decode: token ids → text, for people.
        vitals: how rank 0 is doing, as metrics.
    """

    def __init__(
        self,
        config: Config,
        link: Link,
        metrics: Metrics,
        progress: Progress,
        decode: Callable[[list[int]], str],
        vitals: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._config, self._link, self._metrics, self._progress = config, link, metrics, progress
        self._decode, self._vitals = decode, vitals
        self._folder = Path(config.output_dir)
        self._at, self._tokens, self._busy_s, self._cpu_s = time.monotonic(), 0, 0.0, {}
        self.evaluations: list[dict[str, Any]] = []
        self._collapsed = False  # as of the last step

    def state(self) -> dict[str, Any]:
        """What was counted and evaluated so far, for a snapshot."""
        return {"tokens": self._tokens, "evaluations": self.evaluations}

    def restore(self, state: dict[str, Any]) -> None:
        """Count on from a snapshot."""
        self._tokens, self.evaluations = state["tokens"], state["evaluations"]

    def start(self, phase: str, pull: dict[str, float] | None = None) -> None:
        """A phase begins; `pull` is what publishing its first version showed."""
        self._count_from_here()
        if pull:
            self._log({"phase": "start", "step": 0, "version": 0, **pull})
            self._warn_mismatch(0, pull)

    def warmup_step(self, trained: Trained) -> None:
        """A supervised step is complete."""
        metrics = trained.metrics
        self._log({"phase": "warmup", "step": trained.step, "version": 0, **metrics, "time/step_s": self._lap()})

    def rl_step(
        self,
        step: int,
        batch: Batch,
        packed: list[Packed],
        trained: Trained,
        pull: dict[str, float],
        collapse: Collapse | None = None,
    ) -> None:
        """An optimizer step is complete, and its weights are on all engines; `collapse` is what the guard saw.

        `pull` is empty for a step that a run takes again when it is taken up: nobody samples from that version.
        """
        lags, step_s = batch.lags(step), self._lap()
        tokens = batch.tokens
        record = {
            "phase": "rl",
            "step": step,
            "version": step,
            **trained.metrics,
            **batch.stats,
            "rollouts": float(len(batch.episodes)),
            "tokens/packed": float(tokens),
            **({"lag/mean": float(lags.mean()), "lag/max": float(lags.max())} if len(lags) else {}),
            **pull,
            "guard/collapsed": float(collapse is not None),
            "pack/fill": sum(p.stats.fill for p in packed) / len(packed),
            "pack/micro_steps": float(sum(p.stats.micro_steps for p in packed)),
            "time/step_s": step_s,
            "perf/trainer_tokens_per_s": tokens / trained.metrics["time/train_s"],
            **self._engine_figures(step_s),
            **self._cpu_figures(),
            **self._vitals(),
        }
        self._log(record)
        self._warn_mismatch(step, pull)
        if collapse is not None and not self._collapsed:
            self._progress.write(f"warning: step {step}: this run is falling apart: {collapse.why}; {ADVICE}\n")
        self._collapsed = collapse is not None
        if step == 1:
            self._show_first(batch)
        self._write_samples("step", step, batch.episodes)

    def rolled_back(self, step: int, folder: str, dropped: int, pull: dict[str, float]) -> None:
        """Step `step` took the weights back to a checkpoint instead of training."""
        self._collapsed = False
        self._log({"phase": "rl", "step": step, "version": step, "guard/rolled_back": 1.0, **pull})
        self._progress.write(f"step {step}: went back to {folder}; {dropped} groups of the collapsed policy dropped\n")

    def taken_up(self, folder: str, saved: int, step: int, pull: dict[str, float]) -> None:
        """The run goes on from a checkpoint; steps between `saved` and `step` were taken again from the journal."""
        again = f", after {step - saved} steps from the journal" if step > saved else ""
        self._progress.write(f"taken up from {folder}: version {step} serves{again}\n")
        self._warn_mismatch(step, pull)
        tokens = self._tokens
        self._count_from_here()
        self._tokens = tokens

    def steered(self, step: int, command: str) -> None:
        """Somebody told the run something."""
        self._progress.write(f"steered before step {step}: {command}\n")

    def _show_first(self, batch: Batch) -> None:
        """What the first batch looks like to the loss, and whether anything can be learned from it."""
        text = first_step.describe(batch, self._decode)
        path = self._folder / "rollouts" / "first_step.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if self._progress.mode != "off":
            self._progress.write(text)
        for warning in first_step.warnings(batch):
            self._progress.write(f"warning: {warning}\n")

    def evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation is complete."""
        step = evaluation.step
        record = {"phase": "eval", "step": step, "version": step, **evaluation.metrics}
        self.evaluations.append(record)
        self._log(record)
        write_evaluation(self._folder, evaluation.plain())
        self._write_samples("eval", step, evaluation.shown)
        if step == 0:  # later ones run beside training: their time and tokens are those of the steps meanwhile
            self._count_from_here()

    def _engine_figures(self, step_s: float) -> dict[str, float]:
        """New tokens and busy time of all engines since the last step."""
        busy_s = sum(load.step_s for load in self._link.loads.values())
        tokens, self._tokens = self._link.tokens - self._tokens, self._link.tokens
        busy, self._busy_s = busy_s - self._busy_s, busy_s
        return {
            "tokens/sampled": float(tokens),
            "perf/engine_tokens_per_s": tokens / step_s,
            "perf/engine_busy": min(1.0, busy / step_s / (self._link.replicas + self._link.frozen)),
        }

    def _cpu_figures(self) -> dict[str, float]:
        """CPU seconds, all threads, since the last step: of this process, and of the engine leaders together."""
        now = {
            "cpu/orchestrator_s": time.process_time(),
            "cpu/engines_s": sum(load.cpu_s for load in self._link.loads.values()),
        }
        before, self._cpu_s = self._cpu_s, now
        return {name: seconds - before.get(name, seconds) for name, seconds in now.items()}

    def _count_from_here(self) -> None:
        """What came before belongs to no step."""
        self._lap()
        self._engine_figures(1.0)
        self._cpu_figures()

    def _lap(self) -> float:
        now = time.monotonic()
        seconds, self._at = now - self._at, now
        return seconds

    def _log(self, record: dict[str, Any]) -> None:
        self._metrics.log(record)
        if record["phase"] != "start":
            self._progress.update(record)

    def _warn_mismatch(self, version: int, pull: dict[str, float]) -> None:
        if pull.get("mismatch/above_limit"):
            self._progress.write(
                f"warning: version {version}: engine and trainer disagree about the same weights, "
                f"k3 {pull['mismatch/k3_mean']:.2e} over {pull['mismatch/tokens']:.0f} tokens\n"
            )

    def _write_samples(self, kind: str, step: int, episodes: list[Episode]) -> None:
        if not self._config.log.rollouts_per_step:
            return
        folder = self._folder if kind == "step" else self._folder / "eval"
        write_samples(folder, step, episodes, self._decode, self._config.log.rollouts_per_step)
