"""Configs of prime-rl become ours: every key of its guides, what values mean, and what is said about the rest."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config import Config, ConfigError, check, load
from spmd_rl.config.prime_rl import ROOT, Converted, convert, read_files, read_table
from spmd_rl.config.prime_rl.convert import FREE, ROWS
from spmd_rl.config.prime_rl.earlier import RENAMED, renamed
from spmd_rl.config.prime_rl.keys import SECTION, Key
from spmd_rl.config.prime_rl.reference import tables
from spmd_rl.config.schema import known_kinds
from spmd_rl.config.show import table_to_toml
from spmd_rl.orchestrator.window import Window

FILES = Path(__file__).parent / "prime_rl"
DOCS = Path(__file__).parents[2] / "docs" / "migrating.md"
PARTS = {part: [FILES / f"part_{part}.toml"] for part in ("trainer", "orchestrator", "inference")}
WHOLE = sorted(path.stem for path in FILES.glob("*.toml") if not path.stem.startswith(("part", "sft")))

# Every key in a block of TOML of prime-rl's guides to scaling, inference and Slurm, and of those to memory and
# deployment that its versions up to 0.5 had; tables of any keys without them.
GUIDES = (FILES / "guides.txt").read_text(encoding="utf-8").split()


def of_file(name: str) -> Converted:
    if name == "parts":
        return convert(read_files(ROOT, parts=PARTS))
    if name.startswith("part_inference"):
        return convert(read_files(ROOT, parts={"inference": [FILES / f"{name}.toml"]}))
    if name.startswith("sft"):
        return convert(read_files(ROOT, sft=[FILES / f"{name}.toml"]))
    return convert(read_files(ROOT, [FILES / f"{name}.toml"]))


def of_text(text: str) -> Converted:
    return convert(read_table(ROOT, tomllib.loads(text)))


def keys_of(converted: Converted, kind: str) -> set[str]:
    return {note.key for note in converted.notes if note.kind == kind}


def paths_in(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of tables and values, `*` for places in arrays of tables."""
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from paths_in(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for inner in value:
            yield from paths_in(inner, f"{path}.*") if isinstance(inner, dict) else ()


@pytest.mark.parametrize("name", [*WHOLE, "parts", "part_inference_05", "sft"])
def test_a_file_becomes_one_that_our_loader_reads_and_checks(name: str, tmp_path: Path) -> None:
    converted = of_file(name)
    path = tmp_path / "ours.toml"
    path.write_text(table_to_toml(converted.table))
    config = load(["--config", str(path)])
    check(config, converted.command)
    assert config == converted.config
    path.write_text(table_to_toml(converted.overlay))
    load(["--config", str(path)])


def test_the_files_here_have_every_key_of_the_guides() -> None:
    here = {found for path in FILES.glob("*.toml") for found in paths_in(tomllib.loads(path.read_text()))}
    assert sorted(set(GUIDES) - here) == []


def test_batch_lag_and_ranks_mean_the_same() -> None:
    config = of_file("several_nodes").config
    o, d = config.orchestrator, config.deployment
    assert (o.batch_size, o.group_size, o.batch_unit) == (256, 16, "rollouts")
    assert (o.max_lag, o.max_off_policy_steps) == (2, 4)  # the window's bound at max_lag 2 is 3
    assert (d.train_ranks, d.infer_ranks, config.inference.tp) == (8, 12, 2)
    assert (config.slurm.nodes, config.slurm.gpus, config.slurm.partition) == (5, 4, "gpu")
    assert config.slurm.pre_run.splitlines()[:2] == ["export HF_HUB_OFFLINE=1", "export NOTE='two words'"]
    assert config.slurm.pre_run.endswith("module load cuda")
    assert config.output_dir == "/scratch/runs/sums"
    assert (config.ckpt.interval, config.ckpt.keep, config.ckpt.keep_every) == (40, 3, 200)
    assert (config.log.wandb, config.log.wandb_project) == (True, "sums")
    assert config.inference.vllm == {"max_num_seqs": 96}
    assert config.deadlines.collective_s == 5400


def test_tasks_sampling_and_losses_mean_the_same() -> None:
    config = of_file("tasks").config
    o = config.orchestrator
    sums, duel = o.source
    assert (sums.env, sums.name, sums.ratio) == ("verifiers:sums", "sums", 3)
    assert sums.args["options"] == {"split": "train", "digits": 3}
    assert sums.args["agents"]["agent"] == {
        "max_turns": 4,
        "harness": {"id": "null"},
        "runtime": {"type": "subprocess"},
    }
    assert sums.args["renderer"] == {"name": "template", "tool_parser": "hermes"}
    assert (sums.curriculum, sums.pool.hard, sums.pool.easy) == ("difficulty_pool", 0.2, 0.7)
    assert (sums.pool.hard_share, sums.pool.easy_share) == (0.25, 0.25)
    assert (duel.env, duel.algorithm, duel.args["env_options"]) == (
        "verifiers:duel",
        "per_agent",
        {"max_concurrent_agents": 2},
    )
    assert set(duel.args["agents"]) == {"white", "black"}
    assert (o.sampling.temperature, o.sampling.max_tokens) == (0.8, 1024)
    assert (o.eval.tasks, o.eval.samples, o.eval.interval, o.eval.greedy) == (48, 2, 15, False)
    assert (o.eval.temperature, o.eval.top_p, o.eval.top_k, o.eval.max_tokens) == (0.6, 0.9, 40, 2048)
    assert (o.algorithm.type, o.algorithm.observation_weight) == ("echo", 0.2)
    assert o.algorithm.zero_variance == "refill"
    assert (o.algorithm.correction.ipo, o.algorithm.correction.ratio_cap) == (0.25, 0)
    assert (config.trainer.optim.lr, config.trainer.optim.max_norm, config.trainer.optim.betas) == (
        3e-6,
        0,
        (0.9, 0.999),
    )
    assert (config.trainer.scheduler.type, config.trainer.scheduler.warmup_steps) == ("cosine", 20)
    assert (config.model.name, config.model.tokenizer) == ("some-lab/dense-1b", "some-lab/words")


def test_what_prime_rl_does_where_nothing_is_said_is_written_out() -> None:
    config = of_text("max_steps = 10").config
    o = config.orchestrator
    assert (config.model.name, config.trainer.model.dtype) == ("Qwen/Qwen3-0.6B", "bfloat16")
    assert (config.trainer.optim.lr, config.trainer.optim.betas) == (1e-6, (0.9, 0.999))
    assert (o.batch_size, o.group_size, o.max_off_policy_steps, o.sampling.max_tokens) == (128, 1, 8, 2047)
    assert (o.algorithm.correction.dppo_tv, o.algorithm.correction.ipo, o.algorithm.correction.ratio_cap) == (0.2, 0, 0)
    assert (o.algorithm.zero_variance, o.eval.tasks) == ("keep", 0)
    overlay = of_text("[trainer.optim]\nlr = 2e-6").overlay
    assert overlay == {"trainer": {"optim": {"lr": 2e-6}}}


def test_names_of_earlier_versions_are_read() -> None:
    converted = of_file("version_05")
    config, o = converted.config, converted.config.orchestrator
    assert (o.max_lag, o.max_off_policy_steps, o.group_size, o.sampling.max_tokens) == (2, 6, 16, 512)
    assert [(source.env, source.ratio) for source in o.source] == [
        ("verifiers:owner/sums@0.1.0", 0.75),
        ("verifiers:products", 0.25),
    ]
    assert (config.deployment.train_ranks, config.deployment.infer_ranks, config.inference.tp) == (2, 4, 2)
    assert config.inference.vllm == {
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": True,
        "enforce_eager": True,
    }
    c = o.algorithm.correction
    assert (c.icepop_low, c.icepop_high, c.geometric_low, c.geometric_high) == (0.2, 5, 0.5, 2)
    assert (c.sequence_cap, c.ipo, c.dppo_tv) == (8, 0, -1)
    assert o.algorithm.zero_variance == "refill"
    assert "ckpt.resume_step" in keys_of(converted, "never")  # as the file has it, not as it is called now


def test_a_supervised_run() -> None:
    converted = of_file("sft")
    config = converted.config
    assert converted.command == "sft"
    assert (config.data.name, config.data.split, config.data.batch_size, config.seq_len) == (
        "some-lab/chats",
        "sums",
        32,
        4096,
    )
    assert (config.max_steps, config.trainer.optim.lr, config.ckpt.interval) == (500, 2e-5, 100)
    assert (config.slurm.nodes, config.slurm.gpus, config.output_dir) == (2, 4, "/scratch/runs/tuned")
    assert {"model.ac", "model.ac_offloading", "model.lora"} <= keys_of(converted, "later")


def test_parts_are_one_config() -> None:
    config = of_file("parts").config
    assert (config.model.name, config.trainer.model.impl, config.trainer.optim.lr) == ("some-lab/dense-1b", "hf", 5e-6)
    assert (config.inference.tp, config.deployment.infer_ranks) == (2, 6)
    assert (config.orchestrator.batch_size, config.log.wandb_project) == (32, "parts")
    assert of_file("part_inference_05").config.deployment.infer_ranks == 24


def test_what_is_not_built_yet_is_named_with_a_way_out() -> None:
    converted = of_file("parallel")
    assert "trainer.model.ep_comm_backend" not in keys_of(converted, "later")
    parallel = converted.config.trainer.parallel
    assert (parallel.cp, parallel.cp_style, parallel.dp_replicate) == (2, "ulysses", 2)
    assert all(note.why and note.instead for note in converted.losses if note.kind != "by hand")
    quiet = of_text("max_steps = 1\n[trainer.model]\nep = 1\ncp = 1\ndp_replicate = 1\nac = 'None'\ncompile = 'None'")
    assert keys_of(quiet, "later") == set()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[trainer.optim]\nlearning_rate = 1e-5", ["trainer.optim.learning_rate is no key", "trainer.optim.lr"]),
        ("[[orchestrator.train.source]]\nrato = 2", ["orchestrator.train.source.0.rato", ".ratio"]),
        ("[vllm]\ntensor_parallel_size = 2", ["vllm is no key", "inference.vllm"]),
        ("[trainer.model]\nep = 'many'", ["trainer.model.ep = \"many\"", "an integer"]),
        ("[orchestrator.train]\nsource = 3", ["orchestrator.train.source = 3", "an array of tables"]),
        ("[trainer]\noptim = 3", ["trainer.optim = 3", "a table"]),
        ("[model]\nname = 'a'\n[trainer.model]\nname = 'b'", ["model.name", "trainer.model.name", "one value"]),
        ("[orchestrator]\nbatch_size = 10\ngroup_size = 4", ["orchestrator.batch_size", "from orchestrator"]),
        ("[orchestrator.sampling]\ntemperature = 0", ["orchestrator.sampling.temperature = 0", "greedy"]),
        ("[orchestrator]\nbatch_size = 8\ntoken_batch_size = 900", ["token_batch_size", "one of them"]),
        ("[orchestrator]\nrollouts_per_example = 2\ngroup_size = 4", ["orchestrator.rollouts_per_example"]),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_the_way_out(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        of_text(text)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def test_a_file_of_another_kind_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text("[optim]\nlr = 1e-5\n[data]\nname = 'rows'\n")
    with pytest.raises(ConfigError, match="pass it as --sft FILE"):
        read_files(ROOT, [path])


@settings(deadline=None)
@given(batch=st.integers(1, 64), group=st.integers(1, 16), most=st.integers(0, 40), flying=st.integers(1, 4096))
def test_nothing_older_than_their_bound_is_trained(batch: int, group: int, most: int, flying: int) -> None:
    text = f"[orchestrator]\nbatch_size = {batch * group}\ngroup_size = {group}\nmax_off_policy_steps = {most}\n"
    o = of_text(f"{text}concurrency = {{ max_inflight = {max(flying, group)} }}").config.orchestrator
    bound = Window(o.groups_per_batch, o.max_lag, o.window_fraction, o.order).bound
    assert bound is not None and bound <= most
    assert (o.max_lag == 0) == (most == 0)


def test_in_flight_without_a_limit_the_bound_alone_decides() -> None:
    text = "[orchestrator]\nbatch_size = 512\ngroup_size = 8\n[orchestrator.concurrency]\nmax_inflight = "
    assert of_text(f"{text}'None'").config.orchestrator.max_lag == 5
    assert of_text(f"{text}1024").config.orchestrator.max_lag == 2


def test_a_teacher_that_samples_needs_ranks_and_nodes() -> None:
    converted = of_text(
        "[slurm]\n[deployment]\ntype = 'multi_node'\nnum_train_nodes = 1\nnum_infer_nodes = 1\ngpus_per_node = 4\n"
        "[inference.vllm]\ntensor_parallel_size = 2\n[orchestrator.algo]\ntype = 'sft'\n"
        "[orchestrator.algo.sampling.source]\nname = 'some-lab/large'\nbase_url = 'http://there/v1'\n"
    )
    assert converted.config.orchestrator.algorithm.reference == "some-lab/large"
    assert (converted.config.deployment.teacher_ranks, converted.config.slurm.nodes) == (2, 3)
    assert "deployment.infer_ranks" in keys_of(converted, "by hand")


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
leaf = st.one_of(words, st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False, allow_infinity=False))
inner = st.recursive(leaf, lambda part: st.lists(part, max_size=3) | st.dictionaries(words, part, max_size=3))


@given(table=st.dictionaries(words, inner, max_size=4))
def test_what_is_written_is_read_back(table: dict[str, Any]) -> None:
    assert tomllib.loads(table_to_toml(table)) == table


def values(row: Key) -> st.SearchStrategy[Any]:
    """Values that a row takes."""
    options: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(0, 4096),
        float: st.floats(0, 2, allow_subnormal=False),
        str: st.sampled_from(["word", "mine.thing", "/folder/file", ""]),
        bool: st.booleans(),
        list: st.lists(st.sampled_from(["word", 3]), max_size=3),
        dict: st.dictionaries(
            st.sampled_from(["id", "name", "type", "taskset"]), st.sampled_from(["x", 2, {"id": "y"}])
        ),
        object: st.sampled_from(["word", 3, True]),
        None: st.just("None"),
        SECTION: st.just({}),
    }
    return st.one_of([options[kind] if kind in options else st.just(kind) for kind in row.kinds])


@st.composite
def subsets(draw: st.DrawFn) -> dict[str, Any]:
    """Tables of a few known keys."""
    table: dict[str, Any] = {}
    rows = draw(st.lists(st.sampled_from(ROWS), max_size=14))
    for row in rows:
        value = draw(values(row))
        put(table, row.path.replace("**", "max_num_seqs").split("."), value)
    return table


def put(node: Any, parts: list[str], value: Any) -> None:
    """Set it, unless something else stands in the way."""
    name, rest = parts[0], parts[1:]
    if isinstance(node, list):
        node += [{}] if not node else []
        return put(node[0], rest, value)
    if not rest:
        if not (isinstance(node.get(name), dict | list) and value != "None"):
            node[name] = value
        return None
    inner = node.setdefault(name, [] if rest[0] == "*" else {})
    return put(inner, rest, value) if isinstance(inner, dict | list) else None


@settings(deadline=None, max_examples=150)
@given(table=subsets(), supervised=st.booleans())
def test_known_keys_convert_or_are_named(table: dict[str, Any], supervised: bool) -> None:
    paths = {row.path.replace("**", "max_num_seqs") for row in ROWS}
    given_paths = [path.replace("*", "0") for path in paths_in(table) if path in paths]
    try:
        converted = convert(read_table(ROOT, deepcopy(table), "sft" if supervised else "rl"))
    except ConfigError as error:
        shown = [path.removeprefix("sft.").removeprefix("trainer.") if supervised else path for path in given_paths]
        for problem in error.problems:
            assert any(path in problem for path in shown), problem
        return
    assert isinstance(converted.config, Config)
    check(converted.config, converted.command)
    assert tomllib.loads(table_to_toml(converted.table)) == plain(converted.table)


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


@given(table=subsets())
def test_todays_names_stay_as_they_are(table: dict[str, Any]) -> None:
    before = deepcopy(table)
    moved, problems = renamed(table)
    assert (moved, problems) == ({}, [])
    assert table == before


def test_the_rows_fit_our_tree() -> None:
    known = known_kinds()
    wrong = [row.path for row in ROWS if row.fate == "converted" and not row.ruled and not row.ours.startswith(FREE)]
    assert [path for path in wrong if next(row.ours for row in ROWS if row.path == path) not in known] == []
    built = [row.ours for row in ROWS if row.fate == "later" and row.ours in known]
    assert built == [], "these keys exist now: convert them"
    olds, paths = [old for old, _ in RENAMED], {row.path for row in ROWS}
    assert [old for old in olds if old in paths] == []


def test_the_page_shows_the_table() -> None:
    assert tables() in DOCS.read_text(encoding="utf-8"), "run tools/convert_config.py prime-rl --table"


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("convert_config", DOCS.parents[1] / "tools" / "convert_config.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool_writes_lists_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, ours = tool().main, tmp_path / "ours.toml"
    assert run(["prime-rl", str(FILES / "memory.toml"), "--strict", "--output", str(ours)]) == 1
    assert not ours.exists()
    capsys.readouterr()
    assert run(["prime-rl", str(FILES / "memory.toml"), "--output", str(ours)]) == 0
    told = capsys.readouterr().err
    assert "not yet: the run does without:\n" in told and "trainer.model.ac:" in told and "trainer.model.lora:" in told
    assert load(["--config", str(ours)]).trainer.model.lm_head_chunk == 2048
    assert run(["prime-rl", str(FILES / "own_loss.toml"), "--output", str(ours)]) == 0
    assert "to be set by hand:\n" in (told := capsys.readouterr().err) and "'mine.losses' does not import" in told
    (tmp_path / "wrong.toml").write_text("[trainer.modle]\nep = 2\n")
    assert run(["prime-rl", str(tmp_path / "wrong.toml"), "--output", str(tmp_path / "none.toml")]) == 2
    assert "trainer.modle is no key of prime-rl; did you mean trainer.model" in capsys.readouterr().err
    assert not (tmp_path / "none.toml").exists()


def test_the_tool_is_quiet_about_what_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rl.toml"
    path.write_text(
        "max_steps = 5\n[trainer.loss]\nkl_tau = 0\n[orchestrator]\ngroup_size = 8\n"
        "[[orchestrator.train.source]]\nenv = { taskset = { id = 'sums' } }\n"
    )
    assert tool().main(["prime-rl", str(path), "--strict", "--overlay"]) == 0
    written = capsys.readouterr()
    assert written.err == ""
    assert 'env = "verifiers:sums"' in written.out and "group_size = 8" in written.out
