"""Which folders are checkpoints, which stay, and which are not to be believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spmd_rl.world.checkpoints import (
    STATE,
    CheckpointError,
    complete,
    find,
    folder_of,
    prune,
    read_state,
    seal,
    step_of,
)


def write(output: Path, step: int) -> Path:
    target = folder_of(output, step)
    writing = target.with_suffix(".tmp")
    (writing / "deep").mkdir(parents=True)
    (writing / STATE).write_text(json.dumps({"step": step}))
    (writing / "deep/tensors").write_bytes(b"x" * 100)
    seal(writing, target)
    return target


def steps(output: Path) -> list[int]:
    return [step_of(path) for path in complete(output / "checkpoints")]


@pytest.mark.parametrize(
    ("keep", "every", "stay"),
    [
        (2, 0, [40, 50]),
        (1, 20, [0, 20, 40, 50]),
        (0, 0, [0, 10, 20, 30, 40, 50]),
        (9, 0, [0, 10, 20, 30, 40, 50]),
    ],
)
def test_the_newest_stay_and_every_nth(tmp_path, keep, every, stay):
    for step in range(0, 60, 10):
        write(tmp_path, step)
    prune(tmp_path / "checkpoints", keep, every)
    assert steps(tmp_path) == stay


def test_what_is_still_being_written_is_no_checkpoint(tmp_path):
    write(tmp_path, 3)
    half = folder_of(tmp_path, 4).with_suffix(".tmp")
    half.mkdir()
    (half / STATE).write_text("{}")
    assert steps(tmp_path) == [3]
    assert find("latest", str(tmp_path)) == folder_of(tmp_path, 3)


def test_a_file_that_is_missing_or_cut_off_is_named_with_the_way_out(tmp_path):
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    assert read_state(newer) == {"step": 2}
    (newer / "deep/tensors").write_bytes(b"x" * 99)
    with pytest.raises(CheckpointError, match=rf"deep/tensors has 99 bytes, and should have 100.* resume from {older}"):
        read_state(newer)
    (newer / "deep/tensors").unlink()
    with pytest.raises(CheckpointError, match="deep/tensors is missing"):
        read_state(newer)
    (older / "files.json").unlink()
    with pytest.raises(CheckpointError, match="is no complete checkpoint"):
        find(str(older), str(tmp_path))


def test_a_folder_without_checkpoints_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="holds no complete checkpoint: name one, or start afresh"):
        find("latest", str(tmp_path))
