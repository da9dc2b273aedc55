"""The file in which torchrun looks for the reason of a rank's failure; the screen then ends with it.

Without it torchrun's own fifty lines push the reason out of sight. It refuses to know why a rank failed, and imports no
torch: a mistake in the config is reported before that is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path


def write_error_file(text: str, first: bool = False) -> None:
    """Leave `text` in torchelastic's format where torchrun asked for it; without torchrun, nothing.

    `first`: this is the rank that failed; torchrun takes the earliest one for the root cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) - first)}
    with contextlib.suppress(OSError):  # a full disk must not hide the reason, which is also on the screen
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
