"""From argv to a Config: layers, flags, and an error that helps for everything that is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spmd_rl.config import Config, ConfigError, load, split_argv
from spmd_rl.config.load import merge
from spmd_rl.config.tree import SourceConfig


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], str]:
    """Writes text to a new file and returns its name."""
    count = iter(range(100))

    def write(text: str) -> str:
        path = tmp_path / f"{next(count)}.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_nothing_given_is_the_default():
    assert load([]) == Config()


def test_tables_merge_lists_replace_and_the_later_layer_wins(toml):
    low = toml(
        """
        max_steps = 5
        trainer.optim = { lr = 1e-3, betas = [0.5, 0.6] }
        [inference.vllm]
        block_size = 32
        compilation_config = { level = 1, mode = "a" }
        [[orchestrator.source]]
        env = "a"
        [[orchestrator.source]]
        env = "b"
        """
    )
    high = toml(
        """
        seed = 7
        trainer.optim.betas = [0.8, 0.9]
        inference.vllm.compilation_config.level = 2
        [[orchestrator.source]]
        env = "c"
        args = { length = 4 }
        """
    )
    config = load(["--config", low, "--config", high])
    assert (config.max_steps, config.seed) == (5, 7)
    assert config.trainer.optim.lr == 1e-3 and config.trainer.optim.betas == (0.8, 0.9)
    assert config.inference.vllm == {"block_size": 32, "compilation_config": {"level": 2, "mode": "a"}}
    assert config.orchestrator.source == (SourceConfig("c", {"length": 4}),)
    assert load(["--config", high, "--config", low]).trainer.optim.betas == (0.5, 0.6)


def test_merge_leaves_its_arguments_alone():
    low, high = {"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}
    assert merge(low, high) == {"a": {"b": 3, "c": 2}}
    assert (low, high) == ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})


def test_flags_win_over_files(toml):
    path = toml("max_steps = 5\nseq_len = 64")
    config = load(["--max-steps", "9", "--config", path])
    assert (config.max_steps, config.seq_len) == (9, 64)


@pytest.mark.parametrize("spelling", [["--config", "{}"], ["--config={}"], ["@", "{}"], ["@{}"]])
def test_every_spelling_of_a_file(toml, spelling):
    path = toml("max_steps = 5")
    assert load([word.format(path) for word in spelling]).max_steps == 5


@pytest.mark.parametrize(
    ("flags", "read", "value"),
    [
        (["--orchestrator.batch-size", "32"], lambda c: c.orchestrator.batch_size, 32),
        (["--orchestrator.batch_size", "32"], lambda c: c.orchestrator.batch_size, 32),
        (["--orchestrator.batch-size=32"], lambda c: c.orchestrator.batch_size, 32),
        (["--trainer.optim.lr", "1e-4"], lambda c: c.trainer.optim.lr, 1e-4),
        (["--trainer.optim.lr", "1"], lambda c: c.trainer.optim.lr, 1.0),
        (["--trainer.optim.betas", "0.1", "0.2"], lambda c: c.trainer.optim.betas, (0.1, 0.2)),
        (["--trainer.model.dtype", "bfloat16"], lambda c: c.trainer.model.dtype, "bfloat16"),
        (["--log.wandb"], lambda c: c.log.wandb, True),
        (["--log.no-tensorboard"], lambda c: c.log.tensorboard, False),
        (["--orchestrator.source.0.ratio", "2"], lambda c: c.orchestrator.source[0].ratio, 2.0),
        (["--orchestrator.source.0.args.length", "4"], lambda c: c.orchestrator.source[0].args, {"length": 4}),
        (["--inference.vllm.max-num-seqs", "8"], lambda c: c.inference.vllm, {"max_num_seqs": 8}),
        (["--inference.vllm.block_size=32"], lambda c: c.inference.vllm, {"block_size": 32}),
        (["--inference.vllm.enforce-eager", "true"], lambda c: c.inference.vllm, {"enforce_eager": True}),
        (["--inference.vllm.watermark", "-0.5"], lambda c: c.inference.vllm, {"watermark": -0.5}),
        (["--inference.vllm.load_format", "dummy"], lambda c: c.inference.vllm, {"load_format": "dummy"}),
        (["--inference.vllm.hf_token", '"4"'], lambda c: c.inference.vllm, {"hf_token": "4"}),
        (["--inference.vllm.sizes", "[1, 2]"], lambda c: c.inference.vllm, {"sizes": [1, 2]}),
        (["--inference.vllm.a.b-c", "1"], lambda c: c.inference.vllm, {"a": {"b_c": 1}}),
    ],
)
def test_flags(flags, read, value):
    got = read(load(flags))
    assert got == value and type(got) is type(value)


def test_flags_reach_into_free_tables_of_files(toml):
    path = toml(
        """
        inference.vllm = { block_size = 32, max_num_seqs = 4 }
        [[orchestrator.source]]
        env = "a"
        [[orchestrator.source]]
        env = "b"
        args = { x = 1, "not a flag" = [{ y = 2 }] }
        """
    )
    flags = [
        "--orchestrator.source.1.args.x",
        "5",
        "--orchestrator.source.1.env",
        "c",
        "--inference.vllm.block_size",
        "64",
    ]
    config = load(["@", path, *flags])
    assert config.inference.vllm == {"block_size": 64, "max_num_seqs": 4}
    assert config.orchestrator.source == (
        SourceConfig("a"),
        SourceConfig("c", {"x": 5, "not a flag": [{"y": 2}]}),
    )


def test_split_argv():
    got = split_argv(["--seed", "1", "@", "a.toml", "--dry-run", "--config=b.toml", "--log.wandb", "@c.toml"])
    assert got.toml_paths == (Path("a.toml"), Path("b.toml"), Path("c.toml"))
    assert got.dry_run and got.flags == ("--seed", "1", "--log.wandb")
    assert not split_argv(["--seed", "1"]).dry_run


BAD_FILES = {
    "unknown key beside a similar one": (
        "[orchestrator]\nbatch_sise = 3",
        ["orchestrator.batch_sise", "orchestrator.batch_size or orchestrator.batch_unit?"],
    ),
    "name that lives elsewhere": (
        "lr = 3",
        ["unknown key lr", "did you mean trainer.optim.lr or warmup.optim.lr or"],
    ),
    "nearest place first": ("[warmup]\nlr = 3", ["unknown key warmup.lr", "did you mean warmup.optim.lr or"]),
    "unknown table": ("[trainr.optim]\nlr = 1", ["unknown key trainr", "did you mean trainer?"]),
    "nothing similar": ("[model]\nzzzzzz = 1", ["unknown key model.zzzzzz", "known here: name, tokenizer"]),
    "string for a float": ('trainer.optim.lr = "fast"', ['trainer.optim.lr = "fast": expected float, got str']),
    "bool for an int": ("max_steps = true", ["max_steps = true: expected int, got bool"]),
    "bool for a float": ("trainer.optim.lr = true", ["trainer.optim.lr = true: expected float, got bool"]),
    "float for an int": ("max_steps = 1.0", ["max_steps = 1.0: expected int, got float"]),
    "int for a bool": ("log.wandb = 1", ["log.wandb = 1: expected bool, got int"]),
    "int for a string": ("model.name = 1", ["model.name = 1: expected str, got int"]),
    "choices": ('trainer.model.dtype = "fp8"', ["trainer.model.dtype", "fp8", '"float32", "bfloat16"']),
    "short tuple": (
        "trainer.optim.betas = [0.9]",
        ["trainer.optim.betas = [0.9]", "a list of 2 floats, got a list of 1"],
    ),
    "wrong tuple item": ('trainer.optim.betas = [0.9, "x"]', ["trainer.optim.betas.1", "expected float, got str"]),
    "value for a table": ("trainer = 3", ["trainer = 3: expected a table ([trainer]), got int"]),
    "table for a value": ("[max_steps]\na = 1", ["max_steps", "expected int, got a table"]),
    "value for a free table": (
        "inference.vllm = 3",
        ["inference.vllm = 3: expected a table ([inference.vllm]), got int"],
    ),
    "table for an array of tables": (
        '[orchestrator.source]\nenv = "a"',
        ["expected an array of tables ([[orchestrator.source]]), got a table"],
    ),
    "inside an array of tables": (
        "[[orchestrator.source]]\n[[orchestrator.source]]\nenvv = 1",
        ["unknown key orchestrator.source.1.envv", "orchestrator.source.1.env?"],
    ),
    "nan": ("trainer.optim.lr = nan", ["trainer.optim.lr = NaN: expected float, got float that is not finite"]),
    "inf": ("deadlines.step_s = -inf", ["deadlines.step_s", "not finite"]),
    "integer beyond floats": ("trainer.optim.lr = 1" + "0" * 400, ["trainer.optim.lr", "int that is not finite"]),
    "nan in a free table": ("inference.vllm.a = [1.0, nan]", ["inference.vllm.a.1 = NaN", "not finite"]),
    "date in a free table": ("inference.vllm.a = 2020-01-01", ["inference.vllm.a", "got date"]),
    "malformed": ("seed = 1\nmax_steps =\n", ["not valid TOML", "line 2"]),
    "malformed at the end": ('seed = 1\nmodel.name = "x', ["not valid TOML", "line 2"]),
    "same key twice": ("seed = 1\nseed = 2", ["not valid TOML", "line 2"]),
}


@pytest.mark.parametrize(("text", "says"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files(toml, text, says):
    good, bad = toml("seed = 1"), toml(text)
    with pytest.raises(ConfigError) as error:
        load(["@", good, "@", bad])
    for part in [f"{bad}: ", *says]:
        assert part in str(error.value)


def test_a_bad_layer_is_named_even_when_a_later_one_hides_it(toml):
    bad, good = toml('seed = "x"'), toml("seed = 1")
    with pytest.raises(ConfigError, match="seed") as error:
        load(["@", bad, "@", good])
    assert error.value.origin == bad


def test_all_problems_of_a_file_are_reported_together(toml):
    with pytest.raises(ConfigError) as error:
        load(["@", toml('lr = 1\nmax_steps = "x"\n[log]\nwandbb = true')])
    assert len(error.value.problems) == 3
    assert str(error.value).count("\n") == 3 and "3 problems" in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: no such file"):
        load(["@", str(tmp_path / "absent.toml")])
    with pytest.raises(ConfigError, match=f"{tmp_path.name}: cannot be read: Is a directory"):
        load(["@", str(tmp_path)])
    (tmp_path / "latin1.toml").write_bytes(b'model.name = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin1\.toml: .*not UTF-8 at byte 14"):
        load(["@", str(tmp_path / "latin1.toml")])


BAD_FLAGS = [
    (
        "--orchestrator.batch-siz 3",
        [
            "unknown flag --orchestrator.batch-siz",
            "did you mean --orchestrator.batch_size or",
        ],
    ),
    ("--lr 3", ["unknown flag --lr", "did you mean --trainer.optim.lr or"]),
    ("--trainr.optim.lr 3", ["unknown flag --trainr.optim.lr", "--trainer.optim.lr"]),
    ("--seed 1 --no-such --neither 2", ["2 problems", "--no-such", "--neither"]),
    ("--orchestrator.source.1.env x", ["unknown flag", "did you mean --orchestrator.source.0.env?"]),
    ("--orchestrator.source.1.args.x 1", ["unknown flag --orchestrator.source.1.args.x"]),
    ("--log.no-progress", ["unknown flag --log.no-progress", "--log.progress"]),
    ("--max-steps 1.5", ["--max-steps", "1.5"]),
    ("--max-steps", ["--max-steps", "Missing value"]),
    ("--trainer.optim.lr fast", ["--trainer.optim.lr", "float", "fast"]),
    ("--trainer.optim.lr nan", ["trainer.optim.lr", "not finite"]),
    ("--inference.vllm.x inf", ["inference.vllm.x", "not finite"]),
    ("--trainer.model.dtype fp8", ["--trainer.model.dtype", "fp8", "float32", "bfloat16"]),
    ("--trainer.optim.betas 0.9", ["--trainer.optim.betas", "2 values"]),
    ("--trainer.optim 3", ["--trainer.optim is a table", "--trainer.optim.KEY VALUE"]),
    ("--orchestrator.source 3", ["--orchestrator.source is a table"]),
    ("--inference.vllm 3", ["--inference.vllm is a table", "--inference.vllm.KEY VALUE"]),
    ("--inference.vllm.x", ["--inference.vllm.x needs a value"]),
    ("--inference.vllm.x --seed 1", ["--inference.vllm.x needs a value"]),
    ("--inference.vllm.x 1 --inference.vllm.x.y 1", ["inference.vllm.x is a value, not a table"]),
    ("--log.wandb true", ["--log.wandb is a switch", "--log.wandb turns it on, --log.no_wandb turns it off"]),
    ("--log.no-wandb=true", ["--log.no-wandb is a switch", "--log.wandb turns it on, --log.no_wandb turns it off"]),
    ("stray", ["stray"]),
    ("--config", ["--config needs a TOML file"]),
    ("@ --seed 1", ["@ needs a TOML file"]),
]


@pytest.mark.parametrize(("line", "says"), BAD_FLAGS, ids=[line for line, _ in BAD_FLAGS])
def test_bad_flags(line, says, capfd):
    with pytest.raises(ConfigError) as error:
        load(line.split())
    for part in ["command line: ", *says]:
        assert part in str(error.value)
    assert "╭" not in str(error.value) and "\n\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_a_complaint_of_tyro_on_a_terminal_has_no_colours(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    with pytest.raises(ConfigError) as error:
        load(["--max-steps", "many"])
    assert "\x1b" not in str(error.value) and str(error.value).startswith("command line: Error parsing --max-steps")


def test_help_shows_the_values_of_the_files(toml, capsys):
    with pytest.raises(SystemExit) as stop:
        load(["@", toml("max_steps = 4321"), "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "default: 4321" in out and "--inference.vllm.KEY" in out


def test_no_torch_is_imported():
    code = "import sys, spmd_rl.config as c; c.load(['--seed', '1']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
