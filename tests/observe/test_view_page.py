"""The page in a browser: what is shown, coloured, found and filtered, and that keys, clicks and addresses do it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from browser import ask, dump
from written_runs import WrittenRun

from spmd_rl.observe.view import write_page

SYSTEM = "<|im_start|>system\nWrite <tool_call>{...}</tool_call>.<|im_end|>\n"
ASK = ["<|im_start|>", "user", "\n", "How much?", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
CALL = ["I ask. ", "<tool_call>", '{"name": "shop", "arguments": {}}', "</tool_call>", "<|im_end|>"]
TOOL = ["\n", "<|im_start|>", "tool", "\n", "<tool_response>", "7 euros", "</tool_response>", "<|im_end|>", "\n"]
LAST = ["<think>", "hm", "</think>", "<tool_call>", '{"name": ', "</tool_call>", "7", "\n", "foo", "<|im_end|>"]
# of CALL, then of LAST
LOGPROBS = [-0.05, -0.2, -0.7, -1.5, -3, *[-5, -8, 0, 0, 0, 0, 0, 0, 0, 0]]
VERSIONS = [2] * 5 + [0] * 3 + [-1] * 7


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Steps 1 to 6 of two sources, evaluations at 3 and 6."""
    run = WrittenRun(tmp_path_factory.mktemp("pages") / "a <run>")
    parts = [(0, [SYSTEM, *ASK]), (1, CALL), (0, [*TOOL, *ASK[6:]]), (1, LAST)]
    chat = run.sample(parts, logprobs=LOGPROBS, versions=VERSIONS, advantages=_weights(parts))
    run.write(3, run.episode(chat, task=30, data={"answer": "7"}), run.one("foo", task=31, reward=0.0))
    seats = [
        run.sample([(0, ["play"]), (1, [move])], agent=agent, reward=r)
        for agent, move, r in (("X", "b2", 1.0), ("O", "a1", -1.0))
    ]
    for step in (1, 2, 4, 5, 6):
        episodes = [run.one(f"step {step} says foo", task=step * 10, reward=step / 10), run.one("bar", task=step * 10)]
        if step == 5:
            episodes += [
                run.episode(*seats, source="game", task=50),
                run.episode(reward="sandbox gone", status="failed"),
            ]
        run.write(step, *episodes)
    for step, texts in ((3, ["seven", "eight"]), (6, ["7", "8"])):
        run.write(step, *(run.one(text, task=task) for task, text in enumerate(texts)), kind="eval")
    run.metrics(*({"phase": "rl", "step": step, "reward/mean": step / 10} for step in range(1, 7)))
    write_page(run.folder, run.folder / "view.html")
    return run.folder / "view.html"


def _weights(parts) -> np.ndarray:
    """2 on the tokens of the first turn, -1 on the second, 0 on its last one."""
    turns = iter([2.0, -1.0])
    weights = np.concatenate([np.full(len(tokens), next(turns) if said else 0.0) for said, tokens in parts])
    weights[-1] = 0
    return weights.astype(np.float32)


def test_the_page_as_it_is_opens_on_the_latest_step_without_a_word_in_the_console(page):
    seen = dump(page)
    assert seen.console == []
    assert 'data-episode="e6.0"' in seen.document and "a &lt;run&gt;" in seen.document
    assert "seven" not in seen.document  # only what is shown is in the document, not the data


def test_a_broken_script_would_be_noticed(page, tmp_path):
    content = page.read_bytes()
    assert content.count(b"new App(") == 1
    (tmp_path / "broken.html").write_bytes(content.replace(b"new App(", b"new Apps("))
    assert dump(tmp_path / "broken.html").console  # by its hash already
    with pytest.raises(AssertionError):
        ask(tmp_path / "broken.html", question="return 1")


def test_an_address_sets_everything(page):
    answer = ask(
        page,
        "step=4&compare=5&color=version&q=foo&theme=dark&source=shop&status=ok&min=0.2&max=0.9&sort=lowest&kind=train",
        """await pause(500);
        return {
            episodes: all(".pane:not([hidden])").map((pane) => pane.dataset.episode),
            pressed: texts("button[aria-pressed=true]"), theme: document.documentElement.dataset.theme,
            marks: texts("#panes mark"), markers: texts(".marker text"), listed: texts("#count"),
            fields: ["q", "source", "status", "min", "max", "sort"].map((id) => one("#" + id).value),
            address: location.hash,
        }""",
    )
    assert answer["episodes"] == ["t4.0", "t5.0"]
    assert answer["pressed"] == ["Training", "Version", "Compare steps"]
    assert answer["theme"] == "dark" and answer["marks"] == ["foo", "foo"]
    assert answer["markers"] == ["B · 5", "A · 4"] and answer["listed"] == ["2 of 18 episodes"]
    assert answer["fields"] == ["foo", "shop", "ok", "0.2", "0.9", "lowest"]
    assert "episode=t4.0" in answer["address"] and "other=t5.0" in answer["address"]


def test_nonsense_in_the_address_is_nothing(page):
    address = "step=x&compare=&color=pink&q=&theme=7&kind=none&min=a&source=no&status=no&sort=up&episode=z9.9&sample=99"
    assert ask(page, address, "return [one('.pane').dataset.episode, one('#count').textContent]") == [
        "e6.0",
        "18 episodes",
    ]


def test_turns_roles_and_tool_calls_are_told_apart(page):
    answer = ask(
        page,
        "episode=t3.0",
        """return {
            roles: texts(".block h3 .role"), turns: texts(".turn"), labels: texts(".region .label"),
            inside: all(".region").map((r) => [...r.childNodes].slice(1).map((n) => n.textContent).join("")),
            headers: texts(".block h3 .control"),
            said: texts(".block.policy .token").join(""), facts: texts(".facts span"), data: texts(".data dd"),
        }""",
    )
    assert answer["roles"] == ["system", "user", "policy", "tool", "policy"]
    assert answer["turns"] == ["turn 1", "turn 2"]
    assert answer["labels"] == ["tool call · shop", "tool response", "thinking", "tool call · malformed"]
    assert answer["inside"] == ["".join(tokens) for tokens in (CALL[1:4], TOOL[4:7], LAST[:3], LAST[3:6])]
    assert answer["headers"][2] == "<|im_start|>assistant\n"
    assert answer["said"] == "".join(CALL + LAST)
    assert answer["facts"][:3] == ["step 3", "version 0–2 (lag 0–2)", "15 tokens sampled, 22 given"]
    assert answer["data"] == ["7"]


SHADES = {
    "advantage": ["p6"] * 5 + ["n3"] * 9 + ["zero"],
    "logprob": ["h0", "h1", "h2", "h3", "h4", "h5", "h6", *["h0"] * 8],
    "version": ["v0"] * 5 + ["v2"] * 3 + ["teacher"] * 7,
    "mask": ["sampled"] * 15,
    "none": [""] * 15,
}


def test_tokens_are_coloured(page):
    looks = ask(
        page,
        "episode=t3.0",
        """const plain = ["token", "control", "newline"];
        return ["advantage", "logprob", "version", "mask", "none"].map((color) => {
            one(`#color [value=${color}]`).click();
            return {
                classes: all(".text .token").map((t) => [...t.classList].filter((c) => !plain.includes(c)).join(" ")),
                grounds: all(".text .token").map((t) => getComputedStyle(t).backgroundColor),
                given: texts(".text .token").some((t) => t.includes("How much")), legend: all("#legend > *").length,
            };
        });""",
    )
    for (color, classes), look in zip(SHADES.items(), looks, strict=True):
        assert look["classes"] == classes
        bare = ["" if name in ("zero", "h0") else name for name in classes]
        assert [bare.index(name) for name in bare] == [look["grounds"].index(ground) for ground in look["grounds"]]
        assert not look["given"] and (look["legend"] > 0) == (color != "none")


def test_the_card_tells_what_is_known_of_a_token(page):
    answer = ask(
        page,
        "episode=t3.0",
        """const token = all(".token").find((t) => t.textContent === "I ask. ");
        send(token, new PointerEvent("pointerover", { bubbles: true }));
        return [one("#card").hidden, one("#card code").textContent, ...texts("#card dd")];""",
    )
    assert answer == [False, '"I ask. "', "−0.05 (95 %)", "2 (lag 0)", "+2"]


def test_filters_and_orders(page):
    answer = ask(
        page,
        "",
        """const { store } = viewer, out = {};
        const all_ = { kind: "all", source: "", status: "", min: null, max: null, q: "" };
        const ids = () => viewer.listed.map((i) => store.id(i));
        const listed = (patch) => { viewer.update({ ...all_, ...patch }); return ids(); };
        out.eval = listed({ kind: "eval" });
        out.game = listed({ source: "game" });
        out.failed = listed({ status: "failed" });
        out.range = listed({ min: 0.2, max: 0.5 });
        out.zero = listed({ max: 0 });
        out.searched = listed({ q: "SANDBOX G" });
        out.longer = listed({ q: "step 2 says fo" });
        viewer.update({ q: "step 2" }); out.again = ids(); // less is looked for: more may be found
        listed({ q: "st" }); viewer.update({ q: "step 2" }); out.more = ids();
        out.lowest = listed({ sort: "lowest" }); out.highest = listed({ sort: "highest" });
        out.first = listed({ sort: "first" }); out.latest = listed({ sort: "latest" });
        viewer.update({ q: "nowhere" });
        out.empty = [one("#count").textContent, one(".empty p").textContent, all(".row").length];
        one(".empty button").click();
        out.cleared = one("#count").textContent;
        return out;""",
    )
    assert answer["eval"] == ["e6.0", "e6.1", "e3.0", "e3.1"]
    assert answer["game"] == ["t5.2"] and answer["failed"] == ["t5.3"] == answer["searched"]
    assert answer["range"] == ["t5.0", "t4.0", "t2.0"] and answer["zero"] == ["t3.1"]
    assert answer["longer"] == answer["again"] == answer["more"] == ["t2.0"]
    assert answer["lowest"][:2] == ["t3.1", "t1.0"] and answer["lowest"][-1] == answer["highest"][-1] == "t5.3"
    assert answer["first"][0] == "t1.0" and answer["latest"][0] == "e6.0"
    assert answer["empty"] == ["0 of 18 episodes", "No episode passes the filters.", 0]
    assert answer["cleared"] == "18 episodes"


def test_fields_and_buttons_do_what_they_say(page):
    answer = ask(
        page,
        "",
        """const out = [], now = () => out.push([one("#count").textContent, one(".pane").dataset.episode]);
        one("#kind [value=eval]").click(); now();
        one("#kind [value=all]").click();
        one("#status").value = "failed"; send(one("#status"), new Event("change")); now();
        one("#chips button").click();
        type("#min", "0.9"); now();
        type("#min", "");
        type("#q", "foo"); await pause(400); now();
        one(".row:nth-of-type(4)").click(); now();
        const box = one("#chart").getBoundingClientRect();
        send(one("#chart"), new MouseEvent("click", { bubbles: true, clientX: box.left + 46 })); now();
        return out;""",
    )
    assert answer[0] == ["4 of 18 episodes", "e6.0"]
    assert answer[1] == ["1 of 18 episodes", "t5.3"]
    assert answer[2] == ["11 of 18 episodes", "e6.0"]
    assert answer[3] == ["7 of 18 episodes", "t6.0"]
    assert answer[4] == ["7 of 18 episodes", "t5.0"]
    assert answer[5] == ["1 of 18 episodes", "t1.0"]


def test_keys(page):
    answer = ask(
        page,
        "sort=first&episode=t4.0",
        """const out = {}, at = () => all(".pane:not([hidden])").map((pane) => pane.dataset.episode).join(" ");
        const after = (...keys) => { keys.forEach((key) => press(key)); return at(); };
        out.j = after("j"); out.k = after("k", "k");
        out.right = after("ArrowRight", "ArrowRight"); out.left = after("ArrowLeft");
        out.list = (press("ArrowDown", one("#list")), at());
        out.scope = [after("s"), one("#count").textContent];
        out.compare = after("c"); out.single = after("c");
        out.colors = ["1", "2", "3", "4", "5"].map((key) => (press(key), document.documentElement.dataset.color));
        out.theme = ["t", "t"].map((key) => (press(key), document.documentElement.dataset.theme));
        press("/"); out.search = document.activeElement.id;
        press("k", one("#q")); out.typing = at();
        type("#q", "foo"); await pause(400); press("Escape", one("#q")); out.cleared = viewer.state.q;
        viewer.update({ step: null, episode: "t5.2" });
        out.tabs = ["]", "]", "["].map((key) => (press(key), one("[role=tab][aria-selected=true]").textContent));
        press("?"); out.help = [one("#keys").open, texts("#key-list dd").length > 8];
        press("j"); out.behind = at();
        return out;""",
    )
    assert (answer["j"], answer["k"], answer["right"], answer["left"]) == (
        "t4.1",
        "t3.1",
        "t5.0",
        "t4.0",
    )
    assert answer["list"] == "t4.1" and answer["scope"] == ["t4.1", "18 episodes"]
    assert answer["compare"] == "t4.1 e6.0" and answer["single"] == "t4.1"
    assert answer["colors"] == ["advantage", "logprob", "version", "mask", "none"]
    assert answer["theme"] == ["light", "dark"]
    assert answer["search"] == "q" and answer["typing"] == "t4.1" and answer["cleared"] == ""
    assert answer["tabs"] == ["O−1", "O−1", "X1"]
    assert answer["help"] == [True, True] and answer["behind"] == "t5.2"


def test_hits_are_gone_through(page):
    answer = ask(
        page,
        "episode=t3.0&q=o",
        """const out = [texts("#hits")[0]], current = (mark) => mark.classList.contains("current");
        const now = () => out.push(all("#panes .text mark").findIndex(current));
        const marks = all("#panes .text mark").length;
        now(); press("n"); now(); press("p"); press("p"); now();
        return [marks, ...out, all("#panes .text mark").length];""",
    )
    marks, said, *_, again = answer
    assert marks == again > 3 and said == f"hit 1 of {marks} here"
    assert answer[2:5] == [0, 1, marks - 1]


def test_an_evaluated_task_is_compared_with_itself(page):
    answer = ask(
        page,
        "kind=eval&step=3&compare=6",
        """const at = () => all(".pane").map((pane) => pane.dataset.episode), out = [at()];
        press("j"); out.push(at());
        one("[id='row-e6.0']").click(); out.push(at());
        one("[data-pane=B] .pill:not(.here)").click(); out.push(at()); // the same task, of the other step
        const { left, width } = one("#chart").getBoundingClientRect();
        const click = (part, shiftKey) =>
            send(one("#chart"), new MouseEvent("click", { clientX: left + part * width, bubbles: true, shiftKey }));
        viewer.update({ kind: "all", step: 2, compare: 4 });
        click(1); out.push(texts(".marker text")); // the nearer one of the two follows
        click(0); out.push(texts(".marker text"));
        viewer.update({ compare: null }); click(0.5, true); out.push(texts(".marker text"));
        viewer.update({ kind: "eval", step: 3, compare: 6, episode: "e3.1" });
        one("[data-pane=B] select").value = "5"; send(one("[data-pane=B] select"), new Event("change"));
        out.push(one("[data-pane=B] .empty p").textContent);
        return [...out, texts(".heading b")];""",
    )
    assert answer[:3] == [["e3.0", "e6.0"], ["e3.1", "e6.1"], ["e3.1", "e6.0"]]
    assert answer[3] == ["e3.1", "e3.0"]
    assert answer[4:7] == [["B · 6", "A · 2"], ["B · 6", "A · 1"], ["B · 3", "A · 1"]]
    assert answer[7] == "No episode of step 5 passes the filters." and answer[8] == ["A"]


def test_a_failure_and_its_reason(page):
    question = "return ['.error', '.outcome small', '.blocks .empty', '.row.chosen .snippet'].map(texts)"
    answer = ask(page, "episode=t5.3", question)
    assert answer == [["No reward: sandbox gone"], ["no reward"], ["This rollout has no tokens."], ["sandbox gone"]]


def test_light_and_dark_are_what_they_say(page):
    light, dark = ask(
        page,
        "",
        """const look = (css) => [getComputedStyle(one(css)).color, getComputedStyle(one(css)).backgroundColor];
        const parts = ["body", ".pane", ".head h2"];
        return ["light", "dark"].map((theme) => (viewer.update({ theme }), parts.map(look)));""",
    )

    def brightness(color: str) -> int:
        return sum(int(part) for part in color[4:-1].split(","))

    for part in (0, 1):
        assert brightness(light[part][0]) < 3 * 60 and brightness(light[part][1]) > 3 * 230
        assert brightness(dark[part][0]) > 3 * 200 and brightness(dark[part][1]) < 3 * 40


def test_a_narrow_window_shows_one_thing_below_the_other(page):
    wide, narrow = (
        ask(
            page, "step=4&compare=5", "return all('.pane').map((p) => Math.round(p.getBoundingClientRect().left))", size
        )
        for size in ("1400,900", "600,900")
    )
    assert wide[0] < wide[1] and narrow[0] == narrow[1]
