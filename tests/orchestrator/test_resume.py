"""A free-running run that dies at any moment and is taken up again: nothing is lost, nothing is trained on twice.

The whole orchestrator with its journal and its checkpoints, against a fake cluster in virtual time. A life of the run
ends when its time is over: whatever happens then, the process is gone. The next life finds what is on the disk.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import CkptConfig, Config
from spmd_rl.orchestrator.past import JOURNAL, find_past, open_journal
from spmd_rl.orchestrator.records import Admitted, AnyRecord, Closed, Rolled, Took
from spmd_rl.orchestrator.window import Window
from spmd_rl.world.checkpoints import CheckpointError, complete
from spmd_rl.world.journal import JournalError, read
from tests.orchestrator.fake_cluster import Delays
from tests.orchestrator.fake_run import PROMPT, FakeEnvironment, Run, make_config, prepare
from tests.orchestrator.virtual_time import run


@dataclass
class Story:
    """All lives of one run."""

    config: Config
    lives: list[Run] = field(default_factory=list)
    pasts: list = field(default_factory=list)

    @property
    def records(self) -> list:
        """What the journal says in the end."""
        return [record for _, record in read(Path(self.config.output_dir) / JOURNAL, AnyRecord)]


def live(story: Story, seconds: float, seed: int, **options) -> bool:
    """One life, at most so long; True when the run came to its end."""
    config = story.config
    try:
        past = find_past(config, "latest")
    except CheckpointError:
        past = None  # it died before its first checkpoint: begin anew
    journal = open_journal(config, past)

    async def main() -> bool:
        delays = Delays(seed=seed, train=1.0)
        made = await prepare(config, [FakeEnvironment(2)], delays=delays, journal=journal, past=past, **options)
        story.lives.append(made)
        story.pasts.append(past)
        whole = asyncio.create_task(made.loop.run())
        done, _ = await asyncio.wait({whole}, timeout=seconds)
        if not done:
            journal.append = lambda record: None  # the dead write nothing
            whole.cancel()
            await asyncio.wait({whole})
        await made.cluster.close()
        if done:
            whole.result()
        return bool(done)

    try:
        return run(main())
    finally:
        journal.close()


def tasks_of(documents) -> list[int]:
    return sorted(int(document[0]) - PROMPT for document in documents)


@settings(max_examples=40, deadline=None)
@given(
    deaths=st.lists(st.floats(0.5, 25), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
    max_lag=st.integers(0, 3),
    order=st.sampled_from(["fifo", "window", "completion"]),
    interval=st.integers(1, 4),
    layouts=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2)), min_size=5, max_size=5),
)
def test_whatever_dies_when_nothing_is_lost_or_trained_twice_and_the_bound_holds(
    tmp_path_factory, deaths, seed, max_lag, order, interval, layouts
):
    config = make_config(groups=3, max_steps=7, max_lag=max_lag, order=order, window_fraction=0.5)
    folder = tmp_path_factory.mktemp("story")
    story = Story(replace(config, output_dir=str(folder), ckpt=CkptConfig(interval=interval)))
    for life, seconds in enumerate([*deaths, 1e9]):
        replicas, trainers = layouts[life]
        if live(story, seconds, seed + life, replicas=replicas, trainers=trainers):
            break
    check(story)


def check(story: Story) -> None:
    config, records = story.config, story.records
    o = config.orchestrator
    taken = {record.step: record.groups for record in records if isinstance(record, Took)}
    assert len(taken) == sum(isinstance(record, Took) for record in records), "a step has one batch"
    assert sorted(taken) == list(range(1, config.max_steps + 1))
    consumed = Counter(group for groups in taken.values() for group in groups)
    assert set(consumed.values()) == {1}, "no group is trained on twice"
    admitted = {record.group: record for record in records if isinstance(record, Admitted)}
    assert sorted(admitted) == list(range(len(admitted))), "no admission is lost"
    assert len({(record.source, record.index) for record in admitted.values()}) == len(admitted), "no task comes twice"
    rolled = Counter((record.group, record.sample) for record in records if isinstance(record, Rolled))
    assert set(rolled.values()) == {1}, "no rollout ends twice"
    finished = {record.group for record in records if isinstance(record, Closed)}
    assert set(consumed) <= finished and set(admitted) - set(consumed) == set(), "none is lost"
    bound = Window(o.groups_per_batch, o.max_lag, o.window_fraction, o.order).bound
    lags = [step - 1 - admitted[group].version for step, groups in taken.items() for group in groups]
    assert min(lags) >= 0 and (bound is None or max(lags) <= bound)
    check_training(story, taken, admitted)


def check_training(story: Story, taken, admitted) -> None:
    """The weights at the end came from every batch once: each life trains on what follows its checkpoint."""
    lineage: dict[int, list] = {}
    for made, past in zip(story.lives, story.pasts, strict=True):
        first = past.step if past else 0
        lineage = {step: documents for step, documents in lineage.items() if step <= first}
        lineage |= dict(enumerate(made.cluster.trained(), start=first + 1))
    assert sorted(lineage) == sorted(taken)
    for step, documents in lineage.items():
        members = sorted(admitted[group].index for group in taken[step] for _ in range(2))
        assert tasks_of(documents) == members, "trained on what the journal says"


def test_steps_behind_the_checkpoint_are_taken_again_on_the_same_tokens(tmp_path):
    config = make_config(groups=2, max_steps=9, max_lag=1)
    story = Story(replace(config, output_dir=str(tmp_path), ckpt=CkptConfig(interval=4)))
    assert not live(story, 11.0, seed=3)
    assert live(story, 1e9, seed=4)
    first, second = (made.cluster.trained() for made in story.lives)
    step = story.pasts[1].step
    (resumed,) = story.lives[1].report.resumed
    assert resumed == (step, resumed[1]) and resumed[1] > step, "some batch was taken behind the checkpoint"
    for before, again in zip(first[step:], second, strict=False):
        assert sorted(d.tolist() for d in before) == sorted(d.tolist() for d in again)
    check(story)


def test_a_run_is_not_taken_up_with_other_settings(tmp_path):
    config = make_config(groups=2, max_steps=9)
    story = Story(replace(config, output_dir=str(tmp_path), ckpt=CkptConfig(interval=2)))
    assert not live(story, 9.0, seed=0)
    other = replace(story.config, seed=5, model=replace(config.model, name="another"))
    with pytest.raises(CheckpointError, match=r"belongs to another run.*model.name: '' then, 'another' now; seed: 0 "):
        find_past(other, "latest")
    algorithm = replace(config.orchestrator.algorithm, type="gspo")
    other = replace(story.config, orchestrator=replace(config.orchestrator, algorithm=algorithm))
    with pytest.raises(CheckpointError, match=r"orchestrator.algorithm: type: 'grpo' then, 'gspo' now"):
        find_past(other, "latest")
    past = find_past(replace(story.config, trainer=replace(config.trainer, threads=2)), "latest")
    with pytest.raises(CheckpointError, match="nothing is left; raise it"):
        find_past(replace(story.config, max_steps=past.step), "latest")


def test_damage_is_found_before_anything_is_changed(tmp_path):
    story = Story(replace(make_config(max_steps=99), output_dir=str(tmp_path), ckpt=CkptConfig(interval=2)))
    assert not live(story, 30.0, seed=0)
    journal, newest = tmp_path / JOURNAL, complete(tmp_path / "checkpoints")[-1]
    whole = journal.read_bytes()
    at = (len(whole) + find_past(story.config, "latest").snapshot["journal"][0]) // 2
    journal.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    with pytest.raises(JournalError, match="damaged at byte"):
        find_past(story.config, "latest")
    journal.write_bytes(whole)
    snapshot = (newest / "snapshot.bin").read_bytes()
    (newest / "snapshot.bin").write_bytes(snapshot[:-1])
    with pytest.raises(CheckpointError, match=r"snapshot.bin has .* bytes, and should have .* or resume from .*step_0"):
        find_past(story.config, "latest")
    (newest / "snapshot.bin").unlink()
    with pytest.raises(CheckpointError, match=r"snapshot.bin is missing"):
        find_past(story.config, "latest")
    assert journal.read_bytes() == whole


def test_a_last_record_that_does_not_check_out_is_cut_off_said_and_kept(tmp_path, capsys):
    config = replace(make_config(max_steps=99), output_dir=str(tmp_path), ckpt=CkptConfig(interval=2))
    assert not live(Story(config), 30.0, seed=0)
    path = tmp_path / JOURNAL
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    journal = open_journal(config, find_past(config, "latest"))
    assert content.startswith(path.read_bytes()) and journal.torn.read_bytes()[:-1] in content
    journal.close()
    said = capsys.readouterr().out
    assert f"at byte {journal.offset}, did not check out" in said and str(tmp_path / "journal.torn") in said


def test_a_checkpoint_of_another_run_or_command_is_refused(tmp_path):
    story = Story(replace(make_config(max_steps=99), output_dir=str(tmp_path / "a"), ckpt=CkptConfig(interval=2)))
    (tmp_path / "a").mkdir()
    assert not live(story, 9.0, seed=0)
    (checkpoint, *_) = complete(tmp_path / "a/checkpoints")
    with pytest.raises(CheckpointError, match=r"is not in output_dir = .*/b: a run goes on where its journal is"):
        find_past(replace(story.config, output_dir=str(tmp_path / "b")), str(checkpoint))
    state = json.loads((checkpoint / "state.json").read_text())
    text = json.dumps(state | {"command": "sft"})
    (checkpoint / "state.json").write_text(text)
    sizes = json.loads((checkpoint / "files.json").read_text())
    (checkpoint / "files.json").write_text(json.dumps(sizes | {"state.json": len(text)}))
    with pytest.raises(CheckpointError, match=r"was written by main.py sft, and this is rl"):
        find_past(story.config, str(checkpoint))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), deaths=st.lists(st.floats(1.0, 25.0), max_size=3))
def test_the_evaluation_of_the_step_that_serves_is_taken_up(tmp_path_factory, seed, deaths) -> None:
    """One that was under way when the run died is made again, unless training had gone further by then."""
    folder = tmp_path_factory.mktemp("run")
    config = make_config(max_steps=6, eval_tasks=2, eval_interval=2, output_dir=str(folder))
    story = Story(replace(config, ckpt=CkptConfig(interval=1, keep=0)))
    lives = [live(story, seconds, seed + i) for i, seconds in enumerate([*deaths, 1e6])]
    assert lives[-1]
    for made, past in zip(story.lives, story.pasts, strict=True):
        if past is None or made is not story.lives[-1]:
            continue
        resumed_at = made.report.resumed[0][1]
        seen = {step for other in story.lives for step, _, _ in other.report.evaluations}
        assert {step for step in (2, 4, 6) if step >= resumed_at} <= seen
