"""A model served to clients that know OpenAI's wire and nothing else; and an agent program that it is trained on."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from spmd_rl.world.launcher import STOP_FILE
from tests.e2e.runner import QUICKSTART, Launch, run

pytestmark = pytest.mark.slow

SERVING = re.compile(r"OPENAI_BASE_URL +(\S+)\n *OPENAI_API_KEY +(\S+)\n")
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

AGENT = """
import http.client, json, os, sys
from urllib.parse import urlsplit
url, word = urlsplit(os.environ["OPENAI_BASE_URL"]), json.load(sys.stdin)["word"]
def ask(messages, **more):
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request("POST", url.path + "/chat/completions", json.dumps({"messages": messages} | more), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    return [choice["message"] for choice in json.loads(response.read())["choices"]]
said = [{"role": "user", "content": word}]
drafts = ask(said, n=3)
last, = ask([*said, drafts[0], {"role": "user", "content": "and now?"}])
print(json.dumps({"reward": sum(letter in (last["content"] or "") for letter in word) / len(word),
                  "drafts": len({draft["content"] for draft in drafts})}))
"""


def ask(url: str, key: str, body: Any, path: str = "/chat/completions") -> tuple[int, Any]:
    """(status, the response's JSON, or the data of a stream's events)."""
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname, at.port, timeout=120)
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
    connection.request(method, at.path + path, data, {"Authorization": f"Bearer {key}"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    if response.headers["Content-Type"] == "text/event-stream":
        return response.status, [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    return response.status, json.loads(text)


def serving(launch: Launch) -> tuple[str, str]:
    """(URL, key), as soon as they are shown."""
    deadline = time.monotonic() + 240
    while not (shown := SERVING.search(launch.output)):
        assert not launch.ended and time.monotonic() < deadline, launch.output[-4000:]
        time.sleep(0.1)
    return shown[1], shown[2]


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


def test_a_model_is_served_until_somebody_asks_for_the_end(model: str, tmp_path: Path) -> None:
    args = ["--model.name", model, "--seq-len", "512", "--orchestrator.sampling.max-tokens", "6", "--serve.port", "0"]
    with Launch(tmp_path / "run", args, nproc=3, command="serve") as launch:  # two replicas
        url, key = serving(launch)
        assert url.startswith("http://127.0.0.1:") and len(key) >= 40
        assert ask(url, key, None, "/models")[1]["data"][0]["id"] == model
        assert ask(url, key + "x", chat("a"))[0] == 401
        status, answer = ask(url, key, chat("a", n=4, logprobs=True, temperature=1.0, max_tokens=12))
        assert status == 200 and answer["usage"]["completion_tokens"] <= 48
        tokens = [[token["bytes"] for token in choice["logprobs"]["content"]] for choice in answer["choices"]]
        assert len({json.dumps(one) for one in tokens}) > 1, "answers to one prompt are drawn one by one"
        logprobs = [token["logprob"] for choice in answer["choices"] for token in choice["logprobs"]["content"]]
        assert all(-30 < logprob < 0 for logprob in logprobs)

        same = [ask(url, key, chat("b", **how))[1]["choices"] for how in [{"seed": 5}] * 2 + [{"temperature": 0}] * 2]
        assert same[0] == same[1] and same[2] == same[3]
        conversation = [*chat("a")["messages"], {"role": "assistant", "content": "b"}, *chat("c")["messages"]]
        events = ask(url, key, {"messages": conversation, "tools": [ADD], "stream": True})[1]
        assert json.loads(events[0])["choices"][0]["delta"]["role"] == "assistant" and events[-1] == "[DONE]"
        plain = ask(url, key, {"prompt": ["ab", "cd"], "max_tokens": 3}, "/completions")[1]
        assert len(plain["choices"]) == 2 and plain["usage"]["prompt_tokens"] == 4
        status, refused = ask(url, key, chat("x" * 600))
        assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
        assert ask(url, key, chat("a", frequency_penalty=1))[0] == 400
        with ThreadPoolExecutor(32) as clients:
            answers = list(clients.map(lambda i: ask(url, key, chat(f"{i}")), range(64)))
        assert all(status == 200 for status, _ in answers)
        (tmp_path / "run" / STOP_FILE).touch()
        done = launch.wait()
    assert done.returncode == 0, done.output[-4000:]
    assert "stopped: 71 requests were answered" in done.output and "Traceback" not in done.output


def test_a_taken_port_is_named_before_anything_is_built(model: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run(tmp_path / "run", ["--model.name", model, "--serve.port", port], nproc=2, command="serve")
    assert done.returncode != 0 and f"port {port}" in done.output and "give another port" in done.output


def test_an_agent_program_is_trained_on(model: str, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    words = [f"{a}{b}{c}" for a in "abc" for b in "def" for c in "ghi"]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in words))
    more = tmp_path / "agent.toml"
    more.write_text(f"""
        max_steps = 2
        trainer.scheduler.type = "constant"
        warmup.steps = 0
        [orchestrator]
        batch_size = 8
        group_size = 4
        [orchestrator.sampling]
        max_tokens = 12
        [orchestrator.eval]
        tasks = 2
        samples = 1
        [[orchestrator.source]]
        env = "command"
        [orchestrator.source.args]
        command = ["{{python}}", "{tmp_path}/agent.py"]
        tasks = "{tmp_path}/tasks.jsonl"
    """)
    args = ["--config", QUICKSTART, "--config", str(more), "--model.name", model, "--seq-len", "512"]
    done = run(tmp_path / "run", args)
    assert done.returncode == 0, done.output[-4000:]
    steps = done.phase("rl")
    assert len(steps) == 2 and all(record["batch/samples"] == 24 for record in steps)  # of each rollout, three drafts
    assert all(record["reward/drafts"] > 2 for record in steps), "drafts of one prompt are drawn one by one"
    shown = (tmp_path / "run/rollouts").rglob("*")
    assert any("and now?" in path.read_text(errors="replace") for path in shown if path.is_file())
