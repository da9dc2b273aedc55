"""The resolved config as TOML and as a hash."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config import Config, ConfigError, config_hash, load, to_toml, write_toml
from spmd_rl.config.tree import InferenceConfig, OptimConfig, OrchestratorConfig, SourceConfig, TrainerConfig

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
FREE_VALUES = st.recursive(
    st.booleans() | st.integers() | FLOATS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that a declared type allows; for the root, any config."""
    if is_dataclass(kind):
        return st.builds(kind, **{name: values_of(inner) for name, inner in get_type_hints(kind).items()})
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis:
        return st.lists(values_of(get_args(kind)[0]), max_size=3).map(tuple)
    if get_origin(kind) is tuple:
        return st.tuples(*map(values_of, get_args(kind)))
    if get_origin(kind) is dict:
        return st.dictionaries(st.text(max_size=5), FREE_VALUES, max_size=3)
    return {int: st.integers(), float: FLOATS, str: st.text(max_size=8), bool: st.booleans()}[kind]


@settings(max_examples=60, deadline=None)
@given(values_of(Config))
def test_round_trip_of_any_config(config):
    with tempfile.TemporaryDirectory() as folder:
        write_toml(config, Path(folder) / "config.toml")
        again = load(["--config", str(Path(folder) / "config.toml")])
    assert again == config
    assert config_hash(again) == config_hash(config)
    assert to_toml(again) == to_toml(config)


def test_every_default_is_written():
    table = tomllib.loads(to_toml(Config()))
    assert table["deadlines"]["collective_s"] == 7200.0
    (source,) = table["orchestrator"]["source"]
    assert source["env"] == "reverse" and source["args"] == {} and set(source) == set(get_type_hints(SourceConfig))
    assert set(table) == set(get_type_hints(Config))


def test_hard_strings():
    config = Config(output_dir="\x00\x7f\x1f\"\\\r\n\t'é🦊", inference=InferenceConfig(vllm={"a.b": {"": 1, "[x]": 2}}))
    assert tomllib.loads(to_toml(config))["output_dir"] == config.output_dir
    assert tomllib.loads(to_toml(config))["inference"]["vllm"] == {"a.b": {"": 1, "[x]": 2}}


def test_the_sign_of_zero_survives():
    config = Config(trainer=TrainerConfig(optim=OptimConfig(lr=-0.0)))
    assert math.copysign(1, tomllib.loads(to_toml(config))["trainer"]["optim"]["lr"]) == -1


def test_integers_in_float_fields_read_and_hash_as_floats():
    whole, real = (Config(trainer=TrainerConfig(optim=OptimConfig(lr=lr))) for lr in (1, 1.0))
    assert to_toml(whole) == to_toml(real) and config_hash(whole) == config_hash(real)


def test_what_toml_cannot_hold_is_refused():
    for value in (None, math.nan, object(), {1: 2}):
        config = Config(inference=InferenceConfig(vllm={"x": value}))
        with pytest.raises(ConfigError, match=r"inference\.vllm\.x"):
            to_toml(config)


def test_hash_depends_on_every_part_but_not_on_the_order_of_keys():
    def with_args(**args: Any) -> Config:
        return Config(orchestrator=OrchestratorConfig(source=(SourceConfig(args=args),)))

    assert config_hash(with_args(a=1, b=2)) == config_hash(with_args(b=2, a=1))
    different = [
        Config(),
        replace(Config(), seed=1),
        with_args(a=1),
        with_args(a=1.5),
        with_args(a="1"),
        with_args(a=True),
    ]
    assert len({config_hash(config) for config in different}) == len(different)


def test_hash_is_the_same_in_another_process():
    code = (
        "from spmd_rl.config import *; print(config_hash(load(['--seed', '3', '--inference.vllm.block_size', '32'])))"
    )
    root = Path(__file__).parents[2]
    other = subprocess.run([sys.executable, "-c", code], cwd=root, env={"PYTHONHASHSEED": "1"}, capture_output=True)
    config = Config(seed=3, inference=InferenceConfig(vllm={"block_size": 32}))
    assert other.stdout.decode().strip() == config_hash(config) and len(config_hash(config)) == 64
