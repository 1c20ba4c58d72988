"""Mine two files of embeddings with metaphrase and with faiss alone, for `mining_scale.py`.

    python scripts/benchmarks/mining_peers.py "faiss, exact" FOLDER

reads ``source.npy`` and ``target.npy`` of the folder, float32 rows of length 1, writes the pairs to ``pairs.npz`` and prints
the seconds from the embeddings to the pairs. metaphrase maps the files into memory; LASER's script reads them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

#: Neighbours of a sentence, as in LASER and by default in metaphrase.
K = 4
#: The index that stopes' pipeline chooses up to a number of lines (``determine_faiss_index_type``), and its probes.
STOPES = {10_000: "Flat", 80_000: "OPQ64,IVF1024,PQ64", 160_000: "OPQ64,IVF2048,PQ64", 250_000: "OPQ64,IVF4096,PQ64"}
STOPES |= {700_000: "OPQ64,IVF8192,PQ64", 4_000_000: "OPQ64,IVF16384,PQ64"}
PROBES = 128

Scored = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def metaphrase(folder: Path, index: Any = "exact") -> Scored:
    """Mine with metaphrase."""
    from metaphrase.mining.margins import mine

    sides = (np.load(folder / f"{side}.npy", mmap_mode="r") for side in ("source", "target"))
    return mine(*sides, k=K, index=index)


def by_hand(folder: Path, *, exact: bool = True) -> Scored:
    """Mine with faiss as LASER's ``mine_bitexts.py`` does (``--margin ratio --retrieval max``), with vectorised margins.

    All rows are searched if ``exact``, or else the index that stopes would choose.
    """
    x, y = (np.load(folder / f"{side}.npy") for side in ("source", "target"))
    found = []
    for queries, pool in ((x, y), (y, x)):
        kind = "Flat" if exact else next(kind for most, kind in STOPES.items() if len(pool) <= most)
        index = faiss.index_factory(pool.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
        if kind != "Flat":
            index.train(pool)
            faiss.ParameterSpace().set_index_parameter(index, "nprobe", PROBES)
        index.add(pool)
        found.append(index.search(queries, min(K, len(pool))))
    (x2y_sim, x2y), (y2x_sim, y2x) = found
    x2y_mean, y2x_mean = x2y_sim.mean(axis=1), y2x_sim.mean(axis=1)
    forward = x2y_sim / ((x2y_mean[:, None] + y2x_mean[x2y]) / 2)
    backward = y2x_sim / ((y2x_mean[:, None] + x2y_mean[y2x]) / 2)
    best = [x2y[np.arange(len(x)), forward.argmax(axis=1)], y2x[np.arange(len(y)), backward.argmax(axis=1)]]
    source = np.concatenate([np.arange(len(x)), best[1]])
    target = np.concatenate([best[0], np.arange(len(y))])
    scores = np.concatenate([forward.max(axis=1), backward.max(axis=1)])
    seen_source, seen_target, kept = set(), set(), []
    for i in np.argsort(-scores):
        if source[i] not in seen_source and target[i] not in seen_target:
            seen_source.add(source[i])
            seen_target.add(target[i])
            kept.append(i)
    return scores[kept], source[kept], target[kept]


ENGINES: dict[str, Callable[[Path], Scored]] = {
    "metaphrase, exact": metaphrase,
    "metaphrase, ivf": lambda folder: metaphrase(folder, "ivf"),
    "faiss, exact": by_hand,
    "faiss, stopes' index": lambda folder: by_hand(folder, exact=False),
}


def main(engine: str, folder: str) -> None:
    """Mine, write the pairs, and print the seconds."""
    if engine.startswith("metaphrase"):  # importing its modules is not timed
        import_module("metaphrase.mining.margins")
    start = time.perf_counter()
    score, source, target = ENGINES[engine](Path(folder))
    seconds = time.perf_counter() - start
    np.savez(Path(folder) / "pairs.npz", score=score, source=source, target=target)
    print(json.dumps({"seconds": round(seconds, 3)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
