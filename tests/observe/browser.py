"""Chromium without a window: what a page looks like after its scripts, and what they complained about."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DEADLINE_S = 120
ASKING = r"""(async () => {
    const all = (css) => [...document.querySelectorAll(css)], one = (css) => document.querySelector(css);
    const texts = (css) => all(css).map((node) => node.textContent);
    const send = (on, event) => on.dispatchEvent(event);
    const press = (key, on = document.body) => send(on, new KeyboardEvent("keydown", { key, bubbles: true }));
    const type = (css, text) => { one(css).value = text; send(one(css), new Event("input", { bubbles: true })); };
    const pause = (ms) => new Promise((done) => setTimeout(done, ms));
    const asked = async () => { QUESTION };
    let answer;
    try { answer = await asked(); } catch (error) { answer = { threw: String(error.stack) }; }
    const escape = (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0");
    const said = document.createElement("pre");
    said.id = "the-answer";
    said.textContent = JSON.stringify(answer ?? null).replace(/[^ -~]/g, escape);
    document.body.replaceChildren(said); // Chromium can't write a document with half a character in it
})();"""


@dataclass(frozen=True)
class Seen:
    """One look at a page."""

    document: str  # the document after the scripts
    console: list[str]  # everything that was said there: this page says nothing
    answer: Any = None


def dump(page: Path, fragment: str = "", size: str = "1400,900") -> Seen:
    """Open the page as a file, let its scripts and timers run, and take its document."""
    found = [name for name in NAMES if shutil.which(name)]
    assert found, f"none of {NAMES} is installed; on Debian: apt-get install chromium"
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                *(found[0], "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
                *(f"--user-data-dir={profile}", f"--window-size={size}", "--virtual-time-budget=10000", "--dump-dom"),
                f"file://{page}#{fragment}",
            ],
            capture_output=True,
            timeout=DEADLINE_S,
        )
    said = done.stderr.decode("utf-8", "replace")
    assert done.returncode == 0, said
    return Seen(done.stdout.decode("utf-8", "replace"), re.findall(r"CONSOLE[^\"]*(\".*)", said))


def ask(page: Path, fragment: str = "", question: str = "", size: str = "1400,900") -> Any:
    """What a function with this body returns, run at the end of a copy of the page; it may await.

    The page's policy is taken out of the copy: it allows no script but the page's own. Anything in the console fails.
    """
    content = page.read_bytes()
    content, policies = re.subn(rb'<meta http-equiv="Content-Security-Policy"[^>]*>', b"", content)
    assert policies == 1
    script = f"<script>{ASKING.replace('QUESTION', question)}</script>"
    with tempfile.NamedTemporaryFile(suffix=".html") as copy:
        copy.write(content.replace(b"</body>", script.encode() + b"</body>"))
        copy.flush()
        seen = dump(Path(copy.name), fragment, size)
    assert not seen.console, seen.console
    found = re.search(r'<pre id="the-answer">(.*?)</pre>', seen.document, re.DOTALL)
    assert found, "the page came to no answer"
    answer = json.loads(html.unescape(found[1]))
    assert not isinstance(answer, dict) or "threw" not in answer, answer
    return answer
