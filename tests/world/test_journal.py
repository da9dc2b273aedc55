"""What was appended is read back; a torn tail is cut off, any other damage is an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.world.journal import MAGIC, Journal, JournalError, read
from spmd_rl.world.messages import Cancel, Event, Refused

ONE = st.one_of(st.integers(-9, 9**9), st.text(max_size=20), st.lists(st.integers(0, 9), max_size=5))
RECORDS = st.lists(ONE, max_size=12)


def written(path: Path, records: list) -> list[int]:
    """Write a journal; where each record ends."""
    journal = Journal(path)
    ends = []
    for record in records:
        journal.append(record)
        ends.append(journal.offset)
    journal.close()
    return ends


@settings(max_examples=50, deadline=None)
@given(records=RECORDS, more=RECORDS)
def test_what_was_appended_is_read_back_also_by_a_second_writer(tmp_path_factory, records, more):
    path = tmp_path_factory.mktemp("j") / "journal"
    ends = written(path, records)
    ends += written(path, more)
    found = list(read(path))
    assert [record for _, record in found] == records + more
    assert [end for end, _ in found] == ends


@settings(max_examples=100, deadline=None)
@given(records=RECORDS.filter(bool), data=st.data())
def test_a_torn_tail_is_cut_off_and_writing_goes_on_behind_it(tmp_path_factory, records, data):
    path = tmp_path_factory.mktemp("j") / "journal"
    ends = [len(MAGIC), *written(path, records)]
    size = data.draw(st.integers(0, ends[-1]))
    zeros = data.draw(st.integers(0, 40))
    with open(path, "r+b") as file:
        file.truncate(size)
        if size in ends:
            file.truncate(size + zeros)  # room that a file system had made
    whole = max(0, sum(end <= size for end in ends) - 1)
    assert [record for _, record in read(path)] == records[:whole]
    written(path, ["new"])
    assert [record for _, record in read(path)] == [*records[:whole], "new"]


@settings(max_examples=150, deadline=None)
@given(records=RECORDS.filter(lambda r: len(r) > 1), data=st.data())
def test_a_flipped_bit_before_the_last_record_is_an_error_that_names_its_place(tmp_path_factory, records, data):
    path = tmp_path_factory.mktemp("j") / "journal"
    ends = written(path, records)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, ends[-2] - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(JournalError, match=r"damaged at byte|is no journal"):
        list(read(path))
    with pytest.raises(JournalError):
        Journal(path)


@settings(max_examples=60, deadline=None)
@given(records=RECORDS.filter(bool), data=st.data())
def test_a_last_record_that_is_whole_and_wrong_is_cut_off_and_kept(tmp_path_factory, records, data):
    """A flipped bit, or zeros in the place of all of it: from the outside they are one thing."""
    path = tmp_path_factory.mktemp("j") / "journal"
    start = [len(MAGIC), *written(path, records)][-2]
    content = bytearray(path.read_bytes())
    payload = start + 16
    if data.draw(st.booleans()) and any(content[payload:]):
        content[payload:] = bytes(len(content) - payload)
    else:
        content[data.draw(st.integers(payload, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    assert [record for _, record in read(path)] == records[:-1]
    journal = Journal(path)
    assert journal.torn == path.with_suffix(".torn") and journal.torn.read_bytes() == content[start:]
    journal.append("new")
    journal.close()
    assert [record for _, record in read(path)] == [*records[:-1], "new"]
    assert Journal(path).torn is None


@pytest.mark.parametrize("end", [-1, None])
def test_of_a_record_that_is_not_whole_and_of_what_is_cut_on_purpose_no_copy_is_kept(tmp_path, end):
    path = tmp_path / "journal"
    ends = written(path, ["a", "b", "cc"])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content[:end])
    journal = Journal(path) if end else Journal(path, keep=ends[1])
    assert journal.torn is None and journal.offset == ends[1]
    assert not path.with_suffix(".torn").exists()


def test_a_record_that_is_missing_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "journal"
    ends = written(path, ["a", "b", "c"])
    content = path.read_bytes()
    path.write_bytes(content[: ends[0]] + content[ends[1] :])
    with pytest.raises(JournalError, match=r"record 2 .* where record 1 belongs"):
        list(read(path))


def test_what_follows_a_checkpoint_is_cut_off(tmp_path):
    path = tmp_path / "journal"
    ends = written(path, ["a", "b", "c"])
    Journal(path, keep=ends[1]).close()
    assert [record for _, record in read(path)] == ["a", "b"]
    with pytest.raises(JournalError, match="not the end of a record"):
        Journal(path, keep=ends[0] + 1)


def test_what_is_known_is_not_read_again(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append("a")
    known = journal.position
    journal.append("b")
    journal.close()
    content = path.read_bytes()
    path.write_bytes(content[:10] + b"?" + content[11:])  # which nobody sees who begins behind it
    again = Journal(path, known=known)
    assert again.position == (len(content), 2)
    again.append("c")
    again.close()
    assert [record for _, record in read(path, start=known[0])] == ["b", "c"]
    path.write_bytes(content[: known[0] - 1])
    with pytest.raises(JournalError, match=r"ends before byte .*, where its checkpoint was taken"):
        Journal(path, known=known)


def test_reading_from_the_middle(tmp_path):
    ends = written(tmp_path / "journal", ["a", "b", "c"])
    assert [record for _, record in read(tmp_path / "journal", start=ends[0])] == ["b", "c"]


def test_records_are_checked_against_their_type(tmp_path):
    path = tmp_path / "journal"
    written(path, [Refused(3, "no")])
    assert [record for _, record in read(path, Event)] == [Refused(3, "no")]
    with pytest.raises(JournalError, match="not understood"):
        list(read(path, Cancel))


def test_arrays_travel(tmp_path):
    written(tmp_path / "journal", [{"tokens": np.arange(5, dtype=np.int32)}])
    ((_, record),) = read(tmp_path / "journal")
    assert record["tokens"].tolist() == [0, 1, 2, 3, 4] and record["tokens"].dtype == np.int32


def test_a_foreign_file_is_named(tmp_path):
    (tmp_path / "journal").write_text("hello there")
    with pytest.raises(JournalError, match="is no journal"):
        Journal(tmp_path / "journal")
