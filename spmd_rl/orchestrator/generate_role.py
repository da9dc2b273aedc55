"""`main.py generate` on rank 0: complete the prompts of a table, and write them down in the table's order.

Rows are written as soon as all rows before them are: so what is in the output file is a beginning of the whole, and a
program that is started again goes on behind it. Invariant: a row is there completely or not at all, and once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from spmd_rl.data.tables import DataError, Table, open_table
from spmd_rl.envs.prompts import Prompts, check_rows
from spmd_rl.envs.protocol import PromptTooLong
from spmd_rl.models.hf_config import read_config, resolve
from spmd_rl.observe.disk import explain_full_disk
from spmd_rl.observe.logs import RankOutput
from spmd_rl.orchestrator import preflight
from spmd_rl.orchestrator.asked import ask
from spmd_rl.orchestrator.sampler import Services
from spmd_rl.orchestrator.seeds import seed_of
from spmd_rl.orchestrator.steering import Steering

if TYPE_CHECKING:
    from spmd_rl.world.world import World


def run(world: World, output: RankOutput) -> None:
    """Complete every row that the output file lacks."""
    config = world.config
    with world.watchdog.stage("preflight", config.deadlines.start_s):
        folder = resolve(config.model.name)
        preflight.check_disk(config)
        tokenizer = preflight.load_tokenizer(config)
        preflight.check_vocabulary(tokenizer, read_config(folder), config)
        g = config.generate
        table = open_table(g.input, g.split)
        prompts = Prompts(tokenizer, g.prompt, g.chat, g.system, g.messages, g.input)
        check_rows(table, prompts.columns)
        path = Path(g.output) if g.output else Path(config.output_dir) / "generations.jsonl"
        done = _done(path, len(table))
        stops = preflight.stop_tokens(tokenizer, folder)
    if done:
        print(f"{path} holds {done} of {len(table)} rows already: going on behind them")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        writer = _Writer(table, prompts, tokenizer, file, done)
        ask(world, stops, writer.complete, print)
    what = "completed" if writer.written == len(table) else "stopped; start again to go on"
    print(f"{what}: {writer.written} of {len(table)} rows in {path}")


def _done(path: Path, rows: int) -> int:
    """Rows that an output file holds; a torn last line is cut off. DataError for a file of something else."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.splitlines()
    for number, line in enumerate(lines):
        try:
            index = json.loads(line)["index"]
        except (ValueError, KeyError, TypeError):
            index = None
        if index != number or number >= rows:
            raise DataError(
                f"{path}, line {number + 1}, is not row {number} of these {rows} rows: the file belongs to something "
                "else; move it away, or set generate.output to another one"
            )
    if len(whole) < len(data):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return len(lines)


@dataclass
class _Writer:
    """Completes rows, many at once, and writes them in order."""

    table: Table
    prompts: Prompts
    tokenizer: Any
    file: IO[bytes]
    written: int

    async def complete(self, services: Services, steering: Steering) -> None:
        """All rows from `written` on, or until somebody asks for the end."""
        config = services.config.generate
        running: dict[int, asyncio.Task[dict[str, Any]]] = {}
        rows: Iterator[int] = iter(range(self.written, len(self.table)))
        at_once = max(1, config.at_once // config.samples)
        while not steering.stopping:
            for row in itertools.islice(rows, at_once - len(running)):
                running[row] = asyncio.create_task(self._row(services, row))
            if not running:
                return
            await asyncio.wait([running[self.written]], timeout=1.0)  # and look up, whether to go on
            while self.written in running and running[self.written].done():
                self._write(running.pop(self.written).result())
        for task in running.values():
            task.cancel()

    async def _row(self, services: Services, number: int) -> dict[str, Any]:
        where, sampling = self.table.where(number), services.config.orchestrator.sampling
        tokens = self.prompts.ids(self.table[number], where)

        async def sample(place: int) -> dict[str, Any]:
            policy = services.policy(
                sampling,
                group=number,
                rollout=number * services.config.generate.samples + place,
                seed=seed_of(services.config.seed, "generate", number, place),
            )
            async with policy.attempt():
                try:
                    generation = await policy.generate(tokens, sampling)
                except PromptTooLong as error:
                    return {"text": None, "stop_reason": "too_long", "error": f"{where}: {error}"}
            ids = generation.tokens.tolist()
            text = self.tokenizer.decode(ids[:-1] if generation.stop_reason == "stop" else ids)
            return {"text": text, "tokens": len(ids), "stop_reason": generation.stop_reason}

        completions = await asyncio.gather(*map(sample, range(services.config.generate.samples)))
        services.router.forget_group(number)
        return {"index": number, "row": self.table[number], "completions": list(completions)}

    def _write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") + b"\n"
        with explain_full_disk(Path(self.file.name).parent):
            self.file.write(line)
            self.file.flush()
        self.written += 1
