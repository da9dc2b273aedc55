"""The picture of a run: reward over optimizer steps with the held-out evaluations, entropy and lag below.

Made from metrics.jsonl alone, so it can be drawn again at any time, also while the run goes on. Invariant: a metric
that a run did not log leaves its panel empty and fails nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.observe import names
from spmd_rl.observe.disk import explain_full_disk
from spmd_rl.observe.metrics import read_metrics

MEAN_OVER = 10  # steps
INK, GRID = "#1f2933", "#e4e7eb"
REWARD, GREEDY, SAMPLED, ENTROPY, LAG = "#2563eb", "#dc2626", "#f59e0b", "#059669", "#7c3aed"

Curve = tuple[np.ndarray, np.ndarray]  # steps int[N], values float[N]


def reward_png(metrics_path: str | Path, out_path: str | Path, title: str = "") -> Path:
    """Draw metrics.jsonl into a PNG and return its path; the folder is made if absent.

    title: by default the name of the run's folder. Raises FileNotFoundError when there is no such metrics file,
    OSError when the disk is full.
    """
    # The object-oriented interface: no display, no global state of pyplot.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = list(read_metrics(metrics_path))
    figure = Figure(figsize=(9, 7), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1, 1]})
    _draw_reward(top, records)
    _draw_small(middle, curve(records, "rl", names.ENTROPY), ENTROPY, "entropy\n(nats / token)")
    _draw_small(bottom, curve(records, "rl", names.LAG), LAG, "lag\n(steps)")
    bottom.set_xlabel("optimizer step")
    for axes in (top, middle, bottom):
        _style(axes)
    figure.align_ylabels()
    heading = title or Path(metrics_path).resolve().parent.name
    figure.suptitle(heading, x=0.012, ha="left", fontsize=14, fontweight="bold", color=INK)

    out_path = Path(out_path)
    with explain_full_disk(out_path.parent):
        out_path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out_path)
    return out_path


def loss_png(metrics_path: str | Path, out_path: str | Path) -> Path:
    """The same for supervised training: loss over optimizer steps, with the validations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = list(read_metrics(metrics_path))
    figure = Figure(figsize=(9, 4.5), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps, losses = curve(records, "sft", names.LOSS)
    axes.plot(steps, losses, color=REWARD, alpha=0.3, linewidth=1, label="batch mean")
    axes.plot(steps, trailing_mean(losses), color=REWARD, linewidth=2.4, label=f"mean of {MEAN_OVER} steps")
    at, values = curve(records, "eval", names.EVAL_LOSS)
    if len(at):
        axes.scatter(at, values, 52, color=SAMPLED, edgecolors="white", zorder=4, label="validation")
    axes.set_ylabel("loss (nats / learned token)")
    axes.set_xlabel("optimizer step")
    axes.legend(loc="best", frameon=False, labelcolor=INK)
    _style(axes)
    out_path = Path(out_path)
    with explain_full_disk(out_path.parent):
        figure.savefig(out_path)
    return out_path


def curve(records: list[dict[str, Any]], phase: names.Phase, key: str) -> Curve:
    """One metric over the steps of a phase, by step; a step logged twice counts once, with its last value."""
    found = {r["step"]: r[key] for r in records if r["phase"] == phase and isinstance(r.get(key), int | float)}
    steps = sorted(found)
    return np.array(steps, dtype=int), np.array([found[s] for s in steps], dtype=float)


def trailing_mean(values_N: np.ndarray, over: int = MEAN_OVER) -> np.ndarray:
    """float[N]: the mean of each value and up to `over` - 1 values before it."""
    return np.array([values_N[max(0, i + 1 - over) : i + 1].mean() for i in range(len(values_N))])


def _draw_reward(axes: Any, records: list[dict[str, Any]]) -> None:
    steps, rewards = curve(records, "rl", names.REWARD)
    if len(steps):
        axes.plot(steps, rewards, color=REWARD, alpha=0.3, linewidth=1, label="batch mean")
        axes.plot(steps, trailing_mean(rewards), color=REWARD, linewidth=2.4, label=f"mean of {MEAN_OVER} steps")
    shapes = ((names.EVAL_SAMPLED, SAMPLED, "o", "sampled"), (names.EVAL_GREEDY, GREEDY, "D", "greedy"))
    drawn = [rewards]
    for key, color, marker, label in shapes:
        at, values = curve(records, "eval", key)
        drawn.append(values)
        if not len(at):
            continue
        if len(at) > 2:  # a line between start and end alone would look like a course
            axes.plot(at, values, color=color, linestyle=(0, (1, 2)), linewidth=1, zorder=3)
        label = f"held out, {label}: " + " → ".join(f"{value:.2f}" for value in dict.fromkeys(values[[0, -1]]))
        axes.scatter(at, values, 52, color=color, marker=marker, edgecolors="white", zorder=4, label=label)
    values = np.concatenate(drawn)
    if values.size and values.min() >= 0 and values.max() <= 1:
        axes.set_ylim(-0.04, 1.08)
    if values.size:
        axes.legend(loc="best", frameon=False, labelcolor=INK)
    axes.set_ylabel("reward")


def _draw_small(axes: Any, points: Curve, color: str, label: str) -> None:
    steps, values = points
    axes.set_ylabel(label)
    if not len(steps):
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color="#9aa5b1")
        return
    axes.plot(steps, values, color=color, linewidth=1.6)
    axes.fill_between(steps, values, 0, color=color, alpha=0.08, linewidth=0)
    axes.set_ylim(0, max(1.1 * float(values.max()), 1e-3) if math.isfinite(values.max()) else None)


def _style(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.label.set_color(INK)
    axes.xaxis.label.set_color(INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
