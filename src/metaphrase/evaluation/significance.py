"""Bootstrap intervals, p-values and Holm's correction; :func:`metaphrase.evaluation.compare.compare` tests two results.

Each item has a score: a hit (0 or 1), or the mean of its hits in both directions. All results are in percent.

The mean of ``n`` items drawn with replacement depends only on how often each *distinct* value is drawn. A resample is
therefore one multinomial draw over the distinct values instead of ``n`` draws, with the same distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from metaphrase.io.arguments import BetweenZeroAndOne, Finite, Resamples, Seed, Share, checked

RESAMPLES = 10_000
CONFIDENCE = 0.95
ALPHA = 0.05

Verdict = Literal["better", "tie", "worse"]

#: Number of counts held in memory while resampling (32 MB).
CHUNK = 1 << 22
#: Maximum number of changed items for `sign_flip_p_value`. With more, the bootstrap is accurate.
FEW_CHANGES = 16
#: Resampled differences closer to zero than this, in percentage points, count as zero (rounding of means).
_ZERO = 1e-10


@checked
def bootstrap_interval(
    correct: ArrayLike,
    *,
    resamples: Resamples = RESAMPLES,
    confidence: BetweenZeroAndOne = CONFIDENCE,
    seed: Seed = 0,
) -> tuple[float, float]:
    """Compute a percentile bootstrap interval of an accuracy.

    Args:
        correct: Score of each item, in [0, 1], shape ``(n,)``.
        resamples: Number of bootstrap samples.
        confidence: Share of the bootstrap distribution inside the interval.
        seed: Seed of the resampling.

    Returns:
        Lower and upper end in percent. The interval has no width if all items have the same score.

    Raises:
        ValueError: There are no scores, or one of them is not in [0, 1].

    >>> low, high = bootstrap_interval([1] * 70 + [0] * 30)
    >>> 60 <= low <= 62 and 78 <= high <= 80
    True
    """
    correct_n = np.asarray(correct, dtype=np.float64)
    if correct_n.ndim != 1 or not ((correct_n >= 0) & (correct_n <= 1)).all():
        raise ValueError("The scores of items must be numbers from 0 to 1, in one dimension.")
    return percentile_interval(resampled_means({"": correct_n}, resamples=resamples, seed=seed), confidence)


def cluster_sums(
    scores: Mapping[str, ArrayLike], ids: Mapping[str, Sequence[int]] | None = None
) -> NDArray[np.float64]:
    """What each cluster adds to the mean over languages of the mean score of each.

    A cluster is the items of all languages with the same id, such as translations of one sentence; without ids, an item.
    """
    values = [np.asarray(one, dtype=np.float64) for one in scores.values()]
    parts = [one_n / len(one_n) / len(values) for one_n in values]
    if ids is None:
        return np.concatenate(parts)
    at_n = np.unique(np.concatenate([ids[language] for language in scores]), return_inverse=True)[1]
    return np.round(np.bincount(at_n, weights=np.concatenate(parts)), 15)  # equal sums are drawn together


def cluster_scores(scores: Mapping[str, ArrayLike], ids: Mapping[str, Sequence[int]]) -> NDArray[np.float64]:
    """Scores of clusters, whose mean is the mean over languages of the mean score of each, to be resampled.

    The mean of resampled clusters is that of languages whose items are drawn together, to first order in the sizes that the
    languages have in a sample. If every cluster has an item in every language, a score is the mean of these items.

    >>> cluster_scores({"de": [1, 0], "sw": [1, 1]}, {"de": [7, 8], "sw": [7, 8]}).tolist()
    [1.0, 0.5]
    """
    values = {language: np.asarray(one, dtype=np.float64) for language, one in scores.items()}
    sum_k = cluster_sums({language: one_n - one_n.mean() for language, one_n in values.items()}, ids)
    mean = sum(float(one_n.mean()) for one_n in values.values()) / len(values)
    return np.round(len(sum_k) * sum_k + mean, 12).astype(np.float64)


def cluster_interval(
    scores: Mapping[str, ArrayLike], ids: Mapping[str, Sequence[int]], *, resamples: int, seed: int
) -> tuple[float, float]:
    """Bootstrap interval, in percent, of the mean over languages whose items are drawn together; see `cluster_scores`."""
    means_r = resampled_means({"": cluster_scores(scores, ids)}, resamples=resamples, seed=seed)
    return percentile_interval(np.clip(means_r, 0, 100))  # the first order may go beyond


def two_sided_p_value(difference_r: NDArray[np.floating]) -> float:
    """Two-sided bootstrap p-value of "no difference", which inverts the percentile interval.

    With ``B`` resampled differences ``d`` it is ``2 · min(1 + #{d ≤ 0}, 1 + #{d ≥ 0}) / (1 + B)``, at most 1. It is below
    ``1 − confidence`` only if the interval excludes zero, and never below ``2 / (1 + B)``: a correction over many languages
    needs many resamples.

    >>> two_sided_p_value(np.linspace(1, 3, 99))
    0.02
    """
    tail = min(np.count_nonzero(difference_r <= _ZERO), np.count_nonzero(difference_r >= -_ZERO))
    return min(1.0, 2 * (1 + int(tail)) / (1 + len(difference_r)))


def sign_flip_p_value(difference_n: ArrayLike) -> float:
    """Two-sided exact p-value of "no difference" if at most `FEW_CHANGES` items changed, and 0 if more did.

    Without a difference, each change is as likely to be a gain as a loss of the same size. The p-value is the share of all
    combinations of signs whose sum is at least as far from zero. The bootstrap is too certain about few changes: every
    resample of four gains is a gain.

    >>> sign_flip_p_value([0, 0, 0.5, 0.5, 0.5, 0.5]), sign_flip_p_value([0, 0])
    (0.125, 1.0)
    """
    values_n = np.asarray(difference_n, dtype=np.float64)
    changed_k = values_n[np.abs(values_n) > _ZERO]
    if len(changed_k) > FEW_CHANGES:
        return 0.0
    sign_ck = 1 - 2 * (np.arange(2 ** len(changed_k))[:, None] >> np.arange(len(changed_k)) & 1)
    return float(np.mean(np.abs(sign_ck @ changed_k) >= abs(changed_k.sum()) - _ZERO))


def percentile_interval(values_r: NDArray[np.floating], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Ends of the central interval that holds a share ``confidence`` of resampled values."""
    low, high = np.quantile(values_r, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Correct p-values by Holm's step-down method, which controls the family-wise error rate.

    Reference: Holm 1979, "A simple sequentially rejective multiple test procedure".

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'b': 0.06, 'c': 0.06}
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


@checked
def verdict(difference: Finite, p_value: Share) -> Verdict:
    """Return the verdict on a difference: ``"tie"`` unless its (corrected) p-value is below `ALPHA`.

    >>> verdict(2.5, 0.01), verdict(-2.5, 0.01), verdict(2.5, 0.2)
    ('better', 'worse', 'tie')
    """
    if p_value >= ALPHA or difference == 0:
        return "tie"
    return "better" if difference > 0 else "worse"


def resampled_means(scores: Mapping[str, ArrayLike], *, resamples: int, seed: int) -> NDArray[np.float64]:
    """Mean over languages of the resampled mean of each, in percent, shape ``(resamples,)``.

    Languages are visited in alphabetical order, so that the result does not depend on the order of the mapping.
    """
    if not scores:
        raise ValueError("A bootstrap needs the scores of at least one language, but got none.")
    rng = np.random.default_rng(seed)
    means_r = np.zeros(resamples)
    for language in sorted(scores):
        values_n = np.asarray(scores[language], dtype=np.float64)
        if not len(values_n):
            raise ValueError(f"A bootstrap needs scores, but the list of scores is empty (language {language!r}).")
        values_v, counts_v = np.unique(values_n, return_counts=True)
        rows = max(1, CHUNK // len(values_v))
        for start in range(0, resamples, rows):
            drawn_rv = rng.multinomial(len(values_n), counts_v / len(values_n), size=min(rows, resamples - start))
            means_r[start : start + rows] += drawn_rv @ values_v / len(values_n)
    return 100 * means_r / len(scores)
