"""The rows as Markdown, for docs/migrating.md: their key, ours, remark.

Keys that several parts have alike stand once, and neighbours that share an answer stand in one line. It refuses to know
particular keys.
"""

from __future__ import annotations

from itertools import groupby

from spmd_rl.config.prime_rl.convert import ROWS
from spmd_rl.config.prime_rl.earlier import RENAMED
from spmd_rl.config.prime_rl.keys import Key

PARTS = {
    "": "The run: the top of an rl.toml",
    "trainer": "`[trainer]`: also the top of an sft.toml",
    "orchestrator": "`[orchestrator]`",
    "inference": "`[inference]`",
    "sft": "An sft.toml's own tables",
}
FATES = {"converted": "", "later": "**not yet**: ", "never": "**none**: ", "needless": "not needed: "}
Answer = tuple[str, str, tuple[str, ...]]  # ours, remark, the parts that have it


def tables() -> str:
    """One table per part, and one of the names that were others before."""
    answers: dict[str, list[Answer]] = {}
    for part, name, ours, remark in _lines():
        known = answers.setdefault(name, [])
        same = next((i for i, (o, r, _) in enumerate(known) if (o, r) == (ours, remark)), None)
        if same is None:
            known.append((ours, remark, (part,)))
        else:
            known[same] = (ours, remark, (*known[same][2], part))
    text = []
    for part, title in PARTS.items():
        lines = [(name, answer) for name, found in answers.items() for answer in found if answer[2][0] == part]
        text += [f"### {title}\n", "| prime-rl | ours | remark |", "|---|---|---|"]
        for (ours, remark, parts), group in groupby(lines, key=lambda line: line[1]):
            names = ", ".join(f"`{name}`" for name, _ in group)
            also = [f"`{other}.`" for other in dict.fromkeys(parts) if other != part]
            names += f" (also in {', '.join(also)})" if also else ""
            shown = ", ".join(f"`{key}`" for key in ours.split(" and ")) if ours else ""
            text.append(f"| {names} | {shown} | {remark} |".replace("**.", "\\*\\*."))
        text.append("")
    text += ["### Earlier names\n", "| before | now |", "|---|---|"]
    text += [f"| `{old}` | `{new}` |" for old, new in RENAMED]
    return "\n".join(text) + "\n"


def _lines() -> list[tuple[str, str, str, str]]:
    found = []
    for row in ROWS:
        part, _, name = row.path.partition(".")
        if part not in PARTS or not name:
            part, name = "", row.path
        ours = row.ours if row.fate == "converted" else ""
        found.append((part, name, ours, _remark(row)))
    return found


def _remark(row: Key) -> str:
    planned = f" (planned: `{row.ours}`)" if row.fate == "later" and row.ours else ""
    instead = f"; instead: {row.instead}" if row.instead else ""
    return f"{FATES[row.fate]}{row.why}{planned}{instead}".replace("|", "\\|")
