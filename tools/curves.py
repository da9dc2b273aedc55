"""Train the quickstart's task with every algorithm, and draw what they learn.

    python tools/curves.py                         all algorithms, two seeds: docs/algorithms.png and a table
    python tools/curves.py grpo gspo --seeds 5     some of them

Every run of a seed starts from the same supervised warm-up, so that curves differ by the algorithm alone. Runs that are
complete are not repeated. It refuses to rank: one tiny task says whether an algorithm works, not which is better.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from spmd_rl.algorithms import ALGORITHMS  # noqa: E402

A = "--orchestrator.algorithm"
GOAL = 0.9

# What an algorithm needs beside its name. {solved}: a model that solves the task, {steps}: the run's length.
NEEDS: dict[str, list[str]] = {
    "dapo": [f"{A}.zero_variance", "refill"],  # which the quickstart's config turns off
    "ppo": [f"{A}.minibatches", "2"],
    "opd": [f"{A}.reference", "{solved}"],
    "sft": [f"{A}.reference", "{solved}", "--deployment.teacher-ranks", "1", "--orchestrator.eval.interval", "8"],
    "ppo_critic": [f"{A}.critic.lr", "1e-3"],
    # Its teacher moves with it: at the common rate it comes to 0.9 in 26 steps and then drifts away again.
    "opsd": ["--trainer.optim.lr", "5e-5", "--trainer.scheduler.min-lr", "1e-6"],
}

# A policy that shall teach itself must know how to use a hint: its warm-up shows some.
WARM_UPS = {"opsd": ["--warmup.steps", "400", "--orchestrator.source.0.args.hinted", "0.5"]}


def main() -> int:
    """Returns 0 when every run came to the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algorithms", nargs="*", default=list(ALGORITHMS), help="default: all")
    parser.add_argument("--seeds", type=int, default=2, help="seeds 0 .. N-1")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/curves")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/algorithms.png")
    given = parser.parse_args()
    if unknown := set(given.algorithms) - set(ALGORITHMS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(ALGORITHMS)}")
    curves = {}
    for seed in range(given.seeds):
        plain = train(given.out / f"warmup-{seed}", seed, ["--max-steps", "0"]) / "hf"
        solved = train(given.out / f"grpo-{seed}", seed, from_warmup(plain, given.steps)) / "hf"
        for name in given.algorithms:
            if name in WARM_UPS:
                flags = ["--max-steps", "0", *WARM_UPS[name]]
                start = train(given.out / f"warmup-{name}-{seed}", seed, flags) / "hf"
            else:
                start = plain
            needs = [word.format(solved=solved) for word in NEEDS.get(name, [])]
            flags = [*from_warmup(start, given.steps), f"{A}.type", name, *needs]
            curves[name, seed] = train(given.out / f"{name}-{seed}", seed, flags)
    rows = [row(name, seed, folder) for (name, seed), folder in curves.items()]
    print(table(rows))
    draw({(name, seed): curve(name, folder) for (name, seed), folder in curves.items()}, given.picture)
    return 0 if all(r["reached"] for r in rows) else 1


def from_warmup(model: Path, steps: int) -> list[str]:
    """Flags of a run that begins with RL."""
    return ["--model.name", str(model), "--warmup.steps", "0", "--max-steps", str(steps)]


def train(folder: Path, seed: int, flags: list[str]) -> Path:
    """One run of the quickstart with `flags`; its folder, which is complete."""
    if (folder / "hf").exists():
        return folder
    print(f"{folder.name} …", flush=True)
    command = [sys.executable, "spmd_rl/main.py", "rl", "--config", "configs/quickstart.toml", "--seed", str(seed)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "w") as log:
        done = subprocess.run(
            [*command, "--output-dir", str(folder), *flags], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise SystemExit(f"{folder.name} ended with {done.returncode}; see {folder}.log")
    return folder


def records(folder: Path, phase: str) -> list[dict]:
    """The run's records of one phase."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["phase"] == phase]


def curve(name: str, folder: Path) -> tuple[list[int], list[float]]:
    """(steps, mean rewards). What a teacher sampled says nothing of the policy: there it is the evaluations."""
    if ALGORITHMS[name].learns == "answers":
        found = records(folder, "eval")
        return [record["step"] for record in found], [record["eval/reward"] for record in found]
    found = records(folder, "rl")
    return [record["step"] for record in found], [record["reward/mean"] for record in found]


def row(name: str, seed: int, folder: Path) -> dict:
    """One line of the table: the goal counts when ten steps, or an evaluation, have it as their mean."""
    steps, values = curve(name, folder)
    over = 1 if ALGORITHMS[name].learns == "answers" else 10
    means = [sum(values[i : i + over]) / over for i in range(len(values) - over + 1)]
    reached = next((step for step, mean in zip(steps[over - 1 :], means, strict=True) if mean >= GOAL), None)
    last = records(folder, "eval")[-1]
    return {"name": name, "seed": seed, "reached": reached} | {key: last[f"eval/{key}"] for key in ("reward", "greedy")}


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = ["| algorithm | seed | mean of 10 steps ≥ 0.9 at step | held out, sampled | held out, greedy |"]
    lines.append("|---|---|---|---|---|")
    for r in rows:
        reached = r["reached"] or "–"
        lines.append(f"| `{r['name']}` | {r['seed']} | {reached} | {r['reward']:.3f} | {r['greedy']:.3f} |")
    return "\n".join(lines)


def draw(curves: dict[tuple[str, int], tuple[list[int], list[float]]], path: Path) -> None:
    """One small panel per algorithm, a line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for name, _ in curves))
    columns = min(4, len(names))
    figure, axes = plt.subplots(
        -(-len(names) // columns), columns, figsize=(3 * columns, 2.2 * -(-len(names) // columns)), squeeze=False,
        sharex=True, sharey=True,
    )  # fmt: skip
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for name, axis in zip(names, axes.flat, strict=False):
        for (other, seed), (steps, values) in curves.items():
            if other == name:
                axis.plot(steps, values, linewidth=1, label=f"seed {seed}")
        axis.axhline(GOAL, color="0.7", linewidth=0.8, linestyle="--")
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0, 1.02)
    figure.supxlabel("optimizer step", fontsize=9)
    figure.supylabel("mean reward", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"drawn: {path}")


if __name__ == "__main__":
    sys.exit(main())
