"""What a reward does on ten rows of your data, before any training.

    python tools/check_reward.py configs/own_reward.py:digits configs/own_data.jsonl --answer solution
    python tools/check_reward.py math tasks.parquet --answer answer

Every row is tried with its right answer, with that of another row, with nothing and with noise. It ends with 1 when the
reward raises, returns what is no reward, does not tell right from wrong, or can't be called at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmd_rl.config.tree import SourceConfig
from spmd_rl.data.tables import Table, open_table
from spmd_rl.envs.rewards import RewardFunction
from spmd_rl.rollouts.types import Reward, RewardError

NOISE = "lorem ipsum 4711 {"
Outcome = tuple[str, str, Reward | RewardError, float]  # what was tried, the completion, what came, seconds


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reward", help="file.py:function, pkg.mod:function, exact, regex, json_schema or math")
    parser.add_argument("data", help="*.jsonl, *.parquet or a Hub dataset id")
    parser.add_argument("--answer", default="", help="column with the right answer")
    parser.add_argument("--args", default="{}", help="JSON object: reward_args of a built-in reward")
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds for one reward")
    given = parser.parse_args()
    try:
        table = open_table(given.data)
        if given.answer and given.answer not in table.columns:
            raise ValueError(f"{given.data} has no column {given.answer!r}; it has {', '.join(table.columns)}")
        source = SourceConfig(
            data=given.data,
            reward=given.reward,
            answer=given.answer,
            reward_args=json.loads(given.args),
            reward_s=given.deadline,
        )
        reward = RewardFunction(source)
        rows = asyncio.run(try_rows(reward, table, given.answer, min(given.rows, len(table))))
    except (ValueError, TypeError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for number, outcomes in enumerate(rows):
        print(f"row {number}: {json.dumps(table[number], ensure_ascii=False)[:100]}")
        for tried, completion, outcome, seconds in outcomes:
            print(f"    {tried:<14}{completion[:30]!r:<34}{shown(outcome):<40}{1e3 * seconds:8.1f} ms")
    problems = judge(rows)
    print("\n" + "\n".join(problems or ["fine: no errors, and right answers score highest"]))
    return 1 if problems else 0


async def try_rows(reward: RewardFunction, table: Table, answer: str, count: int) -> list[list[Outcome]]:
    """Outcomes of the first rows."""
    rows = []
    for number in range(count):
        row = table[number]
        right = str(row[answer]) if answer else None
        others = (str(table[i][answer]) for i in range(len(table)) if answer)
        wrong = next((other for other in others if other != right), None)
        tried = {"right answer": right, "another row's": wrong, "nothing": "", "noise": NOISE}
        rows.append([await attempt(reward, what, text, row) for what, text in tried.items() if text is not None])
    return rows


async def attempt(reward: RewardFunction, tried: str, completion: str, row: dict[str, Any]) -> Outcome:
    """One call, timed."""
    started = time.perf_counter()
    outcome = await reward(completion=completion, tokens=list(completion.encode()), row=row, prompt="")
    return tried, completion, outcome, time.perf_counter() - started


def shown(outcome: Reward | RewardError) -> str:
    """In one line."""
    if isinstance(outcome, RewardError):
        return f"ERROR {outcome.why}"
    parts = ", ".join(f"{name} {value:g}" for name, value in outcome.parts.items())
    return f"{outcome.value:g}" + (f"  ({parts})" if parts else "")


def judge(rows: list[list[Outcome]]) -> list[str]:
    """What is wrong with the reward, as far as these rows show."""
    problems = []
    errors = [outcome.why for row in rows for _, _, outcome, _ in row if isinstance(outcome, RewardError)]
    if errors:
        problems.append(f"{len(errors)} calls gave an error (never a zero; such rollouts are masked out): {errors[0]}")
    values = [{tried: o.value for tried, _, o, _ in row if isinstance(o, Reward)} for row in rows]
    if len({value for row in values for value in row.values()}) == 1:
        problems.append("every call gave the same reward: nothing can be learned from it")
    not_highest = [
        n for n, row in enumerate(values) if "right answer" in row and row["right answer"] < max(row.values())
    ]
    if not_highest:
        problems.append(f"the right answer does not score highest on rows {not_highest}")
    fooled = [n for n, row in enumerate(values) if row.get("right answer") == row.get("another row's", "none")]
    if fooled:
        problems.append(f"another row's answer scores as much as the right one on rows {fooled}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
