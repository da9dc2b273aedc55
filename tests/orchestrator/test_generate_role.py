"""Batch inference: every row once and in order, whatever finishes first, and again from where it ended."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import GenerateConfig
from spmd_rl.data.tables import DataError, open_table
from spmd_rl.envs.prompts import Prompts
from spmd_rl.orchestrator.generate_role import _done, _Writer
from tests.orchestrator.fake_cluster import Delays
from tests.orchestrator.fake_run import make_config, prepare
from tests.orchestrator.virtual_time import run


class Words:
    """Letters are tokens."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"q": f"row {i}"}) + "\n" for i in range(7)))
    return open_table(str(path))


def complete(table, written: int = 0, stop_after_s: float = 0.0, samples: int = 2, at_once: int = 4, seed: int = 0):
    """(records that were written, the cluster)."""
    file = io.BytesIO()
    file.name = "out/generations.jsonl"

    async def main():
        config = replace(make_config(), generate=GenerateConfig(samples=samples, at_once=at_once))
        made = await prepare(config, replicas=2, delays=Delays(seed=seed))
        steering = SimpleNamespace(stopping=False)
        if stop_after_s:
            asyncio.get_running_loop().call_later(stop_after_s, lambda: setattr(steering, "stopping", True))
        writer = _Writer(table, Prompts(Words(), "{q}"), Words(), file, written)
        await writer.complete(made.services, steering)
        await asyncio.sleep(1)
        depth = made.services.router.depth
        await made.cluster.close()
        return depth

    assert run(main()) == [0, 0]
    return [json.loads(line) for line in file.getvalue().splitlines()]


@settings(max_examples=25, deadline=None)
@given(samples=st.integers(1, 3), at_once=st.integers(1, 9), seed=st.integers(0, 99), written=st.integers(0, 7))
def test_every_row_is_written_once_and_in_order(table, samples, at_once, seed, written) -> None:
    records = complete(table, written, samples=samples, at_once=at_once, seed=seed)
    assert [record["index"] for record in records] == list(range(written, 7))
    assert all(record["row"] == {"q": f"row {record['index']}"} for record in records)
    assert all(len(record["completions"]) == samples for record in records)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), stop=st.floats(0.1, 8.0))
def test_what_is_written_before_the_end_is_a_beginning(table, seed, stop) -> None:
    records = complete(table, stop_after_s=stop, seed=seed)
    assert [record["index"] for record in records] == list(range(len(records)))


def test_an_output_file_is_gone_on_with_behind_its_last_whole_row(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert _done(path, 5) == 0
    path.write_bytes(b'{"index": 0}\n{"index": 1}\n{"ind')
    assert _done(path, 5) == 2
    assert path.read_bytes() == b'{"index": 0}\n{"index": 1}\n'


@pytest.mark.parametrize("text", ['{"index": 1}\n', "[]\n", "junk\n", '{"index": 0}\n{"index": 1}\n{"index": 2}\n'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"out.jsonl, line \d, is not row \d of these 2 rows"):
        _done(path, 2)
    assert path.read_text() == text
