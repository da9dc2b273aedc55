"""A git repository with one commit, as the files that lie in its folder: made without git, the same every time.

To run git three times takes longer than to run the tests of a small repository. It refuses to know what the files are
about. Invariants: the work tree is clean; the same files give the same commit, by the same author on the same day.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from hashlib import sha1

WHO, WHEN = "dev <dev@localhost>", 1735689600  # 2025-01-01 00:00:00 UTC
MESSAGE = "start"
BRANCH = "refs/heads/main"
CONFIG = """[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
[user]
\tname = dev
\temail = dev@localhost
"""
_FILE, _FOLDER = 0o100644, 0o40000


def repository(files: Mapping[str, str]) -> dict[str, bytes]:
    """The files, and those of `.git`, by path."""
    data = {path: text.encode() for path, text in files.items()}
    objects: dict[str, bytes] = {}
    ids = {path: _put(objects, "blob", content) for path, content in data.items()}
    tree = _tree(objects, {path: ids[path] for path in data})
    signed = f"{WHO} {WHEN} +0000"
    text = f"tree {tree}\nauthor {signed}\ncommitter {signed}\n\n{MESSAGE}\n"
    commit = _put(objects, "commit", text.encode())
    git = {
        "HEAD": f"ref: {BRANCH}\n".encode(),
        "config": CONFIG.encode(),
        BRANCH: f"{commit}\n".encode(),
        "index": _index(data, ids),
        **{f"objects/{id[:2]}/{id[2:]}": content for id, content in objects.items()},
    }
    return data | {f".git/{name}": content for name, content in git.items()}


def _put(objects: dict[str, bytes], kind: str, content: bytes) -> str:
    """Store an object; its id."""
    whole = f"{kind} {len(content)}\0".encode() + content
    id = sha1(whole, usedforsecurity=False).hexdigest()
    objects[id] = zlib.compress(whole)
    return id


def _tree(objects: dict[str, bytes], ids: Mapping[str, str]) -> str:
    """Store the tree of some paths, and those below it; its id."""
    folders: dict[str, dict[str, str]] = {}
    entries = []
    for path, id in ids.items():
        name, below, rest = path.partition("/")
        if below:
            folders.setdefault(name, {})[rest] = id
        else:
            entries.append((name, _FILE, id))
    entries += [(f"{name}/", _FOLDER, _tree(objects, inside)) for name, inside in folders.items()]
    # Folders are sorted as if their names ended with a slash.
    lines = [f"{mode:o} {name.rstrip('/')}\0".encode() + bytes.fromhex(id) for name, mode, id in sorted(entries)]
    return _put(objects, "tree", b"".join(lines))


def _index(data: Mapping[str, bytes], ids: Mapping[str, str]) -> bytes:
    """What is staged: everything. Without times, which git then looks up by itself."""
    parts = [b"DIRC" + struct.pack(">2I", 2, len(data))]
    for path in sorted(data, key=str.encode):
        name = path.encode()
        entry = struct.pack(">10I", 0, 0, 0, 0, 0, 0, _FILE, 0, 0, len(data[path]))
        entry += bytes.fromhex(ids[path]) + struct.pack(">H", len(name)) + name
        parts.append(entry + b"\0" * (8 - len(entry) % 8))
    body = b"".join(parts)
    return body + sha1(body, usedforsecurity=False).digest()
