"""Findings, reports and what a config asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.config import load
from spmd_rl.doctor import agreement, wishes
from spmd_rl.doctor.cluster import judge_folder
from spmd_rl.doctor.finding import Finding, Line, fail, ok, warn
from spmd_rl.doctor.report import Report, merged
from spmd_rl.doctor.role import parse

texts = st.sampled_from(["a", "b", "c"])
findings = st.one_of(st.builds(ok, texts), st.builds(warn, texts, texts), st.builds(fail, texts, texts))
hosts = st.sampled_from(["h0", "h1", "h2"]).map(lambda host: (host,))
lines = st.lists(st.builds(Line, texts, texts, findings, hosts), max_size=12)


@pytest.mark.parametrize("status", ["warn", "FAIL"])
def test_a_fault_without_a_way_out_can_not_be_said(status: str) -> None:
    with pytest.raises(ValueError, match="what to do"):
        Finding(status, "broken")


@given(lines)
def test_merging_loses_no_fault_and_no_host(found: list[Line]) -> None:
    everywhere = {host for line in found for host in line.hosts}
    one = merged(found)
    for line in found:
        (into,) = (
            other
            for other in one
            if (other.group, other.what, other.finding.status) == (line.group, line.what, line.finding.status)
            and (line.finding.status == "ok" or other.finding == line.finding)
        )
        assert set(line.hosts) <= (set(into.hosts) or everywhere)
    assert len(one) <= len(found)


@given(lines)
def test_the_exit_code_is_that_of_the_lines(found: list[Line]) -> None:
    report = Report(found)
    assert report.exit_code == any(line.finding.status == "FAIL" for line in found)
    assert ("not fit" in report.summary()) == bool(report.exit_code)
    assert len(re.findall(r"^  FAIL ", report.render(), re.MULTILINE)) <= len(found)


def test_a_report_for_people_and_for_machines(tmp_path: Path) -> None:
    report = Report(
        [
            Line("disks", "output folder", ok("100 GB"), ("a",)),
            Line("disks", "output folder", ok("90 GB"), ("b",)),
            Line("machine", "memory", fail("1 GiB", "free some"), ("b",)),
            Line("machine", "memory", ok("9 GiB"), ("a",)),
        ],
        {"GB/s": "  1.0"},
        {"ranks": [1]},
    )
    text = report.render()
    assert "  ok    output folder  100 GB on a, otherwise elsewhere\n" in text
    assert "  FAIL  memory  [b] 1 GiB  → free some\n" in text and "  ok    memory  [a] 9 GiB" in text
    assert text.endswith("GB/s\n  1.0\n\nnot fit: memory (0 warnings)")
    report.write(tmp_path / "report.json")
    table = json.loads((tmp_path / "report.json").read_text())
    assert not table["fit"] and table["ranks"] == [1] and len(table["lines"]) == 4
    assert table["lines"][2] == {
        "group": "machine",
        "what": "memory",
        "hosts": ["b"],
        "status": "FAIL",
        "value": "1 GiB",
        "to_do": "free some",
    }


def test_the_doctors_own_words_are_split_off() -> None:
    asked = parse(["--config", "a.toml", "--json=x.json", "--for", "sft", "--seed", "1"])
    assert (asked.command, asked.json, asked.words) == ("sft", "x.json", ("--config", "a.toml", "--seed", "1"))
    assert parse([]).words == ()


def test_what_a_config_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        """
        output_dir = "out"
        model.name = "some/model"
        trainer.model = { attn = "flash_attention_2", dtype = "bfloat16" }
        log.wandb = true
        inference.threads = 3
        [[orchestrator.source]]
        env = "verifiers:gsm8k"
        [[orchestrator.source]]
        env = "python"
        [[orchestrator.source]]
        env = "gym:gymnasium:FrozenLake-v1"
        """
    )
    asked = wishes.wishes_of("rl", load(["--config", str(path)]))
    assert (asked.output_dir, asked.model, asked.threads, asked.engine) == ("out", "some/model", 3, True)
    assert asked.back_ends == {
        "flash-attn": "trainer.model.attn",
        "wandb": "log.wandb",
        "verifiers": "orchestrator.source.0.env",
        "bubblewrap": "orchestrator.source.1",
        "gymnasium": "orchestrator.source.2.env",
    }
    assert not wishes.wishes_of("sft", load(["--config", str(path)])).engine


def test_reading_a_config() -> None:
    assert wishes.read("rl", [], 0).lines == ()
    good = wishes.read("rl", ["--model.name", "some/model"], 3)
    assert [line.finding.status for line in good.lines] == ["ok", "ok"] and good.mesh is not None
    small = wishes.read("rl", ["--model.name", "some/model"], 1)
    assert [line.finding.status for line in small.lines] == ["ok", "FAIL"] and small.mesh is None
    for words, says in ((["--sead", "1"], "--seed"), (["--config", "gone.toml"], "no such file"), ([" "], "")):
        bad = wishes.read("rl", words, 3)
        assert bad.config is None and bad.lines[0].finding.status == "FAIL" and says in bad.lines[0].finding.value


def test_facts_that_differ_name_who_holds_what() -> None:
    facts = [{"code": "aa", "kernel": "6.1"}, {"code": "aa", "kernel": "6.2"}, {"code": "bb", "kernel": "6.1"}]
    equal, *different = agreement.compare(facts, ["r0", "r1", "r2"])
    assert equal.finding.value == "nothing"
    assert {line.what: line.finding.status for line in different} == {"code": "FAIL", "kernel": "warn"}
    assert different[0].finding.value == "aa on r0, r1; bb on r2"
    (one,) = agreement.compare([{"code": "aa"}] * 3, ["r0", "r1", "r2"])
    assert one.finding.status == "ok"
    assert agreement.compare([{"code": "aa"}, {}], ["r0", "r1"])[1].finding.status == "FAIL"


@pytest.mark.parametrize(
    ("see", "error", "status"), [("abc", "", "ok"), ("a", "", "warn"), ("ab", "", "FAIL"), ("", "read-only", "warn")]
)
def test_a_common_output_folder(see: str, error: str, status: str) -> None:
    assert judge_folder("out", see, "abc", error).status == status
