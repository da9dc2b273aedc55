"""The layout of one packed row: where its documents lie and how attention is to be called on them.

Computed once per micro-batch from `cu_seqlens` and handed through every layer, so that no layer looks at lengths. It
refuses to know about heads, dtypes and attention back ends.

For kernels without variable lengths (scaled dot-product attention on the CPU) it holds a plan of *buckets*: documents
of similar length that are attended in one call, padded on the right. Under a causal mask a padded key comes after
every real query, so padding changes nothing. Invariants: every token of the row has exactly one slot; a row whose plan
is the identity (one document, or runs of equal length) has no index at all, so that `pad` and `unpad` cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

MAX_PADDING = 0.15  # extra attention area that a bucket may cost, relative to the area of its documents
AREA_PER_CALL = 32 * 32  # query-key pairs that take about as long as the fixed cost of one attention call


@dataclass(frozen=True)
class Bucket:
    """`documents` documents, each padded to `length` tokens."""

    documents: int
    length: int

    @property
    def slots(self) -> int:
        """Tokens of the bucket, padding included."""
        return self.documents * self.length


@dataclass(frozen=True)
class Documents:
    """The documents of one packed row of T tokens; S = slots of all buckets, S >= T."""

    cu_seqlens: torch.Tensor  # int32[documents + 1]
    max_length: int
    positions_T: torch.Tensor  # int64[T], restarting at 0 in every document
    buckets: tuple[Bucket, ...]
    token_of_slot_S: torch.Tensor | None  # int64[S]; a padded slot repeats its document's first token. None: identity
    slot_of_token_T: torch.Tensor | None  # int64[T]; None: identity

    @staticmethod
    def build(cu_seqlens: np.ndarray, device: torch.device | str = "cpu") -> Documents:
        """Lay out a row whose document i is [cu_seqlens[i], cu_seqlens[i + 1]).

        Raises ValueError when `cu_seqlens` does not start at 0 or a document has no token.
        """
        bounds = np.asarray(cu_seqlens, dtype=np.int64)
        lengths = np.diff(bounds)
        if bounds.ndim != 1 or len(lengths) == 0 or bounds[0] != 0 or lengths.min() < 1:
            raise ValueError(f"cu_seqlens must start at 0 and give every document at least one token, got {bounds}")
        groups = _group(bounds[:-1], lengths)
        buckets = tuple(Bucket(len(group), int(lengths[group].max())) for group in groups)
        token_of_slot_S, slot_of_token_T = _slots(bounds, groups, buckets)
        identity = len(token_of_slot_S) == bounds[-1] and bool((np.diff(token_of_slot_S) == 1).all())
        return Documents(
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device),
            max_length=int(lengths.max()),
            positions_T=torch.from_numpy(np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)).to(device),
            buckets=buckets,
            token_of_slot_S=None if identity else torch.from_numpy(token_of_slot_S).to(device),
            slot_of_token_T=None if identity else torch.from_numpy(slot_of_token_T).to(device),
        )

    @property
    def tokens(self) -> int:
        """T, the length of the row."""
        return len(self.positions_T)

    def pad(self, x_THd: torch.Tensor) -> list[torch.Tensor]:
        """Lay [T, heads, dim] out as one [documents, length, heads, dim] per bucket (views when nothing is padded)."""
        x_SHd = _take(x_THd, self.token_of_slot_S)
        parts = x_SHd.split([bucket.slots for bucket in self.buckets])
        return [
            part.unflatten(0, (bucket.documents, bucket.length))
            for part, bucket in zip(parts, self.buckets, strict=True)
        ]

    def unpad(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The inverse of `pad`: drop the padding and put the tokens back into the row's order, [T, heads, dim]."""
        x_SHd = parts[0].flatten(0, 1) if len(parts) == 1 else torch.cat([part.flatten(0, 1) for part in parts])
        return _take(x_SHd, self.slot_of_token_T)


def _take(x_NHd: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Rows of `x` by `index`. On two dimensions, because there the CPU's backward is three times faster."""
    return x_NHd if index is None else x_NHd.flatten(1).index_select(0, index).unflatten(1, x_NHd.shape[1:])


def _group(starts: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Documents that share an attention call, longest first: join while padding costs less than a call of its own."""
    groups: list[list[int]] = []
    longest = padding = area = 0
    for document in np.argsort(-lengths, kind="stable").tolist():
        own = int(lengths[document]) ** 2
        extra = longest**2 - own
        if groups and padding + extra <= max(MAX_PADDING * (area + own), AREA_PER_CALL):
            groups[-1].append(document)
            padding, area = padding + extra, area + own
        else:
            groups.append([document])
            longest, padding, area = int(lengths[document]), 0, own
    in_row_order = [np.sort(np.array(group)) for group in groups]
    return sorted(in_row_order, key=lambda group: int(starts[group[0]]))


def _slots(bounds: np.ndarray, groups: list[np.ndarray], buckets: tuple[Bucket, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(token_of_slot int64[S], slot_of_token int64[T]) of the buckets laid end to end."""
    token_of_slot: list[np.ndarray] = []
    for group, bucket in zip(groups, buckets, strict=True):
        starts_N1, ends_N1 = bounds[group][:, None], bounds[group + 1][:, None]
        tokens_NL = starts_N1 + np.arange(bucket.length)
        token_of_slot.append(np.where(tokens_NL < ends_N1, tokens_NL, starts_N1).reshape(-1))
    tokens_S = np.concatenate(token_of_slot)
    slot_of_token_T = np.empty(bounds[-1], dtype=np.int64)
    # Written backwards, so that a document's first token ends with its own slot and not with a padded one.
    slot_of_token_T[tokens_S[::-1]] = np.arange(len(tokens_S))[::-1]
    return tokens_S, slot_of_token_T
