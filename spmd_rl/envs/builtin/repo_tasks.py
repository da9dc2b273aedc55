"""Small repositories with one bug and tests that find it.

One file: `lib.py` and `check.py`, which asserts. Several: a package, and tests for unittest in `tests/`. Callers may
stand between what is tested and the function with the bug, the further ones in later files.

It refuses to know how the repository is worked on. Invariants: the tests as shown fail, and pass once the bug is
undone; so do the hidden calls, which are those shown and more of the same functions; undoing it is an edit of text that
its file holds once; every mistake leaves a hidden call wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from spmd_rl.envs.builtin.repo_functions import LONG
from spmd_rl.envs.builtin.repo_pieces import Piece, caller, places, short_piece, written
from spmd_rl.envs.builtin.splits import Content

PACKAGES = ["bank", "garden", "harbour", "kitchen", "library", "museum", "orchard", "school", "station", "theatre"]
MODULES = ["basics", "figures", "records", "rules", "summary", "overview"]  # later ones may import earlier ones
MOST_FILES = len(MODULES)
MOST_FUNCTIONS = len(LONG)  # of a repository, callers left out
HIDDEN = 8  # calls of each tested function
SHOWN = {1: 1, 2: 3}  # of them in the tests that the model sees, by level
_BEGIN, _END = "\1", "\2"  # around the bug, until its place is known


@dataclass(frozen=True)
class Size:
    """How large repositories are."""

    level: int  # 1: functions of one line, 2: longer ones
    files: int
    functions: int  # per file, callers left out
    depth: int  # callers between what is tested and the bug


@dataclass(frozen=True)
class _Module:
    """One source file."""

    name: str  # dotted
    path: str
    pieces: list[Piece]

    def text(self, placed: dict[str, _Module], changed: dict[str, str]) -> str:
        """What stands in it. `changed`: sources in place of the right ones, by function."""
        known = {piece.name for piece in self.pieces}
        needed = sorted({piece.calls for piece in self.pieces} - known - {""})
        imports = "".join(f"from {placed[name].name} import {name}\n" for name in needed)
        parts = [changed.get(piece.name) or written(piece.source) for piece in self.pieces]
        return "\n\n".join([imports] * bool(imports) + parts)


@dataclass(frozen=True)
class _Bug:
    """What is wrong in a function."""

    marked: str  # the function's source, with the wrong text between _BEGIN and _END
    right: str
    mistakes: list[str]  # other wrong texts
    shows: int  # hidden calls that don't return what is right


_Calls = dict[str, list[list[Any]]]  # arguments, by function
_Values = dict[str, list[Any]]  # what these calls return


def draw_repository(size: Size, rng: np.random.Generator) -> Content:
    """One repository. Its files, what is wrong where, and the hidden calls with what is right for them."""
    chance = Random(int(rng.integers(2**62)))  # Python's own, whose numbers are ints
    while True:
        content = _drawn(size, chance)
        if content is not None:
            return content


def right_sources(content: Content) -> dict[str, str]:
    """The source files without the bug."""
    bug = content["bug"]
    sources = {path: content["files"][path] for path in content["sources"]}
    return sources | {bug["path"]: sources[bug["path"]].replace(bug["old"], bug["new"])}


def _drawn(size: Size, chance: Random) -> Content | None:
    """A repository; None where its bug does not show."""
    modules, chain = _modules(size, chance)
    placed = {piece.name: module for module in modules for piece in module.pieces}
    tested = [piece for piece in _pieces_of(modules) if piece not in chain[:-1]]
    calls = {piece.name: _distinct(piece, chance) for piece in tested}
    right = _outputs(modules, {}, calls)
    bug = _bug(modules, chain, calls, right, chance)
    if bug is None:
        return None
    package, several = modules[0].name.partition(".")[0], len(modules) > 1
    sources = {module.path: module.text(placed, {}) for module in modules}
    sources |= {f"{package}/__init__.py": ""} if several else {}
    buggy = placed[chain[0].name]
    marked = buggy.text(placed, {chain[0].name: bug.marked})
    sources[buggy.path] = marked.replace(_BEGIN, "").replace(_END, "")
    old, new, *mistakes = _edits(marked, [bug.right, *bug.mistakes], whole_lines=size.level > 1)
    command, tests = _tests(modules, SHOWN[size.level], calls, right)
    return {
        "files": {**sources, **tests, "README.md": f"# {package}\n\nThe tests: `{command}`\n"},
        "sources": sorted(sources),
        "command": command,
        "where": f"{package}/" if several else modules[0].path,
        "trail": list(dict.fromkeys(placed[piece.name].path for piece in reversed(chain))),
        "bug": {"path": buggy.path, "old": old, "new": new, "mistakes": mistakes},
        "calls": [[f"{placed[name].name}.{name}", arguments] for name in calls for arguments in calls[name]],
        "right": [value for name in calls for value in right[name]],
        "passing": len(calls) * HIDDEN - bug.shows,
    }


def _bug(
    modules: Sequence[_Module], chain: Sequence[Piece], calls: _Calls, right: _Values, chance: Random
) -> _Bug | None:
    """A bug in the first function of the chain, which calls of the last one show; these are then put in front.

    None where none was found, or no other wrong text for the same place that shows.
    """
    source, name = chain[0].source, chain[-1].name
    place = chance.randrange(len(places(source)))
    texts = places(source)[place]
    shown: dict[str, list[bool]] = {}  # for each wrong text, which calls show it
    for text in chance.sample(texts[1:], len(texts) - 1):
        values = _outputs(modules, {chain[0].name: written(source, place, text)}, {name: calls[name]})[name]
        wrong = [a != b for a, b in zip(values, right[name], strict=True)]
        if any(wrong):
            shown[text] = wrong
    if len(shown) < 2:
        return None
    text, *mistakes = shown
    order = sorted(range(HIDDEN), key=lambda i: not shown[text][i])
    calls[name], right[name] = [calls[name][i] for i in order], [right[name][i] for i in order]
    marked = written(source, place, f"{_BEGIN}{text}{_END}")
    return _Bug(marked, texts[0], mistakes, shown[text].count(True))


def _modules(size: Size, chance: Random) -> tuple[list[_Module], list[Piece]]:
    """The source files; and the function that gets the bug, with its callers behind it."""
    pieces = _pieces(size, chance)
    if size.files == 1:
        modules = [_Module("lib", "lib.py", pieces)]
    else:
        package, names = chance.choice(PACKAGES), sorted(chance.sample(MODULES, size.files), key=MODULES.index)
        groups = [pieces[i :: size.files] for i in range(size.files)]
        modules = [
            _Module(f"{package}.{n}", f"{package}/{n}.py", group) for n, group in zip(names, groups, strict=True)
        ]
    at = chance.randrange(max(1, size.files - size.depth))
    chain = [chance.choice(modules[at].pieces)]
    for step in range(1, size.depth + 1):
        chain.append(caller(chain[-1], chance))
        modules[min(at + step, size.files - 1)].pieces.append(chain[-1])
    return modules, chain


def _pieces(size: Size, chance: Random) -> list[Piece]:
    count = size.files * size.functions
    if size.level > 1:
        return chance.sample(LONG, count)
    pieces: dict[str, Piece] = {}
    while len(pieces) < count:
        piece = short_piece(chance)
        pieces.setdefault(piece.name, piece)
    return list(pieces.values())


def _distinct(piece: Piece, chance: Random) -> list[list[Any]]:
    """Arguments for the hidden calls of one function, as different as can be had."""
    found: list[list[Any]] = []
    for _ in range(20 * HIDDEN):
        arguments = piece.arguments(chance)
        if arguments not in found:
            found.append(arguments)
        if len(found) == HIDDEN:
            return found
    return (found * HIDDEN)[:HIDDEN]


def _pieces_of(modules: Sequence[_Module]) -> list[Piece]:
    return [piece for module in modules for piece in module.pieces]


def _outputs(modules: Sequence[_Module], changed: dict[str, str], calls: _Calls) -> _Values:
    """What these calls return, with `changed` sources by function. Never of code that a model wrote."""
    functions: dict[str, Any] = {}
    for piece in _pieces_of(modules):
        exec(changed.get(piece.name) or written(piece.source), functions)
    return {name: [_output(functions[name], each) for each in arguments] for name, arguments in calls.items()}


def _output(function: Any, arguments: list[Any]) -> Any:
    try:
        return function(*json.loads(json.dumps(arguments)))
    except Exception as error:  # a bug may raise anything
        return {"raised": type(error).__name__}


def _edits(marked: str, others: Sequence[str], *, whole_lines: bool) -> list[str]:
    """The text with the bug, as much as it takes to stand in the file once; then each of `others` in its place."""
    start, end = marked.index(_BEGIN), marked.index(_END) - 1
    text = marked.replace(_BEGIN, "").replace(_END, "")
    low, high = start, end
    while whole_lines or text.count(text[low:high]) > 1:
        low = text.rfind("\n", 0, low - 1 if low and text[low - 1] == "\n" else low) + 1
        high = text.find("\n", high)
        whole_lines = False
    return [text[low:high], *(text[low:start] + other + text[end:high] for other in others)]


def _tests(modules: Sequence[_Module], count: int, calls: _Calls, right: _Values) -> tuple[str, dict[str, str]]:
    """(the command that runs the tests, their files); they make the first `count` calls of each function."""
    shown = {
        name: [
            (f"{name}({', '.join(map(repr, each))})", repr(value))
            for each, value in zip(calls[name][:count], right[name][:count], strict=True)
        ]
        for name in calls
    }
    if len(modules) == 1:
        lines = [f"assert {call} == {value}\n" for pairs in shown.values() for call, value in pairs]
        return "python3 check.py", {"check.py": "".join([f"from lib import {', '.join(shown)}\n", *lines])}
    files = {"tests/__init__.py": ""}
    for module in modules:
        short = module.name.rpartition(".")[2]
        names = [piece.name for piece in module.pieces if piece.name in shown]
        methods = []
        for name in names:
            lines = [f"        self.assertEqual({call}, {value})\n" for call, value in shown[name]]
            methods.append(f"    def test_{name}(self):\n{''.join(lines)}")
        if names:
            imports = f"import unittest\n\nfrom {module.name} import {', '.join(names)}\n"
            head = f"{imports}\n\nclass {short.title()}Test(unittest.TestCase):\n"
            files[f"tests/test_{short}.py"] = head + "\n".join(methods)
    return "python3 -m unittest", files
