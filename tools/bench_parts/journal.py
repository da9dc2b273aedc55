"""The journal: what appending and syncing costs against writing as many plain bytes, what a batch costs of a step.

Records look like finished episodes: columns of log-normal length. Both sides write the same bytes in turns, record by
record, and sync once per batch; the folder is the system's for temporary files (TMPDIR chooses the disk). A batch of
the product is journalled as rank 0 does it, checksums and all. Medians of many batches, because disks have moods.
Files are read back from the page cache.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.envs.protocol import Generation, single_turn
from spmd_rl.orchestrator.records import Answered, Asked, Rolled, checksum
from spmd_rl.rollouts.plain import plain_episode
from spmd_rl.rollouts.types import Episode, Reward, Task
from spmd_rl.world.journal import Journal, read
from tools.bench_parts.ranks import finish

ROLLOUTS, LENGTH, SIGMA, PROMPT = 256, 512, 1.0, 64
ROUNDS, READS = 25, 5
STEP_S = 10.0  # assumed wall time of an optimizer step; the batch's cost is a share of it
TARGETS = {"mb_per_s": 50.0, "share_of_step": 0.01}


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        report = {**write_and_read(Path(folder)), **journal_batches(Path(folder))}
    r = report
    print(
        f"batches of {ROLLOUTS} records, {r['batch_mb']:.1f} MB each, one sync per batch; medians of {ROUNDS} batches"
    )
    print(f"os.write + fdatasync  {r['raw_mb_per_s']:7.0f} MB/s")
    print(
        f"append + sync         {r['mb_per_s']:7.0f} MB/s  ratio {r['ratio']:.2f}  "
        f"{verdict(r['mb_per_s'] >= TARGETS['mb_per_s'])}: target {TARGETS['mb_per_s']:g} MB/s; "
        f"{r['append_mb_per_s']:.0f} MB/s without the sync"
    )
    print(f"read                  {r['read_mb_per_s']:7.0f} MB/s  (the plain file: {r['raw_read_mb_per_s']:,.0f} MB/s)")
    print(
        f"a batch of {ROLLOUTS} rollouts × {LENGTH} tokens: {r['batch_s'] * 1e3:.1f} ms "
        f"(CPU {r['batch_cpu_s'] * 1e3:.1f} ms), {r['bytes_per_token']:.1f} bytes per token"
    )
    print(
        f"that is {r['share_of_step']:.2%} of a step, assumed to take {STEP_S:g} s "
        f"({verdict(r['share_of_step'] <= TARGETS['share_of_step'])}: target {TARGETS['share_of_step']:.0%})"
    )
    return finish({"targets": TARGETS, "assumed_step_s": STEP_S, **report}, json_path)


def verdict(met: bool) -> str:
    """For people."""
    return "met" if met else "MISSED"


def write_and_read(folder: Path) -> dict[str, float]:
    """Throughput of the journal and of plain files."""
    records = episodes_as_columns()
    pieces = as_written(folder / "once", records)
    nbytes = sum(map(len, pieces))
    journal = Journal(folder / "journal")
    plain = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT, 0o644)

    def ours() -> float:
        for record in records:
            journal.append(record)
        appended = time.perf_counter()
        journal.sync()
        return appended

    def raw() -> None:
        for piece in pieces:
            os.write(plain, piece)
        os.fdatasync(plain)

    seconds: dict[str, list[float]] = {"ours": [], "append": [], "raw": []}
    for _ in range(ROUNDS + 1):
        seconds["raw"].append(timed(raw))
        started = time.perf_counter()
        appended = ours()
        seconds["ours"].append(time.perf_counter() - started)
        seconds["append"].append(appended - started)
    journal.close()
    os.close(plain)
    m = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first one makes the files
    size = os.path.getsize(folder / "journal")
    read_s = statistics.median(timed(lambda: exhaust(folder / "journal")) for _ in range(READS))
    raw_read_s = statistics.median(timed((folder / "plain").read_bytes) for _ in range(READS))
    return {
        "batch_mb": nbytes / 1e6,
        "raw_mb_per_s": nbytes / m["raw"] / 1e6,
        "mb_per_s": nbytes / m["ours"] / 1e6,
        "append_mb_per_s": nbytes / m["append"] / 1e6,
        "ratio": m["raw"] / m["ours"],
        "read_mb_per_s": size / read_s / 1e6,
        "raw_read_mb_per_s": os.path.getsize(folder / "plain") / raw_read_s / 1e6,
    }


def journal_batches(folder: Path) -> dict[str, float]:
    """One batch as rank 0 records it: what was asked, what came back, the rollouts."""
    episodes = [episode(i, LENGTH) for i in range(ROLLOUTS)]
    journal = Journal(folder / "batches")

    def one_batch() -> None:
        for i, finished in enumerate(episodes):
            sample = finished.samples[0]
            journal.append(Asked(i, 0, i, PROMPT, checksum(sample.tokens[:PROMPT])))
            journal.append(Answered(i, LENGTH, checksum(sample.tokens, sample.logprobs, sample.versions), "stop"))
            journal.append(Rolled(i, 0, plain_episode(finished)))
        journal.sync()

    wall, cpu = [], []
    for _ in range(ROUNDS + 1):
        started_cpu = time.process_time()
        wall.append(timed(one_batch))
        cpu.append(time.process_time() - started_cpu)
    nbytes = journal.offset / len(wall)
    journal.close()
    batch_s = statistics.median(wall[1:])
    return {
        "batch_s": batch_s,
        "batch_cpu_s": statistics.median(cpu[1:]),
        "share_of_step": batch_s / STEP_S,
        "bytes_per_token": nbytes / (ROLLOUTS * LENGTH),
    }


def episodes_as_columns() -> list[dict[str, Any]]:
    """Finished episodes with all four columns in full; log-normal lengths with the mean LENGTH."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(LENGTH) - SIGMA**2 / 2, SIGMA, ROLLOUTS).astype(np.int64) + 1
    samples = [episode(i, length).samples[0] for i, length in enumerate(lengths)]
    columns = ("tokens", "logprobs", "versions", "mask")
    return [
        {"group": i, "reward": 0.5, "status": "ok", **{name: getattr(sample, name) for name in columns}}
        for i, sample in enumerate(samples)
    ]


def episode(index: int, length: int) -> Episode:
    """A prompt of PROMPT tokens and `length` sampled ones."""
    rng = np.random.default_rng(index)
    tokens = rng.integers(0, 150_000, PROMPT + length).astype(np.int32)
    logprobs = rng.standard_normal(length).astype(np.float32)
    generation = Generation(
        tokens[PROMPT:], logprobs, np.repeat(np.int32([3, 4]), [length // 2, -(-length // 2)]), "stop"
    )
    task = Task("bench", index, {"split": "train"})
    return single_turn(task, tokens[:PROMPT], generation, 1.0, Reward(float(index % 2)))


def as_written(path: Path, records: list[Any]) -> list[bytes]:
    """The bytes of each record in a journal."""
    journal, ends = Journal(path), []
    for record in records:
        ends.append(journal.offset)
        journal.append(record)
    journal.close()
    data = path.read_bytes()
    return [data[start:end] for start, end in zip(ends, [*ends[1:], len(data)], strict=True)]


def exhaust(path: Path) -> None:
    """Read all records."""
    for _ in read(path):
        pass


def timed(action: Callable[[], Any]) -> float:
    """Seconds."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
