"""Sentences that occur in both texts, most of which are untranslated, names or numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from metaphrase.corpus.text import normalised
from metaphrase.mining.margins import neighbour_scores
from metaphrase.mining.options import Margin
from metaphrase.mining.search import Neighbours


def without_copies(
    neighbours: Iterable[Neighbours], texts: Iterable[Sequence[str]], margin: Margin = "ratio"
) -> tuple[tuple[Neighbours, Neighbours], int]:
    """Mark neighbours as missing so that no pair has two sentences that occur in both texts, or one of them on both sides.

    Such a sentence is probably untranslated in one of the texts. It can form a pair in the text where its best margin is
    larger, with a sentence that occurs in one text only: its translation.

    Args:
        neighbours: Neighbours of the sources among the targets, and of the targets among the sources.
        texts: The sources and the targets. Those that differ in case, spaces or Unicode form only are the same.
        margin: See :func:`metaphrase.mining.margins.margin_score`.

    Returns:
        The neighbours of both directions, and the number of different sentences that occur in both texts.
    """
    directions = list(neighbours)
    keys = [_keys(side) for side in texts]
    shared_s = np.intersect1d(keys[0], keys[1])
    is_shared = [np.isin(key, shared_s) for key in keys]
    directions = [
        _masked(side, own_q[:, None] & other[side.row_qk])
        for side, own_q, other in zip(directions, is_shared, is_shared[::-1], strict=True)
    ]
    bests = []
    for forward, backward, key, own_q in zip(directions, directions[::-1], keys, is_shared, strict=True):
        best_s = np.full(len(shared_s), -np.inf)
        scores = neighbour_scores(forward, backward, margin).max(axis=1)
        np.maximum.at(best_s, np.searchsorted(shared_s, key[own_q]), scores[own_q])
        bests.append(best_s)
    is_source_s = bests[0] >= bests[1]
    unused = [
        np.isin(key, shared_s[is_out_s]) for key, is_out_s in zip(keys, (~is_source_s, is_source_s), strict=True)
    ]
    forward, backward = (
        _masked(side, own_q[:, None] | other[side.row_qk])
        for side, own_q, other in zip(directions, unused, unused[::-1], strict=True)
    )
    return (forward, backward), len(shared_s)


def _keys(texts: Sequence[str]) -> NDArray[np.uint64]:
    """A number for each sentence, the same for the same text."""
    digests = (xxhash.xxh3_64_intdigest(normalised(text).encode()) for text in texts)
    return np.fromiter(digests, dtype=np.uint64, count=len(texts))


def _masked(neighbours: Neighbours, removed_qk: NDArray[np.bool_]) -> Neighbours:
    """Mark some neighbours as missing. They still count in the margins."""
    return Neighbours(neighbours.similarity_qk, np.where(removed_qk, np.int32(-1), neighbours.row_qk))
