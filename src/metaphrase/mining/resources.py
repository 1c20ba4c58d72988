"""Estimates of the disk space and memory that mining requires."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from metaphrase.exceptions import StorageError
from metaphrase.io.counts import format_size
from metaphrase.mining.options import SearchOptions
from metaphrase.mining.search import search_bytes


def estimate_needs(
    sources: int, targets: int, model: SentenceTransformer, search: SearchOptions, text_bytes: int
) -> dict[str, int]:
    """Estimate the disk and memory of mining in bytes, without the activations of a forward pass.

    The page cache of the embeddings' files is not counted, as the system frees it on demand.
    """
    n, hidden = sources + targets, int(model.get_embedding_dimension() or 0)
    larger = max(sources, targets)
    per_row = {"exact": 0, "ivf": hidden + 8, "hnsw": hidden + 4 * 66}[search.index]
    neighbours = 8 * n * search.k
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    shards = (3 if search.half else 2) * min(search.shard_size, larger) * hidden * 4
    searched = search_bytes(larger, hidden, k=search.k, index=search.index)
    return {
        "disk": 2 * text_bytes + n * hidden * (2 if search.half else 4) + neighbours + n * per_row + 32 * n,
        "memory": weights + shards + 4 * neighbours + searched + 64 * n,
    }


def check_disk(needed: Mapping[str, int], work: Path, note: Callable[[str], Any]) -> None:
    """Report the required resources, and check the free disk space.

    Files in the work folder count as free space.
    """
    free = shutil.disk_usage(work).free + sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    note(
        f"This requires {format_size(needed['disk'])} of disk in {work} ({format_size(free)} free), and "
        f"{format_size(needed['memory'])} of memory in addition to Python and a forward pass."
    )
    if needed["disk"] > free:
        raise StorageError(
            f"Not enough disk space in {work}: {format_size(needed['disk'])} needed, {format_size(free)} free. Put the "
            f"output on another disk, or delete {work} and pass --half."
        )
