"""Rows of files, and what is said of files that are not what they should be."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_rl.data import tables
from spmd_rl.data.tables import DataError, open_beside, open_table

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
ROWS = [{"question": "1+1", "answer": 2}, {"question": "ü\n2", "answer": 4}, {"question": "", "answer": 0}]


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), min_size=1, max_size=6),
    between=st.sampled_from(["\n", "\n\n", "\n \t\r\n", "\r\n "]),
    block=st.sampled_from([1, 7, 2**24]),
)
def test_json_lines_come_back_as_they_were_written(tmp_path, monkeypatch, rows, between, block):
    monkeypatch.setattr(tables, "BLOCK", block)
    text = between.join(json.dumps(row, ensure_ascii=False) for row in rows) + between
    table = open_table(write_bytes(tmp_path / "rows.jsonl", text))
    assert [table[i] for i in range(len(table))] == rows
    assert table.columns == tuple(rows[0])
    step = between.count("\n")
    assert [table.where(i) for i in range(len(table))] == [
        f"{table.name}, line {1 + step * i}" for i in range(len(table))
    ]


def write_bytes(path: Path, text: str) -> str:
    """As it stands: write_text would turn line ends into the platform's."""
    path.write_bytes(text.encode())
    return str(path)


def parquet(folder: Path, *parts: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    for i, rows in enumerate(parts):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"part-{i}.parquet")
    return folder


def test_parquet_files_are_one_table_in_the_order_of_their_names(tmp_path):
    folder = parquet(tmp_path / "rows", ROWS[:2], ROWS[2:])
    for name in (str(folder), str(folder / "*.parquet")):
        table = open_table(name)
        assert [table[i] for i in range(len(table))] == ROWS
        assert table.columns == ("question", "answer")
    assert len(open_table(str(folder / "part-1.parquet"))) == 1
    assert table.where(2) == f"{table.name}, row 2"


def test_what_json_has_no_word_for_comes_as_text(tmp_path):
    day = datetime.datetime(2020, 1, 2, 3)
    table = open_table(str(parquet(tmp_path / "rows", [{"when": day, "raw": b"ab", "many": [{"at": day}], "n": None}])))
    text = "2020-01-02 03:00:00"
    assert (
        json.loads(json.dumps(table[0])) == table[0] == {"when": text, "raw": "YWI=", "many": [{"at": text}], "n": None}
    )


def test_what_is_evaluated_on_is_another_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"a": 1}')
    Path("other.jsonl").write_text('{"a": 2}')
    parquet(Path("held"), ROWS)
    assert open_beside("other.jsonl", "rows.jsonl")[0] == {"a": 2}
    assert open_beside("held", "rows.jsonl")[0] == ROWS[0]
    for split in ("validation", "train"):  # a file's split would be the file itself
        with pytest.raises(DataError, match="is no dataset, and files have no splits"):
            open_beside(split, "rows.jsonl")
    for other, name in (("./rows.jsonl", "rows.jsonl"), ("train", "owner/name"), ("owner/name", "owner/name")):
        with pytest.raises(DataError, match="would be trained on and evaluated on"):
            open_beside(other, name)
    asked = []
    monkeypatch.setattr(tables, "_from_hub", lambda *name: asked.append(name) or ["held/part-0.parquet"])
    Path("test").mkdir()  # a folder here does not hide a split there
    assert open_beside("test", "owner/name")[0] == ROWS[0] == open_beside("owner/other", "rows.jsonl")[0]
    assert asked == [("owner/name", "test"), ("owner/other", "train")]


BAD = {
    "no file": ("missing.jsonl", None, r"missing.jsonl' does not exist \(looked in"),
    "empty": ("empty.jsonl", "", "empty.jsonl' is empty$"),
    "blank": ("blank.jsonl", "\n \n", "is empty: it has no line"),
    "not JSON": ("a.jsonl", '{"a": 1}\n\n{"a": \n', "a.jsonl, line 3: not valid JSON"),
    "an array": ("a.json", "[\n{}]", r"a.json, line 1: not valid JSON.*\(every line is one object\)"),
    "not an object": ("a.jsonl", '{"a": 1}\n[1]\n', "a.jsonl, line 2: a list, where every line must be an object"),
    "no Parquet": ("a.parquet", None, "no Parquet file there"),
    "damaged Parquet": ("a.parquet", "PAR1", "can't be read as Parquet"),
    "nothing of all": ("tasks", None, "is neither"),
    "no name": ("", None, "no dataset is named"),
}


@pytest.mark.parametrize(("name", "text", "message"), BAD.values(), ids=BAD)
def test_bad_data(tmp_path, name, text, message):
    path = str(tmp_path / name) if name and name != "tasks" else name
    if text is not None:
        write(Path(path), text)
    with pytest.raises(DataError, match=message):
        table = open_table(path)
        [table[i] for i in range(len(table))]


def test_a_hub_id_that_can_not_be_had_says_so(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(DataError, match=r"'owner/name' is no file here, and the Hub gives none: no connection\. Name"):
        open_table("owner/name")


def test_a_hub_dataset_is_read_from_its_parquet_conversion(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def download(repository, **options):
        asked.append((repository, options["revision"], options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "main").mkdir()
    parquet(tmp_path / "main/test", ROWS)
    assert open_table("owner/name:main", "test")[1] == ROWS[1]
    assert asked == [("owner/name", "refs/convert/parquet", ["main/test/*.parquet"])]
    (tmp_path / "other").mkdir()
    parquet(tmp_path / "other/test", ROWS)
    with pytest.raises(DataError, match=r"several configs: name one of owner/name:\{main, other\}"):
        open_table("owner/name", "test")
    with pytest.raises(DataError, match="has no split 'valid'"):
        open_table("owner/name", "valid")
