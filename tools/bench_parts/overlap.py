"""What asynchrony gains where cores are no limit: steps of RL with sleeps in place of the engine's and the trainer's
arithmetic.

Processes, clock, orchestrator, window and weight sync are the product's. The engine's step sleeps a fixed time and
gives every running sequence a token; lengths are log-normal (sigma 1), a function of the request's seed; it runs as
many sequences as half of a batch, or two batches. Training sleeps as long as a batch takes when it is sampled alone on
that engine, so an ideal step, max(inference, training), is that time, and a synchronous step twice that.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

from tools.bench_parts.ranks import finish, make_model, run_ranks

SIZES = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "ff": 64}
HALF, DOUBLE = 0.5, 2.0  # sequences that the engine runs at a time, in batches
# With max_lag 0 all orders are the same: a batch takes all groups that are open.
SETTINGS = [
    (HALF, 0, "fifo"),
    (HALF, 1, "window"),
    (HALF, 1, "completion"),
    (DOUBLE, 0, "fifo"),
    (DOUBLE, 1, "fifo"),
    (DOUBLE, 1, "window"),
    (DOUBLE, 1, "completion"),
    (DOUBLE, 2, "window"),
    (DOUBLE, 2, "completion"),
]
TARGET = 1.8


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        report = run_ranks("overlap_ranks.py", 3, make_model(folder, **SIZES), json.dumps(SETTINGS))
    cases = report["cases"]
    sync = {case["capacity"]: case["step_s"] for case in cases if case["max_lag"] == 0}
    print(
        f"batches of {report['batch']} rollouts, {report['tokens']:.0f} tokens in the mean; engine steps of "
        f"{report['engine_step_s'] * 1e3:g} ms; means of {report['steps']} steps"
    )
    head = ("capacity", "max_lag", "order", "step s", "/ ideal", "planned", "long run", "speed-up", "oldest lag")
    print("  ".join(f"{name:>10}" for name in (*head, "engine idle", "slots idle", "trainer idle")))
    for case in cases:
        case["speed_up"] = sync[case["capacity"]] / case["step_s"]
        cells = [str(case["capacity"]), str(case["max_lag"]), case["order"] if case["max_lag"] else "any"]
        cells += [f"{case[key]:.2f}" for key in ("step_s", "over_ideal", "planned", "long_run", "speed_up")]
        cells += [f"{case['lag_max']:.0f}"]
        idle = [f"{case[key]:.0%}".rjust(11) for key in ("engine_idle", "slots_idle", "trainer_idle")]
        print("  ".join([f"{cell:>10}" for cell in cells] + idle))
    print("planned: a step over the ideal were there nothing but the window, of these rollouts and of a long run")
    for capacity, ideal in report["ideal_s"].items():
        print(f"ideal with {capacity} sequences at a time: {ideal:.2f} s, inference and training alike")
    gains = {
        case["order"]: case["speed_up"]
        for case in cases
        if case["max_lag"] == 1 and case["capacity"] == int(DOUBLE * report["batch"])
    }
    print(
        f"max_lag 1 against 0, two batches at a time: completion x {gains['completion']:.2f} "
        f"({'met' if gains['completion'] >= TARGET else 'MISSED'}: target {TARGET}), window x {gains['window']:.2f}, "
        f"fifo x {gains['fifo']:.2f}"
    )
    return finish({"target_speed_up": TARGET, "speed_up": gains, **report}, json_path)
