"""Who shares a folder, what follows from it at start, and models and wishes that travel between hosts."""

from __future__ import annotations

import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore

from spmd_rl.config.tree import AlgorithmConfig, CkptConfig, Config, KLConfig, ModelConfig, OrchestratorConfig
from spmd_rl.world.checkpoints import prune
from spmd_rl.world.hosts import Everyone, Hosts, common_part, folder_problem, lowest_sharer, savers
from spmd_rl.world.launcher import STOP_FILE
from spmd_rl.world.mesh import Mesh
from spmd_rl.world.model_copies import Lacks, files_of, users_of, with_folders
from spmd_rl.world.stop_relay import StopRelay
from tests.distributed.launch import start_ranks

MESH = Mesh(4, (1, 2), ((3,),))  # orchestrator and trainer on a, trainer and engine on b
APART = Hosts(("a", "a", "b", "b"), (0, 0, 2, 2), (0, 0, 2, 2))
SHARED = Hosts(("a", "a", "b", "b"), (0, 0, 2, 2), (0, 0, 0, 0))


# --- who shares what --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
@settings(max_examples=30, deadline=None)
def test_every_rank_finds_the_lowest_token_in_its_folder_and_none_stays(places, data):
    size = len(places)
    tokens = sorted(data.draw(st.sets(st.integers(0, size - 1))))
    store = HashStore()
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(size) as pool:

        def search(rank: int) -> int:
            everyone = Everyone(store, rank, size, 30.0)
            folder = Path(root) / str(places[rank])
            return lowest_sharer(folder, rank, tokens, lambda about: everyone.say(about, None), "x")

        found = list(pool.map(search, range(size)))
        assert [path for path in Path(root).rglob("*") if path.is_file()] == []
    for rank in range(size):
        assert found[rank] == min((t for t in tokens if places[t] == places[rank]), default=rank)


def test_all_ranks_hear_what_all_have_said():
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        said = pool.map(lambda rank: Everyone(store, rank, 3, 30.0).say("x", {"rank": rank}), range(3))
    assert list(said) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_one_host_is_not_searched(tmp_path):
    hosts = Hosts.find(Everyone(HashStore(), 0, 1, 30.0), str(tmp_path / "run"), 0)
    assert hosts.common_folder and not (tmp_path / "run").exists()


def test_hosts_are_described_with_their_ranks():
    assert APART.describe([0, 1, 2]) == "a (ranks 0, 1) and b (rank 2)"
    assert Hosts(("a", "b", "c"), (0, 1, 2), (0, 1, 2)).describe(range(3)) == "a (rank 0), b (rank 1) and c (rank 2)"


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_common_is_a_problem_where_something_is_saved_there():
    saving = Config(output_dir="out", ckpt=CkptConfig(interval=2))
    assert folder_problem(saving, MESH, SHARED, "") == folder_problem(Config(), MESH, APART, "") == ""
    assert folder_problem(saving, Mesh.all_infer(saving, 2), APART, "") == ""
    only_engines_apart = Hosts(("a", "a", "a", "b"), (0, 0, 0, 3), (0, 0, 0, 3))
    assert folder_problem(saving, MESH, only_engines_apart, "") == ""
    text = folder_problem(saving, MESH, APART, "")
    assert text.startswith("ckpt.interval = 2 needs a folder") and "a (ranks 0, 1) and b (rank 2)" in text
    assert "set output_dir to a folder that all of them share" in text and "ckpt.per_node = true" in text
    assert folder_problem(Config(), MESH, APART, "latest").startswith("ckpt.resume = latest needs")


def test_with_parts_rank_0_needs_a_trainer_beside_it():
    parts = Config(ckpt=CkptConfig(interval=2, per_node=True))
    assert folder_problem(parts, MESH, APART, "latest") == ""
    lonely = Hosts(("a", "b", "b", "b"), (0, 1, 1, 1), (0, 1, 1, 1))
    assert "let a trainer rank start on a" in folder_problem(parts, MESH, lonely, "")


names = st.sampled_from([f"step_{step:06d}" for step in range(5)])


@given(st.lists(st.dictionaries(names, st.sampled_from("xy")), min_size=3, max_size=3))
@settings(max_examples=200, deadline=None)
def test_a_run_goes_on_from_the_newest_checkpoint_whose_parts_belong_together(parts):
    hosts = Hosts(("a", "b", "c"), (0, 1, 2), (0, 1, 2))
    whole = [name for name in parts[0] if parts[1].get(name) == parts[2].get(name) == parts[0][name]]
    name, problem = common_part(parts, hosts, (0, 1, 2), "latest")
    assert name == max(whole, default="") and bool(problem) == (not whole)
    for wanted in {name for part in parts for name in part}:
        name, problem = common_part(parts, hosts, (0, 1, 2), f"run/checkpoints/{wanted}")
        assert (name, bool(problem)) == ((wanted, False) if wanted in whole else ("", True))


def test_what_a_run_that_died_was_writing_goes_when_another_checkpoint_is_complete(tmp_path):
    (tmp_path / "step_000002.tmp").mkdir()
    (tmp_path / "step_000004").mkdir()
    prune(tmp_path, keep=0, keep_every=0)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000004"]


def test_missing_parts_are_listed_by_host():
    parts = [{"step_000002": "x"}, {}, {}, {}]
    _, problem = common_part(parts, APART, savers(MESH), "latest")
    assert "a has step_000002; b has none" in problem and "without ckpt.resume" in problem


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_host_that_lacks_the_model_is_named_with_the_key():
    lacks = Lacks.of(APART, [["model.name"], ["model.name"], [], []])
    assert lacks.by_key == {"model.name": (2,)} and lacks.takers("model.name") == (2,)
    text = lacks.problem(Config(model=ModelConfig(name="/m")), MESH)
    assert "'/m' is a folder on a, where rank 0 is, and not on b (ranks 2, 3)" in text
    assert "model.from_rank_0 = true" in text
    assert Lacks.of(APART, [[]] * 4).problem(Config(), MESH) == ""  # a Hub id, or missing on rank 0's host too


def test_one_rank_fetches_for_all_hosts_that_see_one_folder():
    hosts = Hosts(("a", "b", "c", "d"), (0, 1, 2, 3), (0, 1, 1, 0))
    assert Lacks.of(hosts, [["model.name"], [], [], []]).takers("model.name") == (1, 3)


def test_folders_are_asked_for_where_they_are_used():
    frozen = Mesh(4, (1,), ((2,),), ((3,),))
    assert users_of("model.name", Config(), frozen) == {0, 1, 2}
    assert users_of("model.tokenizer", Config(), frozen) == {0}
    assert users_of("model.tokenizer", Config(), Mesh.all_train(2)) == {0, 1}
    name = "orchestrator.algorithm.reference"
    assert users_of(name, Config(), frozen) == {3}
    assert users_of(name, Config(), MESH) == {1, 2}
    penalised = Config(orchestrator=OrchestratorConfig(algorithm=AlgorithmConfig(kl=KLConfig(coef=0.1))))
    assert users_of(name, penalised, frozen) == {1, 3}


def test_only_what_a_model_is_read_for_is_sent(tmp_path):
    for name in ("config.json", "a/x.jinja", "model.safetensors", "pytorch_model.bin", ".cache/x.json", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert files_of(tmp_path) == ["a/x.jinja", "config.json", "model.safetensors"]


def test_only_what_was_fetched_is_read_elsewhere():
    config = Config(model=ModelConfig(name="m", tokenizer="t"))
    assert with_folders(config, {}) == config
    moved = with_folders(config, {"model.name": "x/m", "orchestrator.algorithm.reference": "x/r"})
    assert (moved.model.name, moved.model.tokenizer) == ("x/m", "t")
    assert moved.orchestrator.algorithm.reference == "x/r"


def fetched(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What three ranks made of a model with an empty file, one of several pieces and one in a folder."""
    model = folder / "a/model"
    (model / "more").mkdir(parents=True)
    (model / "empty.txt").touch()
    (model / "model.safetensors").write_bytes(b"\x07" * 4500)
    (model / "more/x.json").write_text("{}")
    with start_ranks("../world/hosts_worker.py", 3, folder, *arguments) as started:
        assert started.wait(120) == [0, 0, 0], started.output()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def test_a_model_arrives_whole_on_every_host(tmp_path):
    said = fetched(tmp_path)
    assert [rank["found"] for rank in said] == [
        str(tmp_path / name) for name in ("a/model", "b/from_rank_0/model.name", "c/from_rank_0/model.name")
    ]
    for rank in said:
        assert rank["beats"] == 6
        found = Path(rank["found"])
        assert files_of(found) == ["empty.txt", "model.safetensors", "more/x.json"]
        assert (found / "model.safetensors").read_bytes() == b"\x07" * 4500
    assert not (tmp_path / "a/from_rank_0").exists()


def test_a_byte_that_was_not_sent_is_found_out(tmp_path):
    said = fetched(tmp_path, "damage")
    assert said[1]["found"].startswith("CopyError: model.safetensors did not arrive")
    assert not (tmp_path / "b/from_rank_0/model.name").exists()


# --- a wish to end ----------------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch):
    """As torchrun serves it."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(served.port))
    return served


def test_a_wish_for_the_end_reaches_rank_0_and_one_of_an_earlier_run_does_not(store, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    began = time.time()
    stop, heard = folders[1] / STOP_FILE, folders[0] / STOP_FILE
    stop.touch()
    os.utime(stop, (began - 60, began - 60))
    relays = [StopRelay(rank, folder, began, 30.0) for rank, folder in enumerate(folders)]
    wait_for(lambda: not stop.exists())
    time.sleep(1.2)  # two looks of the other side
    assert not heard.exists()
    stop.touch()
    wait_for(heard.exists)
    assert not stop.exists()
    for relay in relays:
        relay.close()


def wait_for(what: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)
