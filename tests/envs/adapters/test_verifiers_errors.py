"""What is refused before a run starts, and what the message says: the thing, and the way out."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from playing import make

from spmd_rl.envs.adapters import verifiers
from spmd_rl.envs.adapters.verifiers import environment_class

REFUSED = {
    "unknown taskset": ({"taskset": "offline_tasket"}, "no module 'offline_tasket'; did you mean 'offline_taskset'"),
    "bundled": ({"taskset": "textarrena"}, "did you mean 'textarena'"),
    "no taskset": ({"taskset": "playing"}, "defines no `__all__`"),
    "unknown environment": ({"env": "offline-gam"}, "no module 'offline_gam'; did you mean 'offline_game'"),
    "option": ({"options": {"lenght": 3}}, "taskset.lenght: Extra inputs"),
    "value": ({"options": {"length": "x"}}, "taskset.length"),
    "environment's option": ({"env_options": {"n": 3}}, "n: Extra inputs"),
    "agent": ({"agents": {"agnt": {}}}, "no agent 'agnt'; the agents are agent"),
    "agent's setting": ({"agents": {"agent": {"max_turn": 3}}}, "agent.max_turn"),
    "harness": ({"agents": {"agent": {"harness": {"id": "codex"}}}}, "agents.agent.harness.id = 'null'"),
    "model": ({"agents": {"agent": {"model": "other"}}}, "every agent is the policy"),
    "container": ({"agents": {"agent": {"runtime": {"type": "docker"}}}}, "docker container"),
    "sampling": ({"agents": {"agent": {"sampling": {"temperature": 0.5}}}}, "orchestrator.sampling"),
    "renderer": ({"renderer": "qwen"}, "no renderer 'qwen'; say 'auto', 'template'"),
    "its settings": ({"renderer": {"name": "qwen3", "thinking": 1}}, "thinking: Extra inputs"),
    "its tokenizer": ({"renderer": "glm-4.5"}, "does not fit this tokenizer"),
    "teacher": ({"solve": "playing_teacher"}, "package.module:name"),
}


@pytest.mark.parametrize(("args", "says"), REFUSED.values(), ids=REFUSED)
def test_refused(args, says):
    with pytest.raises(ValueError) as error:
        make(**args)
    assert says in str(error.value)


def test_harnesses_that_the_chat_loop_stands_for():
    for name in ("null", "bash"):
        assert make(agents={"agent": {"harness": {"id": name}, "runtime": {"type": "subprocess"}}})


def test_a_taskset_that_needs_what_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import not_installed_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="needs not_installed_at_all, which is not installed"):
        make("needs_more")


def test_a_classic_environment(tmp_path, monkeypatch):
    (tmp_path / "classic_words.py").write_text("def load_environment():\n    ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"classic environment.*pip install 'verifiers==0.3.1'"):
        environment_class("classic-words")


def test_a_taskset_where_the_classic_library_is_installed(monkeypatch):
    monkeypatch.setattr(verifiers, "version", lambda name: "0.3.1")
    with pytest.raises(ImportError, match=r"taskset for verifiers 0.4, and 0.3.1 is installed"):
        environment_class("offline_taskset")


def test_without_the_package(monkeypatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(verifiers, "version", missing)
    with pytest.raises(ImportError, match=r"pip install 'spmd_rl\[verifiers\]'"):
        environment_class("offline_taskset")


def test_importing_the_adapter_imports_neither_library():
    script = "import spmd_rl.envs.adapters.verifiers, sys; print({'verifiers', 'renderers', 'mcp'} & {*sys.modules})"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
