"""Margins: find neighbours that translate each other, and a threshold that separates them from the rest.

Pairs are scored by their similarity relative to the neighbours of both sides, and each sentence is used once.

Reference: Artetxe and Schwenk 2019, "Margin-based Parallel Corpus Mining with Multilingual Sentence Embeddings", ACL.

Shapes: ``n`` sources, ``m`` targets, ``q`` queries, ``k`` neighbours, ``c`` candidates, ``h`` hidden.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from metaphrase.io.arguments import Count, checked
from metaphrase.mining.search import (
    QUERIES,
    Approximate,
    Index,
    Neighbours,
    Rows,
    nearest_neighbours,
    recall,
    unit_rows,
)

logger = logging.getLogger(__name__)

Margin = Literal["ratio", "distance", "absolute"]
Retrieval = Literal["max", "forward", "backward", "intersection"]
MARGINS: tuple[str, ...] = get_args(Margin)
RETRIEVALS: tuple[str, ...] = get_args(Retrieval)


class Pairs(NamedTuple):
    """Pairs of sentences with their scores.

    Attributes:
        score_c: Margin scores, float64.
        source_c: Rows of the sources.
        target_c: Rows of the targets.
    """

    score_c: NDArray[np.floating]
    source_c: NDArray[np.integer]
    target_c: NDArray[np.integer]

    def take(self, chosen_c: NDArray[Any] | slice) -> Pairs:
        """Return some of the pairs, by numbers, a mask or a slice."""
        return Pairs(self.score_c[chosen_c], self.source_c[chosen_c], self.target_c[chosen_c])

    def best_first(self) -> Pairs:
        """Sort by descending score; the sort is stable."""
        return self.take(np.argsort(-self.score_c, kind="stable"))


def margin_score(
    similarity: NDArray[np.floating],
    source_mean: NDArray[np.floating],
    target_mean: NDArray[np.floating],
    margin: Margin = "ratio",
) -> NDArray[np.floating]:
    """Compute margins: similarities relative to those of the neighbours. The arguments broadcast.

    With ``b`` the mean of the two means: ``a / b`` (ratio), ``a − b`` (distance) or ``a`` (absolute).

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
        return similarity / mean
    if margin == "distance":
        return similarity - mean
    if margin == "absolute":
        return similarity + 0 * mean
    raise ValueError(f"Unknown margin {margin!r}; choose from {', '.join(MARGINS)}.")


def neighbour_scores(forward: Neighbours, backward: Neighbours, margin: Margin = "ratio") -> NDArray[np.floating]:
    """Compute the margin of each query with each of its neighbours, ``-inf`` for missing neighbours.

    Args:
        forward: Neighbours of the queries among the other side.
        backward: Neighbours of the other side among the queries.
        margin: See `margin_score`.

    Returns:
        Shape ``(queries, k)``.
    """
    mean_q, other_mean = forward.mean_q, backward.mean_q
    score_qk = margin_score(forward.similarity_qk, mean_q[:, None], other_mean[forward.row_qk], margin)
    if forward.row_qk.size and forward.row_qk.min() < 0:
        score_qk[forward.row_qk < 0] = -np.inf
    return score_qk


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
    if retrieval not in RETRIEVALS:
        raise ValueError(f"Unknown retrieval {retrieval!r}; choose from {', '.join(RETRIEVALS)}.")
    ways = []
    for there, back in ((forward, backward), (backward, forward)):
        score_qk = neighbour_scores(there, back, margin)
        best_q = score_qk.argmax(axis=1)[:, None]
        row_q = np.take_along_axis(there.row_qk, best_q, axis=1)[:, 0]
        ways.append((np.take_along_axis(score_qk, best_q, axis=1)[:, 0].astype(np.float64), row_q))
    (forward_score_n, target_n), (backward_score_m, source_m) = ways
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
    pairs = (pairs if found_c.all() else pairs.take(found_c)).best_first()
    return one_to_one(pairs) if retrieval == "max" else pairs


def one_to_one(pairs: Pairs) -> Pairs:
    """Take pairs in order, and use each sentence once.

    Each round takes the pairs that come first for both of their sentences, and discards the other pairs of these
    sentences. A few rounds select the same pairs as a loop over all of them.

    Args:
        pairs: Best first.

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
        correct: Number of correct pairs among them.
    """

    threshold: float
    precision: float
    recall: float
    f1: float
    kept: int
    correct: int


def best_threshold(score_c: ArrayLike, correct_c: ArrayLike, gold: int) -> Threshold:
    """Find the threshold with the best F1.

    It lies midway between the last pair that is kept and the next one, or just below the last pair. Pairs with equal
    scores are not separated. The highest of equally good thresholds wins. If no pair is correct, the threshold keeps
    none.

    Args:
        score_c: Score of each pair.
        correct_c: Whether the pair is correct.
        gold: Number of correct pairs, found or not.

    Raises:
        ValueError: The arguments differ in length, or there are no gold pairs.

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
    if not is_correct_c.any():
        return Threshold(float(np.nextafter(max(scores_c, default=0.0), np.inf)), 0.0, 0.0, 0.0, 0, 0)
    order_c = np.argsort(-scores_c, kind="stable")
    scores_c, found_c = scores_c[order_c], np.cumsum(is_correct_c[order_c])
    f1_c = 2 * found_c / (np.arange(1, len(scores_c) + 1) + gold)
    f1_c[:-1][scores_c[:-1] == scores_c[1:]] = -1
    at = int(f1_c.argmax())
    is_last = at == len(scores_c) - 1
    threshold = np.nextafter(scores_c[at], -np.inf) if is_last else (scores_c[at] + scores_c[at + 1]) / 2
    return Threshold(float(threshold), *f1_scores(int(found_c[at]), at + 1, gold), at + 1, int(found_c[at]))


def f1_scores(correct: int, kept: int, gold: int) -> tuple[float, float, float]:
    """Compute precision, recall and F1 from counts; undefined values are 0.

    >>> f1_scores(1, 2, 4)
    (0.5, 0.25, 0.3333333333333333)
    """
    total = kept + gold
    return correct / kept if kept else 0.0, correct / gold if gold else 0.0, 2 * correct / total if total else 0.0


def suggest_threshold(pairs: Pairs, runner_up_n: NDArray[np.floating], *, rate: float = 0.01) -> float | None:
    """Estimate a threshold for text without gold pairs.

    The second-best neighbour of a source, its runner-up, is almost never its translation, so the scores of runners-up
    approximate those of wrong pairs. The result is the lowest threshold above which there are at most ``rate``
    runners-up per pair. It is a rough estimate, and ``rate`` is not the share of wrong pairs: a runner-up scores less
    than the best neighbour of a source without a translation, so the share of wrong pairs may be far larger. Inspect
    pairs on both sides of it.

    Args:
        pairs: The pairs.
        runner_up_n: Second-best margin of each source; see `runners_up`.
        rate: Runners-up per pair that is kept.

    Returns:
        The threshold, or None if runners-up score like pairs.
    """
    score_c = np.sort(np.asarray(pairs.score_c, dtype=np.float64))[::-1]
    decoy_n = np.sort(np.asarray(runner_up_n, dtype=np.float64))
    above_c = len(decoy_n) - np.searchsorted(decoy_n, score_c, side="left")
    good_c = np.flatnonzero(above_c <= rate * np.arange(1, len(score_c) + 1))
    return float(np.nextafter(score_c[good_c[-1]], -np.inf)) if len(good_c) else None


def runners_up(forward: Neighbours, backward: Neighbours, margin: Margin = "ratio") -> NDArray[np.floating]:
    """Return the second-best margin of each source with two neighbours."""
    score_nk = neighbour_scores(forward, backward, margin)
    if score_nk.shape[1] < 2:
        return np.empty(0, dtype=score_nk.dtype)
    second_n = np.partition(score_nk, -2, axis=1)[:, -2]
    return second_n[np.isfinite(second_n)]


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
        index: ``"exact"``, or an approximate search (``"ivf"``, ``"hnsw"``; see `Approximate`), which is faster above
            about 200,000 sentences. Its recall depends on the sentences and is logged.
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
    ways = []
    for query_qh, pool_ph in (sides, sides[::-1]):
        exact = nearest_neighbours(query_qh if index == "exact" else query_qh[:QUERIES], pool_ph, k, device=device)
        if index != "exact":
            pool = Rows([pool_ph])
            found = Approximate.build(pool, index, probes=probes).search(query_qh, pool, k)
            share = recall(found.take(slice(QUERIES)), exact)
            logger.info("The %s index finds %.1f %% of the exact %d neighbours.", index, 100 * share, k)
            exact = found
        ways.append(exact)
    return select_pairs(*ways, margin=margin, retrieval=retrieval)
