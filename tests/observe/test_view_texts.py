"""The page in a browser shows any text as it is, megabytes of it, and runs of earlier versions."""

from __future__ import annotations

import random

import numpy as np
from browser import ask
from written_runs import WrittenRun

from spmd_rl.observe.view import write_page


def random_text(rng: random.Random) -> str:
    kinds = [
        "a",
        " ",
        "\n",
        "\r",
        "\t",
        "<",
        ">",
        "&",
        '"',
        "'",
        "\\",
        "\x00",
        "\u2028",
        "é",
        "你",
        "😀",
        "\ud83d",
        "\udcff",
        "\ufeff",
    ]
    markup = [
        "</script>",
        "<script>",
        "<!--",
        "<b>",
        "<|im_start|>",
        "<|im_start|>user\n",
        "<|im_end|>",
        "<|im_start|>assistant\n",
    ]
    markup += [
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
        "{{run}}",
        "&lt;",
    ]
    return "".join(rng.choice(kinds + markup) for _ in range(rng.randint(0, 4)))


def test_any_text_is_shown_as_it_is(tmp_path):
    rng, run, expected = random.Random(7), WrittenRun(tmp_path / "run"), []
    for step in range(120):
        parts = [
            (rng.randint(0, 1), [random_text(rng) for _ in range(rng.randint(0, 4))]) for _ in range(rng.randint(0, 5))
        ]
        run.write(
            step, run.episode(run.sample(parts), data={random_text(rng): random_text(rng)}, source=random_text(rng))
        )
        expected.append("".join(text for _, texts in parts for text in texts))
    write_page(run.folder, tmp_path / "view.html")
    shown = ask(
        tmp_path / "view.html",
        "",
        """const units = (text) => [...Array(text.length)].map((_, i) => text.charCodeAt(i));
        const shown = viewer.store.steps.map((step) => {
            viewer.update({ step, q: "" });
            viewer.update({ q: [...viewer.store.body(viewer.open[0]).samples[0].text][0] ?? "" });
            return units(all(".block").map((block) => {
                const text = block.querySelector(".text").cloneNode(true);
                text.querySelectorAll(".label").forEach((label) => label.remove());
                return (block.querySelector("h3 .control")?.textContent ?? "") + text.textContent;
            }).join(""));
        });
        return [shown, all("script").length, all("b").length];""",
    )
    as_units = [list(np.frombuffer(text.encode("utf-16-le", "surrogatepass"), "<u2")) for text in expected]
    assert shown[0] == [[int(unit) for unit in units] for units in as_units]
    assert shown[1] == 2  # the page's own and the question


def test_characters_of_several_tokens_say_so(tmp_path):
    run = WrittenRun(tmp_path / "run")
    sample = run.sample([(1, ["a", "b"])], logprobs=[-1, -2])
    path = run.write(1, run.episode(sample))
    path.write_text(path.read_text().replace('["a", "b"]', '["", "é"]'))
    write_page(run.folder, tmp_path / "view.html")
    answer = ask(
        tmp_path / "view.html",
        "color=logprob",
        """send(one(".text .token"), new PointerEvent("pointerover", { bubbles: true }));
        const said = ["#card small", "#card dd"].map((css) => one(css).textContent);
        return [texts(".text .token"), one(".text .token").className, ...said];""",
    )
    assert answer == [["é"], "token h4", "2 tokens, up to number 1", "−3 (5.0 %)"]


def test_thousands_of_episodes_and_megabytes_of_text_stay_usable(tmp_path):
    run = WrittenRun(tmp_path / "run")
    for step in range(1, 61):
        run.write(step, *(run.one(f"answer {task}", task=task) for task in range(50)))
    long = ["word "] * 100_000 + ["needle"]
    run.write(61, run.episode(run.sample([(0, ["x" * 1_000_000]), (1, long)]), task=99))
    write_page(run.folder, tmp_path / "view.html")
    answer = ask(
        tmp_path / "view.html",
        "",
        """const out = [one("#count").textContent, all("*").length, texts(".more")];
        all(".more")[1].click(); out.push(texts(".more")[1], all(".token").length);
        viewer.update({ q: "needle" }); out.push(texts("mark.current"));
        viewer.update({ q: "", step: 60 });
        viewer.update({ step: null });
        one("#list").scrollTop = 1e9; await pause(50);
        return [...out, all(".row").length, texts(".row .title").pop()];""",
    )
    assert answer[0] == "3,001 episodes" and answer[1] < 20_000
    assert answer[2] == ["Show 997,600 more characters", "Show 476,006 more characters"]
    assert answer[3] == "Show 416,006 more characters" and answer[4] == 16_800
    assert answer[5] == ["needle"]
    assert answer[6] < 60 and answer[7] == "shop · 49"


def test_what_was_left_out_is_said(tmp_path):
    run = WrittenRun(tmp_path / "run")
    run.write(1, run.one("x"), run.one("y" * 300_000))
    write_page(run.folder, tmp_path / "view.html", max_bytes=200_000)
    assert ask(tmp_path / "view.html", "", "return one('#left-out').textContent").startswith(
        "1 episode left out to stay within 0.2 MB"
    )


def test_old_lines_without_columns_are_readable(tmp_path):
    run = WrittenRun(tmp_path / "run")
    path = run.write(1, run.one("cba", prompt="abc:", advantages=0.5))
    line = path.read_text()
    path.write_text(line[: line.index(', "pieces"')] + "}\n")
    write_page(run.folder, tmp_path / "view.html")
    answer = ask(
        tmp_path / "view.html",
        "",
        """send(one(".text .token"), new PointerEvent("pointerover", { bubbles: true }));
        const [aside] = texts(".block.policy .aside");
        return [texts(".text"), one(".text .token").className, one("#card").textContent, aside]""",
    )
    assert answer == [["abc:", "cba"], "token p6", "no columnsof tokens in this older file", "1 token"]
