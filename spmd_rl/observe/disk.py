"""A full disk, explained: which folder, how much is free, what to do."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def explain_full_disk(folder: str | Path) -> Iterator[None]:
    """Turn "no space left" and "quota exceeded" inside the block into an OSError that names `folder` and the way out.

    The error number is kept; every other error passes unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = "the disk quota is exceeded" if error.errno == errno.EDQUOT else "the disk is full"
        raise OSError(
            error.errno,
            f"{what}: cannot write into '{folder}' ({_free(folder)}); "
            "delete old runs or checkpoints there, or set output_dir to a folder on a larger disk",
        ) from error


def _free(folder: str | Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.2f} GB free"
    except OSError:
        return "free space unknown"
