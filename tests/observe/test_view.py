"""The page as a file: which episodes are in it, how they are kept, and which runs can't be shown."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_runs import WrittenRun

from spmd_rl.observe.view import Chosen, write_page
from spmd_rl.observe.view_lines import ViewError, embeddable, read_file

NASTY = "</script><script>alert(1)</script><!-- \u2028\u2029 \x00 \r\n \ud83d é 😀 {{script}} \\u003c"


@pytest.fixture
def run(tmp_path) -> WrittenRun:
    return WrittenRun(tmp_path / "run")


def embedded(page: bytes) -> tuple[dict, list[dict]]:
    """What the page holds: about the run, and episode by episode."""
    parts = re.findall(rb'<script type="application/json" id="\w+">(.*?)</script>', page, re.DOTALL)
    return json.loads(parts[0]), [json.loads(line) for line in parts[1].split(b"\n")]


def shown(run: WrittenRun, *args, **more) -> tuple[dict, list[dict]]:
    write_page(run.folder, run.folder / "view.html", *args, **more)
    return embedded((run.folder / "view.html").read_bytes())


def test_columns_come_back_as_they_were_written(run):
    parts = [(0, ["q", "é"]), (1, ["a", "😀"]), (0, ["tool"]), (1, ["b"])]
    one = run.sample(parts, logprobs=[-0.1234, 0, -2], versions=[3, 3, 4], advantages=-0.5, agent="white", reward=0.25)
    run.write(5, run.episode(one, reward=0.75, task=7, data={"word": "é"}))
    about, (body,) = shown(run)
    facts = about["facts"]
    assert (facts["step"], facts["task"], facts["reward"]) == ([5], [7], [0.75])
    assert (facts["sampled"], facts["given"]) == ([3], [3])
    assert (facts["turns"], facts["oldest"], facts["newest"], facts["advantage"]) == ([2], [3], [4], [-0.5])
    assert (about["name"], about["advantage"], body["data"]) == ("run", 0.5, {"word": "é"})
    (sample,) = body["samples"]
    assert sample["text"] == "qéa😀toolb" and sample["lengths"] == [1, 1, 1, 2, 4, 1]  # as the browser counts
    assert sample["mask"] == [2, 2, 1, 1] and sample["versions"] == [3, 2, 4, 1]
    assert sample["logprobs"] == [1234, 0, 20000]
    assert (sample["advantages"], sample["agent"], sample["reward"]) == (-0.5, "white", 0.25)


def test_advantages_by_token_are_those_of_sampled_tokens(run):
    one = run.sample([(0, ["q"]), (1, ["a", "b", "c"])], advantages=np.array([9, 1, 1, -1], np.float32))
    run.write(1, run.episode(one))
    assert shown(run)[1][0]["samples"][0]["advantages"] == [1, 2, -1, 1]


def test_episodes_of_evaluations_come_first_in_their_step_and_samples_stay_together(run):
    two = run.episode(run.sample([(1, ["a"])]), run.sample([(1, ["b"])]), task=3)
    run.write(2, two, run.one(task=4), kind="train")
    run.write(2, run.one(task=9), kind="eval")
    run.write(1, run.one(task=5))
    about, bodies = shown(run)
    facts = about["facts"]
    assert facts["task"] == [5, 9, 3, 4]
    assert [facts["kinds"][kind] for kind in facts["kind"]] == ["train", "eval", "train", "train"]
    assert [len(body["samples"]) for body in bodies] == [1, 1, 2, 1]
    assert facts["number"] == [0, 0, 0, 1]


def test_no_text_leaves_its_place_in_the_page(run):
    nasty = run.one(text=NASTY, prompt=NASTY, source=NASTY, data={NASTY: NASTY})
    run.write(1, nasty, run.episode(reward=NASTY, status="failed"))
    _, (body, failed) = shown(run)
    page = (run.folder / "view.html").read_bytes()
    assert page.count(b"<script") == page.count(b"</script>") == 3
    assert body["samples"][0]["text"] == NASTY + NASTY and body["data"] == {NASTY: NASTY}
    assert failed["error"] == NASTY


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_embedded_json_is_one_harmless_line(value):
    line = embeddable(value)
    assert not re.search(rb"[<\n\r]|\xe2\x80[\xa8\xa9]", line)
    assert json.loads(line) == value


def test_lines_of_older_runs_show_their_text(run):
    row = {"step": 3, "source": "reverse", "task": 6, "reward": float("nan"), "reward_parts": {}, "status": "ok"}
    row |= {"seconds": 0.1, "sample": 0, "prompt": "abc:", "completion": "cba", "prompt_tokens": 4, "sampled_tokens": 3}
    row |= {"version_min": 2, "version_max": 2, "advantage": 0.5}
    (run.folder / "rollouts").mkdir()
    (run.folder / "rollouts/step_000003.jsonl").write_text(json.dumps(row) + "\n")
    about, (body,) = shown(run)
    assert about["facts"]["reward"] == [None] and about["facts"]["given"] == [4]
    (sample,) = body["samples"]
    assert (sample["text"], sample["lengths"], sample["mask"]) == ("abc:cba", [4, 3], [1, 1])
    assert (sample["versions"], sample["advantages"], sample["whole"]) == ([2, 1], 0.5, 3)


def test_the_curve_is_the_one_of_the_metrics(run):
    run.write(1, run.one())
    run.metrics(
        {"phase": "warmup", "step": 1, "loss": 2.0},
        {"phase": "eval", "step": 0, "eval/greedy": 0.1, "eval/reward": 0.05},
        {"phase": "rl", "step": 1, "reward/mean": 0.25},
        {"phase": "rl", "step": 2, "reward/mean": None},
    )
    assert shown(run)[0]["curve"] == {"train": [[1, 0.25]], "greedy": [[0, 0.1]], "sampled": [[0, 0.05]]}


def test_steps_can_be_chosen(run):
    for step in range(1, 6):
        run.write(step, run.one())
    assert shown(run, (2, 3))[0]["facts"]["step"] == [2, 3]
    with pytest.raises(ViewError, match="no rollouts of these steps; it has 5 from 1 to 5"):
        shown(run, (7, 9))


@given(st.lists(st.lists(st.integers(1, 4000), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(0, 60_000))
@settings(deadline=None)
def test_a_page_has_at_most_the_bytes_it_may_have_and_says_what_is_missing(tmp_path_factory, lengths, spare):
    run = WrittenRun(tmp_path_factory.mktemp("run"))
    for step, texts in enumerate(lengths):
        run.write(step, *(run.one("é" * length) for length in texts))
    out = run.folder / "view.html"
    whole = write_page(run.folder, out)
    assert len(whole.shown) == sum(map(len, lengths)) and not whole.left_out and whole.size == out.stat().st_size
    limit = max(90_000, whole.size - 25_000) + spare  # from none to all of them
    try:
        page = write_page(run.folder, out, max_bytes=limit)
    except ViewError as error:
        page = Chosen(left_out=int(re.search(r"not one of (\d+) episodes", str(error))[1]))
    assert page.size <= limit
    assert len(page.shown) + page.left_out == len(whole.shown)


def test_what_does_not_fit_is_left_out_of_every_step_alike(run):
    for step in range(1, 5):
        run.write(step, *(run.one("x" * 1000, task=task) for task in range(50)))
    run.write(5, run.one("y" * 5_000_000))
    size = write_page(run.folder, run.folder / "view.html").size
    page = write_page(run.folder, run.folder / "view.html", max_bytes=(size - 5_000_000) * 3 // 4)
    kept = [sum(shown.facts["step"] == step for shown in page.shown) for step in range(1, 6)]
    assert kept[4] == 0 and min(kept[:4]) > 10 and max(kept[:4]) - min(kept[:4]) <= 2
    assert page.left_out == 201 - sum(kept)
    about, _ = embedded((run.folder / "view.html").read_bytes())
    assert about["leftOut"] == page.left_out


def test_a_run_that_is_still_writing_can_be_shown(run):
    path = run.write(1, run.one(task=1), run.one("é", task=2))
    written = path.read_bytes()
    second = written.index(b"\n") + 1
    for end in range(second, len(written) - 2):  # also in the middle of a character
        path.write_bytes(written[:end])
        assert [episode.facts["task"] for episode in read_file(path, "train", 1)] == [1]


def broken(**changes) -> bytes:
    row = {"step": 1, "source": "s", "task": 1, "reward": 1, "status": "ok", "seconds": 1, "sample": 0, "prompt": "a"}
    row |= {"completion": "b", "prompt_tokens": 1, "sampled_tokens": 1, "version_min": 0, "version_max": 0}
    row |= {"advantage": None, "pieces": ["a", "b"], "mask": [0, 1], "logprobs": [0, -1], "versions": [-1, 0]}
    row |= {"advantages": None, "agent": "", "sample_reward": None, "temperature": 1} | changes
    return json.dumps({name: value for name, value in row.items() if value is not ...}).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{\n", "JSONDecodeError"),
        (b"[1]\n", "no 'sample'"),
        (b"7\n", "TypeError"),
        (b"\xff\n", "UnicodeDecodeError"),
        (b"[" * 5000 + b"\n", "RecursionError"),
        (broken(task=...), "no 'task'"),
        (broken(mask=...), "'mask'"),
        (broken(mask=[0]), "mask has 1 entries for 2 pieces"),
        (broken(pieces=[1, 2]), "TypeError"),
        (broken(logprobs=["a", "b"]), "TypeError"),
    ],
)
def test_a_broken_line_is_named(run, line, says):
    path = run.write(3, run.one())
    path.write_bytes(path.read_bytes() + line + broken())
    with pytest.raises(ViewError, match=r"step_000003.jsonl, line 2 is broken .*take the line out") as caught:
        list(read_file(path, "train", 3))
    assert says in str(caught.value)


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(ViewError, match=r"there is no folder .*nowhere"):
        write_page(tmp_path / "nowhere", tmp_path / "view.html")
    with pytest.raises(ViewError, match=r"has no rollouts/step_\*.jsonl"):
        write_page(tmp_path, tmp_path / "view.html")
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/step_000001.jsonl").touch()
    with pytest.raises(ViewError, match=r"are empty: log\.rollouts_per_step = 0"):
        write_page(tmp_path, tmp_path / "view.html")
    assert not (tmp_path / "view.html").exists()


def test_broken_metrics_are_named(run):
    run.write(1, run.one())
    (run.folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ViewError, match=r"metrics.jsonl is broken .*phase.*move it away"):
        shown(run)
