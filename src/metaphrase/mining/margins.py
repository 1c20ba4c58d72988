"""Margins: find neighbours that translate each other, and a threshold that separates them from the rest.

Pairs are scored by their similarity relative to the neighbours of both sides, and each sentence is used once.

Reference: Artetxe and Schwenk 2019, "Margin-based Parallel Corpus Mining with Multilingual Sentence Embeddings", ACL.

Shapes: ``n`` sources, ``m`` targets, ``q`` queries, ``k`` neighbours, ``c`` candidates, ``h`` hidden.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from metaphrase.io.arguments import Count, checked
from metaphrase.mining.options import Index, Margin, Retrieval
from metaphrase.mining.search import (
    RECALL_QUERIES,
    Approximate,
    Neighbours,
    Rows,
    nearest_neighbours,
    recall,
    unit_rows,
)

logger = logging.getLogger(__name__)

#: Share of the pairs above a threshold, the best ones, that are taken as translations when wrong pairs are looked for.
_CERTAIN = 0.8
#: Maximum number of times that a threshold is estimated from the pairs above the one before.
_ROUNDS = 10
#: Smallest mean cosine that a similarity is divided by.
_SMALLEST = 1e-6


class Pairs(NamedTuple):
    """Pairs of sentences: their margin scores, float64, and the row numbers of their sources and targets."""

    score_c: NDArray[np.floating]
    source_c: NDArray[np.integer]
    target_c: NDArray[np.integer]

    def take(self, chosen_c: NDArray[Any] | slice) -> Pairs:
        """Return some of the pairs, by numbers, a mask or a slice."""
        return Pairs(self.score_c[chosen_c], self.source_c[chosen_c], self.target_c[chosen_c])


@checked
def margin_score(
    similarity: NDArray[np.floating],
    source_mean: NDArray[np.floating],
    target_mean: NDArray[np.floating],
    margin: Margin = "ratio",
) -> NDArray[np.floating]:
    """Compute margins: similarities relative to those of the neighbours. The arguments broadcast.

    With ``b`` the mean of the two means: ``a / b`` (ratio), ``a − b`` (distance) or ``a`` (absolute). A ratio divides by
    at least 1e-6: below 0, the least similar pairs would have the largest ratios.

    Args:
        similarity: Cosine ``a`` of a pair.
        source_mean: Mean cosine of the source with its ``k`` nearest targets.
        target_mean: Mean cosine of the target with its ``k`` nearest sources.
        margin: The kind of margin.

    Raises:
        ValueError: The margin is unknown.

    Reference: Artetxe and Schwenk 2019, section 3.1. Equation 8 of Li et al. 2023 (DAP) divides by the sum of the
    means: half this ratio.

    >>> margin_score(np.array([0.9]), np.array([0.7]), np.array([0.65])).round(6)
    array([1.333333])
    """
    mean = (source_mean + target_mean) / 2
    if margin == "ratio":
        return similarity / np.maximum(mean, _SMALLEST)
    if margin == "distance":
        return similarity - mean
    return similarity + 0 * mean


def neighbour_scores(forward: Neighbours, backward: Neighbours, margin: Margin = "ratio") -> NDArray[np.floating]:
    """Compute the margin of each query with each of its neighbours, ``-inf`` for missing neighbours; see `margin_score`.

    ``forward`` are the neighbours of the queries among the other side, ``backward`` those of the other side among the
    queries. Returns an array of shape ``(queries, k)``.
    """
    mean_q, other_mean = forward.mean_q, backward.mean_q
    score_qk = margin_score(forward.similarity_qk, mean_q[:, None], other_mean[forward.row_qk], margin)
    score_qk[forward.row_qk < 0] = -np.inf
    return score_qk


@checked
def select_pairs(
    forward: Neighbours, backward: Neighbours, *, margin: Margin = "ratio", retrieval: Retrieval = "max"
) -> Pairs:
    """Select pairs from the neighbours of both directions, best first.

    Args:
        forward: Neighbours of the sources among the targets.
        backward: Neighbours of the targets among the sources.
        margin: See `margin_score`.
        retrieval: ``"forward"`` pairs each source with the neighbour of the largest margin, ``"backward"`` each target.
            ``"intersection"`` keeps the pairs found in both directions. ``"max"`` keeps the pairs of either direction,
            best first, and uses each sentence once (`one_to_one`).

    Raises:
        ValueError: The margin or the retrieval is unknown.

    Reference: Artetxe and Schwenk 2019, section 3.2.
    """
    best = []
    for there, back in ((forward, backward), (backward, forward)):
        score_qk = neighbour_scores(there, back, margin)
        best_q = score_qk.argmax(axis=1)[:, None]
        row_q = np.take_along_axis(there.row_qk, best_q, axis=1)[:, 0]
        best.append((np.take_along_axis(score_qk, best_q, axis=1)[:, 0].astype(np.float64), row_q))
    (forward_score_n, target_n), (backward_score_m, source_m) = best
    sources_n = np.arange(len(target_n), dtype=np.int32)
    targets_m = np.arange(len(source_m), dtype=np.int32)
    if retrieval == "forward":
        pairs = Pairs(forward_score_n, sources_n, target_n)
    elif retrieval == "backward":
        pairs = Pairs(backward_score_m, source_m, targets_m)
    elif retrieval == "intersection":
        pairs = Pairs(forward_score_n, sources_n, target_n).take(source_m[target_n] == sources_n)
    else:
        pairs = Pairs(
            np.concatenate([forward_score_n, backward_score_m]),
            np.concatenate([sources_n, source_m]),
            np.concatenate([target_n, targets_m]),
        )
    found_c = np.isfinite(pairs.score_c)
    pairs = pairs if found_c.all() else pairs.take(found_c)
    pairs = pairs.take(np.argsort(-pairs.score_c, kind="stable"))
    return one_to_one(pairs) if retrieval == "max" else pairs


def one_to_one(pairs: Pairs) -> Pairs:
    """Take pairs in order, which are sorted best first, and use each sentence once.

    Each round takes the pairs that come first for both of their sentences, and discards the other pairs of these
    sentences. A few rounds select the same pairs as a loop over all of them.

    >>> one_to_one(Pairs(np.array([3, 2, 1]), np.array([0, 0, 1]), np.array([1, 0, 0]))).target_c
    array([1, 0])
    """
    if not len(pairs.score_c):
        return pairs
    taken_c = np.zeros(len(pairs.score_c), dtype=bool)
    left_c = np.arange(len(taken_c), dtype=np.int32)
    firsts = [np.empty(column.max() + 1, dtype=np.int32) for column in pairs[1:]]
    while len(left_c):
        ends = [column[left_c] for column in pairs[1:]]
        for first, end_c in zip(firsts, ends, strict=True):
            first[end_c[::-1]] = left_c[::-1]  # the last assignment wins: the first pair
        is_first_c = (firsts[0][ends[0]] == left_c) & (firsts[1][ends[1]] == left_c)
        taken_c[left_c[is_first_c]] = True
        for first, end_c in zip(firsts, ends, strict=True):
            first[end_c[is_first_c]] = -1
        left_c = left_c[(firsts[0][ends[0]] >= 0) & (firsts[1][ends[1]] >= 0)]
    return pairs.take(taken_c)


class Threshold(NamedTuple):
    """A threshold of scored pairs, and the quality of the pairs above it.

    Attributes:
        threshold: Pairs above it are kept; no pair has exactly this score.
        precision: Share of the kept pairs that are correct.
        recall: Share of the correct pairs that are kept.
        f1: Their harmonic mean.
        kept: Number of kept pairs.
        correct: Number of correct pairs among them; a fraction if it is an estimate.
    """

    threshold: float
    precision: float
    recall: float
    f1: float
    kept: int
    correct: float


def best_threshold(score_c: ArrayLike, correct_c: ArrayLike, gold: int) -> Threshold:
    """Find the threshold with the best F1.

    It lies midway between the last pair that is kept and the next one, or just below the last pair. Pairs with equal scores,
    or scores with no number between them, are not separated. The highest of equally good thresholds wins. If no pair is
    correct, the threshold keeps none. ``gold`` is the number of correct pairs, found or not.

    Raises:
        ValueError: The arguments differ in length, a score is NaN or infinite, or there are no gold pairs.

    >>> best_threshold([0.9, 0.8, 0.7], [True, False, True], gold=2)._replace(threshold=0).f1
    0.8
    """
    scores_c = np.asarray(score_c, dtype=np.float64)
    is_correct_c = np.asarray(correct_c, dtype=bool)
    if len(scores_c) != len(is_correct_c) or gold < 1:
        raise ValueError(
            f"Expected gold pairs and one label per score, but got {gold} gold pairs, {len(scores_c)} scores and "
            f"{len(is_correct_c)} labels."
        )
    if not np.isfinite(scores_c).all():
        raise ValueError("A score is NaN or infinite. Score the pairs with another encoder.")
    if not is_correct_c.any():
        return Threshold(float(np.nextafter(max(scores_c, default=0.0), np.inf)), 0.0, 0.0, 0.0, 0, 0)
    order_c = np.argsort(-scores_c, kind="stable")
    return _best_f1(scores_c[order_c], np.cumsum(is_correct_c[order_c]), gold)


def _best_f1(score_c: NDArray[np.float64], correct_c: NDArray[Any], gold: float) -> Threshold:
    """The threshold with the best F1, from descending scores and the number of correct pairs up to each."""
    f1_c = 2 * correct_c / (np.arange(1, len(score_c) + 1) + gold)
    middle_c = (score_c[:-1] + score_c[1:]) / 2
    f1_c[:-1][(middle_c >= score_c[:-1]) | (middle_c <= score_c[1:])] = -1
    at = int(f1_c.argmax())
    threshold = middle_c[at] if at < len(middle_c) else np.nextafter(score_c[at], -np.inf)
    correct = correct_c[at].item()
    return Threshold(float(threshold), *f1_scores(correct, at + 1, gold), at + 1, correct)


def f1_scores(correct: float, kept: int, gold: float) -> tuple[float, float, float]:
    """Compute precision, recall and F1 from counts; undefined values are 0.

    >>> f1_scores(1, 2, 4)
    (0.5, 0.25, 0.3333333333333333)
    """
    total = kept + gold
    return correct / kept if kept else 0.0, correct / gold if gold else 0.0, 2 * correct / total if total else 0.0


def suggest_threshold(
    pairs: Pairs,
    forward: Neighbours,
    backward: Neighbours,
    *,
    margin: Margin = "ratio",
    retrieval: Retrieval = "max",
) -> tuple[Threshold | None, NDArray[np.float64]]:
    """Estimate the threshold with the best F1 for text without gold pairs.

    Scores of wrong pairs are known from an experiment: if the translation of a sentence is removed from its neighbours, the
    pair that it then forms is wrong. The best pairs are taken as translations and removed, and pairs are selected again.
    The number of wrong pairs follows from the low scores, below the median of these, where nearly all pairs are wrong.

    The estimate is rough, and optimistic if few sentences have a translation. Inspect pairs on both sides of the threshold.

    Args:
        pairs: What `select_pairs` returned with the other arguments.
        forward: Neighbours of the sources among the targets.
        backward: Neighbours of the targets among the sources.
        margin: See `margin_score`.
        retrieval: See `select_pairs`.

    Returns:
        The threshold with its expected precision, recall (of the translations among the pairs) and F1, or None if wrong
        pairs score like all pairs or there are none; and the scores of the wrong pairs.
    """
    score_c = np.asarray(pairs.score_c, dtype=np.float64)
    best, kept = None, len(score_c)
    for _ in range(_ROUNDS):
        removed = pairs.take(slice(int(np.ceil(_CERTAIN * kept))))
        wrong_d = _wrong_scores(removed, forward, backward, margin, retrieval)
        low = np.median(wrong_d) if len(wrong_d) else np.inf
        if not (below := np.searchsorted(wrong_d, low)):
            return None, wrong_d
        repeats = min(np.count_nonzero(score_c < low) / below, len(score_c) / len(wrong_d))
        above_c = len(wrong_d) - np.searchsorted(wrong_d, score_c)
        correct_c = np.maximum.accumulate(np.maximum(np.arange(1, len(score_c) + 1) - repeats * above_c, 0))
        if correct_c[-1] < 1:
            return None, wrong_d
        best = _best_f1(score_c, correct_c, correct_c[-1].item())
        if best.kept == kept:
            break
        kept = best.kept
    return best, wrong_d


def _wrong_scores(
    translations: Pairs, forward: Neighbours, backward: Neighbours, margin: Margin, retrieval: Retrieval
) -> NDArray[np.float64]:
    """Ascending scores of the pairs that sentences form if their translations are removed from their neighbours."""
    remaining, is_known = [], []
    for neighbours, query_c, translation_c in (
        (forward, translations.source_c, translations.target_c),
        (backward, translations.target_c, translations.source_c),
    ):
        if neighbours.row_qk.shape[1] < 2:
            return np.empty(0)
        translation_q = np.full(len(neighbours.row_qk), -2, dtype=np.int32)
        translation_q[query_c] = translation_c
        removed_qk = neighbours.row_qk == translation_q[:, None]
        similarity_qk = np.where(removed_qk, np.float32(-np.inf), neighbours.similarity_qk)
        remaining.append(Neighbours(similarity_qk, np.where(removed_qk, np.int32(-1), neighbours.row_qk)))
        is_known.append(translation_q >= 0)
    pairs = select_pairs(*remaining, margin=margin, retrieval=retrieval)
    return np.sort(pairs.score_c[is_known[0][pairs.source_c] | is_known[1][pairs.target_c]])


@checked
def mine(
    source_nh: NDArray[Any],
    target_mh: NDArray[Any],
    *,
    k: Count = 4,
    margin: Margin = "ratio",
    retrieval: Retrieval = "max",
    index: Index = "exact",
    probes: Count = 16,
    device: str | None = None,
) -> Pairs:
    """Mine the pairs of two sets of embeddings, best first.

    Args:
        source_nh: Embeddings of the sources, shape ``(n, hidden)``. float32 rows of length 1 are not copied.
        target_mh: Embeddings of the targets, shape ``(m, hidden)``.
        k: Neighbours per sentence.
        margin: See `margin_score`.
        retrieval: See `select_pairs`.
        index: ``"exact"``, or an approximate search (``"ivf"``, ``"hnsw"``; see `Approximate`), which is faster for
            large corpora. Its recall depends on the sentences and is logged.
        probes: See `Approximate.build`.
        device: Device of an exact search; see `nearest_neighbours`.

    Raises:
        ValueError: A side is empty, NaN or infinite, the sides differ in width, or an option is unknown.
        ImportError: The index is approximate and faiss is not installed.

    >>> eye = np.eye(3, dtype=np.float32)
    >>> mine(eye, eye[[2, 0, 1]], k=2).target_c
    array([1, 2, 0], dtype=int32)
    """
    sides = unit_rows(source_nh), unit_rows(target_mh)
    directions = []
    for query_qh, pool_ph in (sides, sides[::-1]):
        if index == "exact":
            directions.append(nearest_neighbours(query_qh, pool_ph, k, device=device))
            continue
        pool = Rows([pool_ph])
        approximate = Approximate.build(pool, index, probes=probes).search(query_qh, pool, k)
        exact = nearest_neighbours(query_qh[:RECALL_QUERIES], pool_ph, k, device=device)
        share = recall(approximate.take(slice(RECALL_QUERIES)), exact)
        logger.info("The %s index finds %.1f %% of the exact %d neighbours.", index, 100 * share, k)
        directions.append(approximate)
    return select_pairs(*directions, margin=margin, retrieval=retrieval)
