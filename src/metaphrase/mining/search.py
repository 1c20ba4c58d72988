"""Bitext mining: which sentences of two monolingual texts translate each other?

Neighbours are searched in both directions, pairs are scored by how far their similarity stands out among the neighbours
of both sides, and each sentence is used once. Everything behind the search is vectorised: it takes a fraction of its
time, and memory for the results alone.

Reference: Artetxe and Schwenk 2019, "Margin-based Parallel Corpus Mining with Multilingual Sentence Embeddings", ACL.

Shapes: ``n`` sources, ``m`` targets, ``q`` queries, ``p`` rows that are searched, ``k`` neighbours, ``c`` candidates,
``h`` hidden.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from metaphrase.exceptions import MissingExtraError, ModelError

try:
    import faiss
except ImportError:  # exact search then runs on torch
    faiss = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

Margin = Literal["ratio", "distance", "absolute"]
Retrieval = Literal["max", "forward", "backward", "intersection"]
Index = Literal["exact", "ivf", "hnsw"]
MARGINS: tuple[str, ...] = get_args(Margin)
RETRIEVALS: tuple[str, ...] = get_args(Retrieval)
INDEXES: tuple[str, ...] = get_args(Index)

#: Queries searched at a time: what a search holds besides its results is a tile of similarities (4 MB).
_QUERIES = 1024
#: Rows of a tile on an accelerator, and on a CPU.
_TILE = 1 << 14
_CPU_TILE = 1 << 10
#: Candidates of an approximate search for each neighbour that is kept, before they are ranked exactly.
_RERANK = 4
#: Rows that an approximate index is trained on, for each of its cells.
_TRAINING = 64
#: How far from 1 the length of a unit vector may be.
_UNIT = 1e-5


class Rows:
    """Unit embeddings in blocks, of arrays or of files mapped into memory.

    Args:
        blocks: Rows of length 1, float32 or float16, all blocks but the last equally long. What is read of float16 is
            brought to length 1 again.
    """

    def __init__(self, blocks: Sequence[NDArray[Any]]) -> None:
        self.blocks = blocks
        self.size = len(blocks[0])
        self.hidden = blocks[0].shape[1]

    def __len__(self) -> int:
        return self.size * (len(self.blocks) - 1) + len(self.blocks[-1])

    def block(self, at: int) -> NDArray[np.float32]:
        """A block as float32."""
        return _float32(self.blocks[at])

    def take(self, row_n: NDArray[np.integer]) -> NDArray[np.float32]:
        """Some rows, shape ``(n, hidden)``; negative numbers give whatever."""
        rows_nh = np.empty((len(row_n), self.hidden), dtype=np.float32)
        block_n, inner_n = np.divmod(np.maximum(row_n, 0), self.size)
        for at in np.unique(block_n):
            here_n = block_n == at
            rows_nh[here_n] = _float32(self.blocks[at][inner_n[here_n]])
        return rows_nh


def _float32(rows_nh: NDArray[Any]) -> NDArray[np.float32]:
    if rows_nh.dtype == np.float32:
        return np.ascontiguousarray(rows_nh)
    return unit_rows(rows_nh)


def unit_rows(embeddings_nh: NDArray[Any]) -> NDArray[np.float32]:
    """Embeddings as float32 rows of length 1: the array itself where that is what it holds, else a copy.

    Raises:
        ValueError: The array does not have two axes.
        ModelError: An embedding is not finite.
    """
    if embeddings_nh.ndim != 2:
        raise ValueError(f"Embeddings have the shape (sentences, hidden), not {embeddings_nh.shape}.")
    rows_nh = np.ascontiguousarray(embeddings_nh, dtype=np.float32)
    length_n = np.sqrt(np.einsum("nh,nh->n", rows_nh, rows_nh))
    if not np.isfinite(length_n).all():
        raise ModelError(
            f"{np.count_nonzero(~np.isfinite(length_n))} of {len(length_n)} embeddings are not finite. "
            "The model has diverged, or overflows in half precision."
        )
    if np.all((np.abs(length_n - 1) < _UNIT) | (length_n == 0)):
        return rows_nh
    return rows_nh / np.maximum(length_n, np.finfo(np.float32).tiny)[:, None]


# -------------------------------------------------------------------------------------------------------------- search


class Neighbours(NamedTuple):
    """The nearest rows of the other side, most similar first.

    Attributes:
        similarity_qk: Their cosines, ``-inf`` where an approximate search found too few, shape ``(queries, k)``.
        row_qk: Which rows they are, ``-1`` where there is none, shape ``(queries, k)``.
    """

    similarity_qk: NDArray[np.float32]
    row_qk: NDArray[np.int32]

    @property
    def mean_q(self) -> NDArray[np.float32]:
        """Mean cosine of a query with its neighbours, shape ``(queries,)``."""
        if self.row_qk.size and self.row_qk.min() < 0:
            there_qk = self.row_qk >= 0
            total_q = np.where(there_qk, self.similarity_qk, 0).sum(axis=1)
            return total_q / np.maximum(there_qk.sum(axis=1), 1, dtype=np.float32)
        return self.similarity_qk.mean(axis=1)

    def take(self, rows: slice) -> Neighbours:
        """Those of some queries."""
        return Neighbours(self.similarity_qk[rows], self.row_qk[rows])


class Approximate:
    """An index of faiss whose candidates are ranked again by their exact cosines.

    The index keeps a byte a dimension (``SQ8``); similarities, margins and the order of what it finds are exact, and
    what it misses is measured by `recall`.

    Args:
        index: The trained and filled index.
    """

    def __init__(self, index: Any) -> None:
        self.index = index

    @classmethod
    def build(cls, pool: Rows, kind: Index, *, probes: int = 16, seed: int = 0) -> Approximate:
        """Train an index on some rows, and add all.

        Args:
            pool: The rows to search.
            kind: ``"ivf"``, cells of which the nearest ones are searched; ``"hnsw"``, a graph of neighbours.
            probes: Cells of ``"ivf"`` that are searched for a query; for ``"hnsw"``, four times as many rows stay in
                view during a search.
            seed: Of the choice of training rows.

        Raises:
            ImportError: faiss is not installed.
            ValueError: There is no such kind.
        """
        if faiss is None:
            raise MissingExtraError("Approximate search is faiss's: pip install 'metaphrase[mining]'.")
        if kind not in ("ivf", "hnsw"):
            raise ValueError(f"There is no index {kind!r}; there are {', '.join(INDEXES)}.")
        n = len(pool)
        cells = _cells(n)
        name = f"IVF{cells},SQ8" if kind == "ivf" else "HNSW32,SQ8"
        index: Any = faiss.index_factory(pool.hidden, name, faiss.METRIC_INNER_PRODUCT)
        size = _TRAINING * max(cells, 256)
        drawn_n = np.random.default_rng(seed).integers(n, size=size)
        index.train(pool.take(np.unique(drawn_n) if n > size else np.arange(n)))
        for at in range(len(pool.blocks)):
            index.add(pool.block(at))
        if kind == "ivf":
            index.nprobe = min(probes, cells)
        else:
            index.hnsw.efSearch = 4 * probes
        return cls(index)

    def save(self, path: str | Path) -> None:
        """Write the index, whole or not at all."""
        part = Path(path).with_suffix(".part")
        faiss.write_index(self.index, str(part))
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Approximate:
        """Read what `save` wrote."""
        return cls(faiss.read_index(str(path)))

    def search(self, query_qh: NDArray[np.float32], pool: Rows, k: int) -> Neighbours:
        """The neighbours of some queries; `pool` is what the index was built of."""
        found = _empty(len(query_qh), min(k, len(pool)))
        for first in range(0, len(query_qh), _QUERIES // 4):
            rows = slice(first, first + _QUERIES // 4)
            row_qc = self.index.search(query_qh[rows], min(_RERANK * k, len(pool)))[1]
            candidate_qch = pool.take(row_qc.ravel()).reshape(*row_qc.shape, -1)
            similarity_qc = np.einsum("qh,qch->qc", query_qh[rows], candidate_qch)
            similarity_qc[row_qc < 0] = -np.inf
            _keep_best(found, rows, similarity_qc, row_qc)
        return found


def nearest_neighbours(
    query_qh: NDArray[np.float32],
    pool: NDArray[np.float32] | Rows,
    k: int = 4,
    *,
    device: str | None = None,
) -> Neighbours:
    """The rows with the largest cosines, searched exactly; of equal ones the first.

    Args:
        query_qh: Unit rows, shape ``(queries, hidden)``; see `unit_rows`.
        pool: Unit rows to search, shape ``(rows, hidden)``, or in blocks, of which one at a time is in memory.
        k: How many; all where there are fewer rows.
        device: Where torch searches, such as ``"cuda"``. None searches on the CPU: with faiss where it is installed
            (the brute force of its ``IndexFlatIP``, without that index's copy of the rows).

    Raises:
        ValueError: A side is empty, the sides differ in width, or ``k`` is not positive.
    """
    pool = pool if isinstance(pool, Rows) else Rows([pool])
    if not len(query_qh) or not len(pool):
        raise ValueError(f"Both sides need sentences, but there are {len(query_qh)} queries for {len(pool)} rows.")
    if query_qh.shape[1] != pool.hidden:
        raise ValueError(f"The two sides are embedded in {query_qh.shape[1]} and {pool.hidden} dimensions.")
    if k < 1:
        raise ValueError(f"There should be at least one neighbour, not k={k}.")
    k = min(k, len(pool))
    found = _empty(len(query_qh), k)
    for at in range(len(pool.blocks)):
        block_ph = pool.block(at)
        first_row = at * pool.size
        searcher = _faiss if device is None and faiss is not None else _torch
        for rows, similarity_qk, row_qk in searcher(query_qh, block_ph, min(k, len(block_ph)), device or "cpu"):
            row_qk = row_qk + first_row
            if at:
                similarity_qk = np.concatenate([found.similarity_qk[rows], similarity_qk], axis=1)
                row_qk = np.concatenate([found.row_qk[rows], row_qk], axis=1)
            _keep_best(found, rows, similarity_qk, row_qk)
    return found


def _empty(queries: int, k: int) -> Neighbours:
    return Neighbours(np.full((queries, k), -np.inf, dtype=np.float32), np.full((queries, k), -1, dtype=np.int32))


def _keep_best(
    found: Neighbours, rows: slice, similarity_qc: NDArray[np.float32], row_qc: NDArray[np.integer]
) -> None:
    """Put the best of some candidates where they belong; earlier ones win over equals."""
    order_qc = np.argsort(-similarity_qc, axis=1, kind="stable")[:, : found.row_qk.shape[1]]
    found.similarity_qk[rows, : order_qc.shape[1]] = np.take_along_axis(similarity_qc, order_qc, axis=1)
    found.row_qk[rows, : order_qc.shape[1]] = np.take_along_axis(row_qc, order_qc, axis=1)


def _faiss(query_qh: NDArray[np.float32], pool_ph: NDArray[np.float32], k: int, device: str) -> Any:
    for first in range(0, len(query_qh), _QUERIES):
        rows = slice(first, first + _QUERIES)
        yield rows, *faiss.knn(query_qh[rows], pool_ph, k, metric=faiss.METRIC_INNER_PRODUCT)


def _torch(query_qh: NDArray[np.float32], pool_ph: NDArray[np.float32], k: int, device: str) -> Any:
    size = _CPU_TILE if torch.device(device).type == "cpu" else _TILE
    tiles = [torch.from_numpy(pool_ph[at : at + size]).to(device) for at in range(0, len(pool_ph), size)]
    for first in range(0, len(query_qh), _QUERIES):
        rows = slice(first, first + _QUERIES)
        queries_qh = torch.from_numpy(query_qh[rows]).to(device)
        best_qk: Any = None
        row_qk: Any = None
        for at, tile_ph in enumerate(tiles):
            best_qc, row_qc = (queries_qh @ tile_ph.T).topk(min(k, len(tile_ph)), dim=1)
            row_qc += at * size
            if best_qk is not None:
                best_qc, row_qc = torch.cat([best_qk, best_qc], dim=1), torch.cat([row_qk, row_qc], dim=1)
            best_qk, order_qk = best_qc.topk(k, dim=1)
            row_qk = row_qc.gather(1, order_qk)
        yield rows, best_qk.cpu().numpy(), row_qk.cpu().numpy()


def search_bytes(rows: int, hidden: int, *, k: int = 4, index: Index = "exact") -> int:
    """Most memory that a search on the CPU takes besides its queries, a block of the rows, and its results.

    Args:
        rows: Rows that are searched, of the larger side.
        hidden: Width of an embedding.
        k: Neighbours of a query.
        index: How they are searched; an approximate index is in memory as a whole, and is trained on some of the rows.
    """
    queries = min(_QUERIES, rows)
    exact = 2 * 4 * queries * (min(_CPU_TILE, rows) + 8 * k)  # an allocator keeps some of what was freed
    if index == "exact":
        return exact
    candidates = 2 * 4 * min(_QUERIES // 4, rows) * _RERANK * k * hidden
    trained = 4 * hidden * min(rows, _TRAINING * max(_cells(rows) if index == "ivf" else 0, 256))
    links = 8 if index == "ivf" else 4 * 66
    built = rows * (2 * hidden + links)  # arrays of codes grow by doubling
    return max(exact, candidates) + max(trained, built)


def _cells(rows: int) -> int:
    """Cells of an ``"ivf"`` index."""
    return max(1, min(int(4 * math.sqrt(rows)), rows // _TRAINING))


def recall(found: Neighbours, exact: Neighbours) -> float:
    """Share of the exact neighbours that an approximate search found.

    >>> similarities = np.zeros((1, 2), np.float32)
    >>> recall(Neighbours(similarities, np.array([[3, 1]])), Neighbours(similarities, np.array([[1, 2]])))
    0.5
    """
    return float((exact.row_qk[:, :, None] == found.row_qk[:, None, :]).any(axis=2).mean())


# -------------------------------------------------------------------------------------------------------------- scores


class Pairs(NamedTuple):
    """Pairs of sentences with their scores.

    Attributes:
        score_c: Margin scores; float64, as a threshold just below one of them is.
        source_c: Rows of the sources.
        target_c: Rows of the targets.
    """

    score_c: NDArray[np.floating]
    source_c: NDArray[np.integer]
    target_c: NDArray[np.integer]

    def take(self, chosen_c: NDArray[Any] | slice) -> Pairs:
        """Some of them: numbers, a mask or a slice."""
        return Pairs(self.score_c[chosen_c], self.source_c[chosen_c], self.target_c[chosen_c])

    def best_first(self) -> Pairs:
        """The same, by falling score; equal ones as they came."""
        return self.take(np.argsort(-self.score_c, kind="stable"))


def margin_score(
    similarity: NDArray[np.floating],
    source_mean: NDArray[np.floating],
    target_mean: NDArray[np.floating],
    margin: Margin = "ratio",
) -> NDArray[np.floating]:
    """How far similarities stand out; the arguments are of shapes that can be combined.

    With ``b`` the mean of the two means: ``a / b`` (ratio), ``a − b`` (distance) or ``a`` (absolute).

    Args:
        similarity: Cosine ``a`` of a pair.
        source_mean: Mean cosine of its source with the source's ``k`` nearest targets.
        target_mean: Mean cosine of its target with the target's ``k`` nearest sources.
        margin: Which score.

    Raises:
        ValueError: There is no such score.

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
    raise ValueError(f"There is no margin {margin!r}; there are {', '.join(MARGINS)}.")


def neighbour_scores(forward: Neighbours, backward: Neighbours, margin: Margin = "ratio") -> NDArray[np.floating]:
    """Margin of each query with each of its neighbours, ``-inf`` where there is none.

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
    """Pairs among neighbours that were found in both directions, best first.

    Args:
        forward: Neighbours of the sources among the targets.
        backward: Neighbours of the targets among the sources.
        margin: See `margin_score`.
        retrieval: ``"forward"`` pairs each source with the neighbour of the largest margin, ``"backward"`` each target;
            ``"intersection"`` keeps the pairs that are in both, ``"max"`` those of either, best first, as long as
            neither sentence was used (`one_to_one`).

    Raises:
        ValueError: There is no such margin or retrieval.

    Reference: Artetxe and Schwenk 2019, section 3.2.
    """
    if retrieval not in RETRIEVALS:
        raise ValueError(f"There is no retrieval {retrieval!r}; there are {', '.join(RETRIEVALS)}.")
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
    """Take pairs in their order as long as neither sentence was used.

    In each round the pairs that come first for both of their sentences are taken, and all others of these sentences
    go: what is taken is what a loop over the pairs takes, in a few rounds.

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
            first[end_c[::-1]] = left_c[::-1]  # of several the last one assigned stays, which is the first pair
        is_first_c = (firsts[0][ends[0]] == left_c) & (firsts[1][ends[1]] == left_c)
        taken_c[left_c[is_first_c]] = True
        for first, end_c in zip(firsts, ends, strict=True):
            first[end_c[is_first_c]] = -1
        left_c = left_c[(firsts[0][ends[0]] >= 0) & (firsts[1][ends[1]] >= 0)]
    return pairs.take(taken_c)


def mine(
    source_nh: NDArray[Any],
    target_mh: NDArray[Any],
    *,
    k: int = 4,
    margin: Margin = "ratio",
    retrieval: Retrieval = "max",
    index: Index = "exact",
    probes: int = 16,
    device: str | None = None,
) -> Pairs:
    """Find the pairs of two sets of embeddings, best first.

    Args:
        source_nh: Embeddings of the sources, shape ``(n, hidden)``. Rows of length 1 in float32 are not copied.
        target_mh: Embeddings of the targets, shape ``(m, hidden)``.
        k: Neighbours of a sentence that its similarities are compared with.
        margin: See `margin_score`.
        retrieval: See `select_pairs`.
        index: ``"exact"``, or an approximate search (``"ivf"``, ``"hnsw"``; see `Approximate`), which pays above some
            200,000 sentences. The sentences, not their number, decide what it misses: it is logged.
        probes: See `Approximate.build`.
        device: Where torch searches exactly; see `nearest_neighbours`.

    Raises:
        ValueError: A side is empty or not finite, the sides differ in width, or an option does not exist.
        ImportError: An approximate index was asked for and faiss is not installed.

    >>> eye = np.eye(3, dtype=np.float32)
    >>> mine(eye, eye[[2, 0, 1]], k=2).target_c
    array([1, 2, 0], dtype=int32)
    """
    sides = unit_rows(source_nh), unit_rows(target_mh)
    ways = []
    for query_qh, pool_ph in (sides, sides[::-1]):
        exact = nearest_neighbours(query_qh if index == "exact" else query_qh[:_QUERIES], pool_ph, k, device=device)
        if index != "exact":
            pool = Rows([pool_ph])
            found = Approximate.build(pool, index, probes=probes).search(query_qh, pool, k)
            share = recall(found.take(slice(_QUERIES)), exact)
            logger.info("The %s index finds %.1f %% of the exact %d neighbours.", index, 100 * share, k)
            exact = found
        ways.append(exact)
    return select_pairs(*ways, margin=margin, retrieval=retrieval)


# ---------------------------------------------------------------------------------------------------------- thresholds


class Threshold(NamedTuple):
    """Where to cut a list of scored pairs, and what is then left.

    Attributes:
        threshold: Pairs above it are kept, none has just this score.
        precision: Share of the kept pairs that are right.
        recall: Share of the right pairs that are kept.
        f1: Their harmonic mean.
        kept: Number of kept pairs.
        correct: Number of right ones among them.
    """

    threshold: float
    precision: float
    recall: float
    f1: float
    kept: int
    correct: int


def best_threshold(score_c: ArrayLike, correct_c: ArrayLike, gold: int) -> Threshold:
    """The threshold with the best F1, by one sort and one running sum.

    It lies midway between the last pair that is kept and the next, or just below the last pair of all. A cut between
    equal scores is no threshold, and is not considered; of equally good ones the highest is taken. Where no pair is
    right, the threshold keeps none.

    Args:
        score_c: Score of each pair.
        correct_c: Whether it is right.
        gold: Number of right pairs, found or not.

    Raises:
        ValueError: The arguments differ in length, or there is no gold.

    >>> best_threshold([0.9, 0.8, 0.7], [True, False, True], gold=2)._replace(threshold=0).f1
    0.8
    """
    scores_c = np.asarray(score_c, dtype=np.float64)
    right_c = np.asarray(correct_c, dtype=bool)
    if len(scores_c) != len(right_c) or gold < 1:
        raise ValueError(f"A threshold needs gold pairs, and {len(scores_c)} scores as many labels; got {gold} gold.")
    if not right_c.any():
        return Threshold(float(np.nextafter(max(scores_c, default=0.0), np.inf)), 0.0, 0.0, 0.0, 0, 0)
    order_c = np.argsort(-scores_c, kind="stable")
    scores_c, found_c = scores_c[order_c], np.cumsum(right_c[order_c])
    f1_c = 2 * found_c / (np.arange(1, len(scores_c) + 1) + gold)
    f1_c[:-1][scores_c[:-1] == scores_c[1:]] = -1
    at = int(f1_c.argmax())
    is_last = at == len(scores_c) - 1
    threshold = np.nextafter(scores_c[at], -np.inf) if is_last else (scores_c[at] + scores_c[at + 1]) / 2
    return Threshold(float(threshold), *f1_scores(int(found_c[at]), at + 1, gold), at + 1, int(found_c[at]))


def f1_scores(correct: int, kept: int, gold: int) -> tuple[float, float, float]:
    """Precision, recall and F1 of counts, 0 where they are not defined.

    >>> f1_scores(1, 2, 4)
    (0.5, 0.25, 0.3333333333333333)
    """
    total = kept + gold
    return correct / kept if kept else 0.0, correct / gold if gold else 0.0, 2 * correct / total if total else 0.0


def suggest_threshold(pairs: Pairs, runner_up_n: NDArray[np.floating], *, rate: float = 0.01) -> float | None:
    """A guess at a threshold for text without gold.

    A source's runner-up, the second best of its neighbours, is almost never its translation, so that runners-up hint at
    what wrong pairs score. The lowest threshold is taken above which there are no more than ``rate`` runners-up for each
    pair. It is a guess, and ``rate`` is not the share of wrong pairs: a runner-up scores less than the best of a source
    without a translation, so that far more than ``rate`` may be wrong. Read pairs on both sides of it.

    Args:
        pairs: The pairs.
        runner_up_n: Second best margin of each source; see `runners_up`.
        rate: Runners-up for each pair that is kept.

    Returns:
        The threshold, or None where runners-up score like pairs.
    """
    score_c = np.sort(np.asarray(pairs.score_c, dtype=np.float64))[::-1]
    decoy_n = np.sort(np.asarray(runner_up_n, dtype=np.float64))
    above_c = len(decoy_n) - np.searchsorted(decoy_n, score_c, side="left")
    good_c = np.flatnonzero(above_c <= rate * np.arange(1, len(score_c) + 1))
    return float(np.nextafter(score_c[good_c[-1]], -np.inf)) if len(good_c) else None


def runners_up(forward: Neighbours, backward: Neighbours, margin: Margin = "ratio") -> NDArray[np.floating]:
    """Second best margin of each source that has two neighbours."""
    score_nk = neighbour_scores(forward, backward, margin)
    if score_nk.shape[1] < 2:
        return np.empty(0, dtype=score_nk.dtype)
    second_n = np.partition(score_nk, -2, axis=1)[:, -2]
    return second_n[np.isfinite(second_n)]
