"""Nearest neighbours of embeddings, exact or approximate.

Shapes: ``n`` sources, ``m`` targets, ``q`` queries, ``p`` pool rows, ``k`` neighbours, ``c`` candidates, ``h`` hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from metaphrase.exceptions import MissingExtraError, UsageError
from metaphrase.io.arguments import Count, checked
from metaphrase.io.environment import install_command
from metaphrase.io.files import replacing
from metaphrase.io.progress import Advance
from metaphrase.mining.options import Index
from metaphrase.modeling.functional import check_finite_rows

try:
    import faiss
except ImportError:  # exact search falls back to torch
    faiss = None  # type: ignore[assignment]

#: Queries per search step, whose working memory is one tile of similarities (4 MB).
QUERIES = 1024
#: Queries whose exact neighbours measure the recall of an approximate search.
RECALL_QUERIES = 1024
#: Rows of a tile on an accelerator, and on a CPU.
_TILE = 1 << 14
_CPU_TILE = 1 << 10
#: Candidates of an approximate search per neighbour, before they are ranked exactly.
_RERANK = 4
#: Training rows of an approximate index per cell.
_TRAINING = 64
#: Tolerance of the length of a unit vector.
_UNIT = 1e-5


class Rows:
    """Unit embeddings in blocks, which are arrays or memory-mapped files.

    The rows are float32 or float16. All blocks but the last have the same number of rows. float16 rows are normalised again
    when they are read.
    """

    def __init__(self, blocks: Sequence[NDArray[Any]]) -> None:
        self.blocks = blocks
        self.size = len(blocks[0])
        self.hidden = blocks[0].shape[1]

    def __len__(self) -> int:
        return self.size * (len(self.blocks) - 1) + len(self.blocks[-1])

    def block(self, at: int) -> NDArray[np.float32]:
        """Return a block as float32."""
        return _float32(self.blocks[at])

    def take(self, row_n: NDArray[np.integer]) -> NDArray[np.float32]:
        """Return some rows, shape ``(n, hidden)``; undefined for negative numbers."""
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
    """Normalise embeddings, shape ``(sentences, hidden)``, to float32 rows of length 1. Zero rows stay zero.

    Returns the array itself if its rows already have length 1, otherwise a copy.

    Raises:
        ValueError: The array does not have two dimensions.
        NonFiniteError: An embedding is NaN or infinite.
    """
    if embeddings_nh.ndim != 2:
        raise ValueError(
            f"Embeddings must have the shape (sentences, hidden), but have the shape {embeddings_nh.shape}."
        )
    rows_nh = np.ascontiguousarray(embeddings_nh, dtype=np.float32)
    length_n = np.sqrt(np.einsum("nh,nh->n", rows_nh, rows_nh))
    check_finite_rows(length_n[:, None])
    if np.all((np.abs(length_n - 1) < _UNIT) | (length_n == 0)):
        return rows_nh
    return rows_nh / np.maximum(length_n, np.finfo(np.float32).tiny)[:, None]


def distinct_rows(rows_nh: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First occurrence of each distinct row, shape ``(distinct,)``, and the number of each row among them, shape ``(n,)``.

    >>> distinct_rows(np.array([[2.0], [1.0], [2.0]]))
    (array([0, 1]), array([0, 1, 0]))
    """
    row_bytes = np.dtype((np.void, rows_nh.dtype.itemsize * rows_nh.shape[1]))
    bytes_n1 = np.ascontiguousarray(rows_nh).view(row_bytes)
    _, first_d, distinct_n = np.unique(bytes_n1.ravel(), return_index=True, return_inverse=True)
    order_d = np.argsort(first_d)
    return first_d[order_d], np.argsort(order_d)[distinct_n]


def first_occurrences(texts: Sequence[str]) -> NDArray[np.intp]:
    """Place of the first occurrence of each distinct text, shape ``(distinct,)``.

    >>> first_occurrences(["b", "a", "b"])
    array([0, 1])
    """
    return np.sort(np.unique(np.asarray(texts, dtype=object), return_index=True)[1])


class Neighbours(NamedTuple):
    """The nearest rows of the other side, most similar first.

    Attributes:
        similarity_qk: Their cosines, ``-inf`` for neighbours that an approximate search did not find, shape
            ``(queries, k)``.
        row_qk: Their row numbers, ``-1`` for neighbours that were not found or must not form a pair, shape ``(queries, k)``.
    """

    similarity_qk: NDArray[np.float32]
    row_qk: NDArray[np.int32]

    @property
    def mean_q(self) -> NDArray[np.float32]:
        """Mean cosine of a query with its neighbours, shape ``(queries,)``."""
        found_qk = np.isfinite(self.similarity_qk)
        total_q = np.where(found_qk, self.similarity_qk, 0).sum(axis=1)
        return total_q / np.maximum(found_qk.sum(axis=1), 1, dtype=np.float32)

    def take(self, rows: slice) -> Neighbours:
        """Return the neighbours of some queries."""
        return Neighbours(self.similarity_qk[rows], self.row_qk[rows])


class Approximate:
    """A faiss index whose candidates are ranked again by their exact cosines.

    The index stores one byte per dimension (``SQ8``). Similarities, margins and the order of its results are exact;
    `recall` measures what it misses.
    """

    def __init__(self, index: Any) -> None:
        self.index = index

    @classmethod
    def build(
        cls, pool: Rows, kind: Index, *, probes: int = 16, seed: int = 0, advance: Advance = lambda n: None
    ) -> Approximate:
        """Train an index on a sample of rows, and add all rows.

        Args:
            pool: The rows to search.
            kind: ``"ivf"``, cells, the nearest of which are searched, or ``"hnsw"``, a graph of neighbours.
            probes: Cells of ``"ivf"`` searched per query; for ``"hnsw"``, ``efSearch`` is four times this number.
            seed: Seed of the sample.
            advance: Called with the number of newly added rows.

        Raises:
            ImportError: faiss is not installed.
            ValueError: The kind is unknown.
        """
        if faiss is None:
            raise MissingExtraError(f"Approximate search requires faiss: {install_command('mining')}.")
        if kind not in ("ivf", "hnsw"):
            raise ValueError(f"An approximate index is ivf or hnsw, not {kind!r}.")
        n = len(pool)
        cells = _cells(n)
        name = f"IVF{cells},SQ8" if kind == "ivf" else "HNSW32,SQ8"
        index: Any = faiss.index_factory(pool.hidden, name, faiss.METRIC_INNER_PRODUCT)
        size = _TRAINING * max(cells, 256)
        drawn_n = np.random.default_rng(seed).integers(n, size=size)
        index.train(pool.take(np.unique(drawn_n) if n > size else np.arange(n)))
        for at in range(len(pool.blocks)):
            index.add(pool.block(at))
            advance(len(pool.blocks[at]))
        if kind == "ivf":
            index.nprobe = min(probes, cells)
        else:
            index.hnsw.efSearch = 4 * probes
        return cls(index)

    def save(self, path: str | Path) -> None:
        """Write the index atomically."""
        with replacing(path, unique=True) as partial:
            faiss.write_index(self.index, str(partial))

    @classmethod
    def load(cls, path: str | Path) -> Approximate:
        """Read an index that `save` wrote."""
        return cls(faiss.read_index(str(path)))

    def search(self, query_qh: NDArray[np.float32], pool: Rows, k: int) -> Neighbours:
        """Find the neighbours of some queries in the pool that the index was built from."""
        neighbours = _empty(len(query_qh), min(k, len(pool)))
        for first in range(0, len(query_qh), QUERIES // 4):
            rows = slice(first, first + QUERIES // 4)
            row_qc = self.index.search(query_qh[rows], min(_RERANK * k, len(pool)))[1]
            candidate_qch = pool.take(row_qc.ravel()).reshape(*row_qc.shape, -1)
            similarity_qc = np.einsum("qh,qch->qc", query_qh[rows], candidate_qch)
            similarity_qc[row_qc < 0] = -np.inf
            _keep_best(neighbours, rows, similarity_qc, row_qc)
        return neighbours


@checked
def nearest_neighbours(
    query_qh: NDArray[np.float32],
    pool: NDArray[np.float32] | Rows,
    k: Count = 4,
    *,
    device: str | None = None,
) -> Neighbours:
    """Find the rows with the largest cosines, by exact search. Rows with equal cosines are in no particular order.

    Args:
        query_qh: Unit rows, shape ``(queries, hidden)``; see `unit_rows`.
        pool: Unit rows to search, shape ``(rows, hidden)``, or in blocks, which are loaded one at a time.
        k: Number of neighbours; all rows if there are fewer.
        device: Device of the search with torch, such as ``"cuda"``. None searches on the CPU, with faiss if it is
            installed (brute force as in ``IndexFlatIP``, without copying the rows).

    Raises:
        ValueError: A side is empty, the sides differ in width, or ``k`` is not positive.
    """
    pool = pool if isinstance(pool, Rows) else Rows([pool])
    if not len(query_qh) or not len(pool):
        raise ValueError(f"Both sides need sentences, but there are {len(query_qh)} queries and {len(pool)} rows.")
    if query_qh.shape[1] != pool.hidden:
        raise ValueError(f"The two sides are embedded in {query_qh.shape[1]} and {pool.hidden} dimensions.")
    k = min(k, len(pool))
    neighbours = _empty(len(query_qh), k)
    for at in range(len(pool.blocks)):
        block_ph = pool.block(at)
        first_row = at * pool.size
        searcher = _search_with_faiss if device is None and faiss is not None else _search_with_torch
        for rows, similarity_qk, row_qk in searcher(query_qh, block_ph, min(k, len(block_ph)), device or "cpu"):
            row_qk = row_qk + first_row
            if at:
                similarity_qk = np.concatenate([neighbours.similarity_qk[rows], similarity_qk], axis=1)
                row_qk = np.concatenate([neighbours.row_qk[rows], row_qk], axis=1)
            _keep_best(neighbours, rows, similarity_qk, row_qk)
    return neighbours


def _empty(queries: int, k: int) -> Neighbours:
    return Neighbours(np.full((queries, k), -np.inf, dtype=np.float32), np.full((queries, k), -1, dtype=np.int32))


def _keep_best(
    neighbours: Neighbours, rows: slice, similarity_qc: NDArray[np.float32], row_qc: NDArray[np.integer]
) -> None:
    """Store the best of some candidates; the first of equal ones wins."""
    order_qc = np.argsort(-similarity_qc, axis=1, kind="stable")[:, : neighbours.row_qk.shape[1]]
    neighbours.similarity_qk[rows, : order_qc.shape[1]] = np.take_along_axis(similarity_qc, order_qc, axis=1)
    neighbours.row_qk[rows, : order_qc.shape[1]] = np.take_along_axis(row_qc, order_qc, axis=1)


def check_device(name: str | None, *, here: bool) -> None:
    """Check the name of a device, and that this machine has it if it is used ``here``.

    Raises:
        UsageError: There is no such device.
    """
    if name is None:
        return
    try:
        torch.device(name)
        if here:
            torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"--search_device {name} cannot be used: {reason}. Pass cpu or cuda, or omit it.") from error


def _search_with_faiss(query_qh: NDArray[np.float32], pool_ph: NDArray[np.float32], k: int, device: str) -> Any:
    for first in range(0, len(query_qh), QUERIES):
        rows = slice(first, first + QUERIES)
        yield rows, *faiss.knn(query_qh[rows], pool_ph, k, metric=faiss.METRIC_INNER_PRODUCT)


def _search_with_torch(query_qh: NDArray[np.float32], pool_ph: NDArray[np.float32], k: int, device: str) -> Any:
    size = _CPU_TILE if torch.device(device).type == "cpu" else _TILE
    tiles = [torch.from_numpy(pool_ph[at : at + size]).to(device) for at in range(0, len(pool_ph), size)]
    for first in range(0, len(query_qh), QUERIES):
        rows = slice(first, first + QUERIES)
        queries_qh = torch.from_numpy(query_qh[rows]).to(device)
        best_qk: Any = None
        row_qk: Any = None
        for at, tile_ph in enumerate(tiles):
            best_qc, row_qc = (queries_qh @ tile_ph.T).topk(min(k, len(tile_ph)), dim=1)
            row_qc += at * size
            if best_qk is not None:
                best_qc, row_qc = torch.cat([best_qk, best_qc], dim=1), torch.cat([row_qk, row_qc], dim=1)
            best_qk, order_qk = best_qc.topk(min(k, best_qc.shape[1]), dim=1)
            row_qk = row_qc.gather(1, order_qk)
        yield rows, best_qk.cpu().numpy(), row_qk.cpu().numpy()


def search_bytes(rows: int, hidden: int, *, k: int = 4, index: Index = "exact") -> int:
    """Estimate the peak memory of a search on the CPU, without its queries, a block of the pool and its results.

    An approximate index is held in memory, and is trained on a sample of the rows.
    """
    queries = min(QUERIES, rows)
    exact = 2 * 4 * queries * (min(_CPU_TILE, rows) + 8 * k)  # the allocator keeps some freed memory
    if index == "exact":
        return exact
    candidates = 2 * 4 * min(QUERIES // 4, rows) * _RERANK * k * hidden
    trained = 4 * hidden * min(rows, _TRAINING * max(_cells(rows) if index == "ivf" else 0, 256))
    links = 8 if index == "ivf" else 4 * 66
    built = rows * (2 * hidden + links)  # arrays of codes grow by doubling
    return max(exact, candidates) + max(trained, built)


def _cells(rows: int) -> int:
    """Number of cells of an ``"ivf"`` index."""
    return max(1, min(int(4 * math.sqrt(rows)), rows // _TRAINING))


def recall(approximate: Neighbours, exact: Neighbours) -> float:
    """Compute the share of the exact neighbours that an approximate search found.

    >>> similarities = np.zeros((1, 2), np.float32)
    >>> recall(Neighbours(similarities, np.array([[3, 1]])), Neighbours(similarities, np.array([[1, 2]])))
    0.5
    """
    return float((exact.row_qk[:, :, None] == approximate.row_qk[:, None, :]).any(axis=2).mean())
