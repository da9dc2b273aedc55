"""Train the examples with environments of their own, and draw what they learn: docs/examples.png and a table.

    python tools/examples.py                     guess, calculator, python, repo_fix, from configs/
    python tools/examples.py guess --seeds 2     some of them

Runs that are complete are not repeated. Each starts from the quickstart's model, so run launch/quickstart.sh first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from spmd_rl.observe.plots import trailing_mean  # noqa: E402
from tools.curves import records, train  # noqa: E402

EXAMPLES = ("guess", "calculator", "python", "repo_fix")


def main() -> int:
    """Returns 0 when every run improved on held-out tasks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("examples", nargs="*", default=list(EXAMPLES), help="default: all")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 .. N-1")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/examples")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/examples.png")
    given = parser.parse_args()
    if unknown := set(given.examples) - set(EXAMPLES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(EXAMPLES)}")
    runs = {
        (name, seed): train(given.out / f"{name}-{seed}", seed, ["--config", f"configs/{name}.toml"])
        for name in given.examples
        for seed in range(given.seeds)
    }
    rows = [row(name, seed, folder) for (name, seed), folder in runs.items()]
    print(table(rows))
    draw(runs, given.picture)
    return 0 if all(r["reward"][1] > r["reward"][0] for r in rows) else 1


def row(name: str, seed: int, folder: Path) -> dict:
    """One line of the table: held-out rewards before and after RL, and the batches' at both ends."""
    first, last = (records(folder, "eval")[i] for i in (0, -1))
    rewards = [record["reward/mean"] for record in records(folder, "rl")]
    ends = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    held_out = {key: (first[f"eval/{key}"], last[f"eval/{key}"]) for key in ("reward", "greedy")}
    return {"name": name, "seed": seed, "steps": len(rewards), "batch": ends} | held_out


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = ["| example | seed | steps | batches, first and last ten | held out, sampled | held out, greedy |"]
    lines.append("|---|---|---|---|---|---|")
    for r in rows:
        pairs = " | ".join(f"{before:.2f} → {after:.2f}" for before, after in (r["batch"], r["reward"], r["greedy"]))
        lines.append(f"| `{r['name']}` | {r['seed']} | {r['steps']} | {pairs} |")
    return "\n".join(lines)


def draw(runs: dict[tuple[str, int], Path], path: Path) -> None:
    """One panel per example: the batches' rewards, their mean of ten steps, and the held-out evaluations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for name, _ in runs))
    figure = Figure(figsize=(3.4 * len(names), 3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for name, axes in zip(names, figure.subplots(1, len(names), sharey=True, squeeze=False).flat, strict=True):
        for (other, _), folder in runs.items():
            if other != name:
                continue
            found, evaluations = records(folder, "rl"), records(folder, "eval")
            steps, rewards = [r["step"] for r in found], np.array([r["reward/mean"] for r in found])
            axes.plot(steps, rewards, color="tab:blue", alpha=0.25, linewidth=1)
            axes.plot(steps, trailing_mean(rewards), color="tab:blue", label="batches")
            for key, color in (("reward", "tab:orange"), ("greedy", "tab:red")):
                at = [record["step"] for record in evaluations]
                label = "held out, sampled" if key == "reward" else "held out, greedy"
                axes.plot(at, [r[f"eval/{key}"] for r in evaluations], "o--", color=color, markersize=4, label=label)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.set_ylim(0, 1.02)
    figure.axes[0].set_ylabel("mean reward", fontsize=9)
    figure.axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(path)
    print(f"drawn: {path}")


if __name__ == "__main__":
    sys.exit(main())
