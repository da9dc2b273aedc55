"""Finding a model folder in Hugging Face format and reading its `config.json`, without torch: rank 0 needs no more.

What is in the weights is `hf_folder.py`. Invariant: every error names the folder and what is wrong with it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HELP = "pass a folder in Hugging Face format or a Hub id"


def resolve(name: str) -> str:
    """The local folder of a model given as a folder or as a Hub id (downloaded once, then from the cache).

    Raises FileNotFoundError when it is neither, or when the Hub cannot be reached.
    """
    if not name:
        raise FileNotFoundError(f"model.name is empty; {HELP}")
    if Path(name).expanduser().is_dir():
        return str(Path(name).expanduser())
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) or Path(name).exists():
        raise FileNotFoundError(f"model folder {name!r} does not exist; {HELP}")
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])
    except Exception as error:  # the Hub's client raises a dozen kinds, from DNS to missing permission
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileNotFoundError(
            f"model {name!r} is no local folder and could not be fetched from the Hub ({reason}); {HELP}, "
            "or download it first where there is a network"
        ) from error


def read_config(folder: str) -> dict[str, Any]:
    """`config.json` as a dict. Raises FileNotFoundError or ValueError."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        missing = "has no config.json" if Path(folder).is_dir() else "does not exist"
        raise FileNotFoundError(f"model folder {folder!r} {missing}; {HELP}")
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path}: no model_type; {HELP}")
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. ValueError, naming the file, when it does not."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {HELP}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; {HELP}")
    return value
