"""Where the routed experts of tokens are kept: tables of pieces, of samples and of rows.

A piece is (replica, request, first position, one past the last); in a row's table a fifth number says at which position
of the row the first one lies. It refuses to know what experts are, and who sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spmd_rl.rollouts.types import Episode, Row, TrainSample


def without_routes(episode: Episode) -> Episode:
    """The episode, of whose tokens nobody keeps routed experts."""
    return replace(episode, samples=tuple(replace(sample, routes=None) for sample in episode.samples))


def row_table(documents: Sequence[TrainSample], starts: Sequence[int]) -> np.ndarray | None:
    """int64[pieces, 5] of a row whose documents begin at `starts`; None where no document has pieces."""
    tables = [
        np.column_stack([document.routes, start + document.routes[:, 2]])
        for document, start in zip(documents, starts, strict=True)
        if document.routes is not None
    ]
    return np.concatenate(tables) if tables else None


def pieces_of(rows: Sequence[Row], replica: int) -> np.ndarray:
    """int64[n, 5]: what one replica has to send for these rows, in their order."""
    tables = [row.routes[row.routes[:, 0] == replica] for row in rows if row.routes is not None]
    return np.concatenate(tables) if tables else np.zeros((0, 5), np.int64)
