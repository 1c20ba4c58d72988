"""Shifted sides: sentences face the wrong translation, because one side lacks a line or has an additional one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Shifts that are searched: by how many rows the matching target is below a source.
SHIFTS = (-3, -2, -1, 1, 2, 3)
#: Share of rows whose source and shifted target are closer to each other than each is to its own partner, where sides are
#: shifted and where they are not. The share is a third if similarities are random, and less in good pairs; 0.37 accounts for
#: successive rows sharing a partner, so that the expected likelihood ratio of random rows does not grow.
_CLOSER, _CHANCE = 0.7, 0.37
#: The likelihood ratio must exceed the number of places where a shift may begin, divided by this probability.
_FALSE_ALARM = 0.003

#: Similarities of the sources and targets with some row numbers.
Similarity = Callable[[NDArray[np.integer], NDArray[np.integer]], NDArray[np.floating]]


class Shift(NamedTuple):
    """A part of a corpus whose sides are shifted.

    Attributes:
        first: Its first source.
        end: The source after its last.
        by: By how many rows the matching target is below a source.
        closer: Number of sources that are closer to that target than both are to their own partners.
        of: Number of sources that were compared.
    """

    first: int
    end: int
    by: int
    closer: int
    of: int


def find_shift(similarity: Similarity, row_n: NDArray[np.integer], *, shifts: Sequence[int] = SHIFTS) -> Shift | None:
    """Find the part of a corpus that is shifted most clearly.

    For each shift, the pairs are scanned for the part with the largest likelihood ratio of `_CLOSER` to `_CHANCE`. By
    Ville's inequality, the false-positive rate is at most 1 %, even for uninformative similarities.

    ``similarity`` takes the indices of sources and targets. ``row_n`` are the rows of the pairs in the file, ascending;
    pairs are compared if they are as far apart there as here. Returns rows of the file, or None if no part is clear enough.
    """
    n = len(row_n)
    own_n = similarity(np.arange(n), np.arange(n))
    up, down = math.log(_CLOSER / _CHANCE), math.log((1 - _CLOSER) / (1 - _CHANCE))
    most, found = math.log(max(n, 1) * len(shifts) / _FALSE_ALARM), None
    for by in shifts:
        at_r = np.arange(max(0, -by), n - max(0, by))
        at_r = at_r[row_n[at_r + by] - row_n[at_r] == by]
        shifted_r, own_r2 = similarity(at_r, at_r + by), np.stack([own_n[at_r], own_n[at_r + by]], axis=1)
        closer_r = shifted_r > own_r2.max(axis=1)
        ratio_r = np.append(0.0, np.cumsum(np.where(closer_r, up, down)))
        rise_r = ratio_r - np.minimum.accumulate(ratio_r)
        end = int(rise_r.argmax())
        if rise_r[end] <= most:
            continue
        most = rise_r[end]
        start = end - int(ratio_r[end::-1].argmin())
        start, end = _borders(shifted_r - own_r2.mean(axis=1), start, end)
        first, last = row_n[at_r[[start, end - 1]]].tolist()
        found = Shift(first, last + 1, by, int(closer_r[start:end].sum()), end - start)
    return found


def _borders(gain_r: NDArray[np.floating], start: int, end: int) -> tuple[int, int]:
    """The borders of a part more exactly: between them, the similarity that is gained by the shift is largest."""
    sum_r = np.append(0.0, np.cumsum(gain_r))
    first = int(sum_r[: end + 1].argmin())
    last = first + int(sum_r[first:].argmax())
    return (first, last) if last - first > (end - start) / 2 else (start, end)


def length_similarity(length_n: NDArray[np.number], length_m: NDArray[np.number]) -> Similarity:
    """Similarity of sources and targets by the logarithm of the ratio of their lengths, relative to the ratio of all."""
    log_n, log_m = np.log(length_n), np.log(length_m)
    usual = log_n.mean() - log_m.mean()
    return lambda at_r, below_r: -np.abs(log_n[at_r] - log_m[below_r] - usual)
