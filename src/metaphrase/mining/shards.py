"""Embeddings and neighbours on disk, one file per shard: a killed run resumes after its last shard.

They are computed in this process, where memory holds one shard at a time, or in tasks of an engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.exceptions import DataError
from metaphrase.io.digests import encoder_digest
from metaphrase.io.locks import exclusive
from metaphrase.io.progress import Advance, Begin
from metaphrase.io.work_folders import read_kept, read_part, write_atomically, write_part
from metaphrase.mining.options import SHARD, EngineOptions, SearchOptions
from metaphrase.mining.search import (
    RECALL_QUERIES,
    Approximate,
    Neighbours,
    Rows,
    nearest_neighbours,
    recall,
    unit_rows,
)
from metaphrase.mining.sentences import Sentences
from metaphrase.modeling.functional import check_finite_rows
from metaphrase.modeling.packing import packed
from metaphrase.modeling.precision import bfloat16, usable_bfloat16

SIDES = ("source", "target")
#: The share of the shards that a call computes: all, or the share of one of several tasks, ``slice(task, None, tasks)``.
ALL = slice(None)
#: Files of an approximate search: its index, and its measured recall.
INDEX, RECALL = "pool.faiss", "recall.json"
_Shard = TypeVar("_Shard")


def encode_shards(
    texts: Sequence[str],
    folder: Path,
    encode: Callable[[list[str]], NDArray[Any]],
    *,
    size: int = SHARD,
    half: bool = False,
    advance: Advance = lambda n: None,
    part: slice = ALL,
) -> Rows:
    """Embed texts into shards.

    Existing shards are reused. Returns memory-mapped unit rows; ``half`` stores float16.
    """
    paths = []
    with exclusive(folder) if part == ALL else nullcontext():
        for first in range(0, len(texts), size)[part]:
            paths.append(folder / f"{first // size:06d}.npy")
            chunk = texts[first : first + size]
            if read_kept(paths[-1], partial(_read_rows, len(chunk))) is None:
                rows_nh = unit_rows(np.asarray(encode(list(chunk))))
                with write_atomically(paths[-1]) as file:
                    np.save(file, rows_nh.astype(np.float16 if half else np.float32, copy=False))
            advance(len(chunk))
    return Rows(_Mapped(paths))


def load_rows(folder: Path, count: int, size: int) -> Rows:
    """Memory-map the embeddings of ``count`` texts, in shards of ``size``; a missing or damaged one is a `DataError`."""
    return Rows(_Mapped([path for path, _ in _load(folder, ".npy", count, size, _read_rows)]))


def load_neighbours(
    folder: Path, count: int, search: SearchOptions, note: Callable[[str], Any]
) -> tuple[Neighbours, float | None]:
    """Read the neighbours of the ``count`` texts of a side, as `load_rows` does, and the recall of an approximate search."""
    shards = [shard for _, shard in _load(folder / "neighbours", ".npz", count, search.shard_size, _read_neighbours)]
    neighbours = Neighbours(*map(np.concatenate, zip(*shards, strict=True)))
    measured = read_part(folder / RECALL)
    if measured is None:
        (folder / RECALL).unlink(missing_ok=True)  # if it is damaged; a task measures what is missing
        return neighbours, None
    note(f"The {search.index} index finds {measured['recall']:.1%} of the {folder.name}s' {search.k} neighbours.")
    return neighbours, measured["recall"]


class _Mapped(Sequence[NDArray[Any]]):
    """Arrays in files, memory-mapped when they are read. The number of open files is limited, and each map keeps one open."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._read = lru_cache(maxsize=64)(partial(np.load, mmap_mode="c"))  # torch requires writable arrays

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, at: Any) -> Any:
        return self._read(self._paths[at])


def _load(
    folder: Path, suffix: str, count: int, size: int, read: Callable[[int, Path], _Shard]
) -> Iterator[tuple[Path, _Shard]]:
    for first in range(0, count, size):
        path = folder / f"{first // size:06d}{suffix}"
        shard = read_kept(path, partial(read, min(size, count - first)))
        if shard is None:
            raise DataError(f"{path} is missing or was damaged. Run the command again to recompute it.")
        yield path, shard


def _read_rows(count: int, path: Path) -> NDArray[Any]:
    rows_nh = np.load(path, mmap_mode="c")
    if rows_nh.ndim != 2 or len(rows_nh) != count:
        raise DataError(f"its shape is {rows_nh.shape}")
    check_finite_rows(rows_nh)
    return rows_nh


def _read_neighbours(count: int, path: Path) -> Neighbours:
    with path.open("rb") as file, np.load(file) as shard:
        neighbours = Neighbours(shard["similarity"], shard["row"])
    if neighbours.similarity_qk.shape != neighbours.row_qk.shape or len(neighbours.row_qk) != count:
        raise DataError(f"its shapes are {neighbours.similarity_qk.shape} and {neighbours.row_qk.shape}")
    return neighbours


def _read_index(count: int, path: Path) -> Approximate:
    approximate = Approximate.load(path)
    if approximate.index.ntotal != count:
        raise DataError(f"it has {approximate.index.ntotal} rows")
    return approximate


def work_manifest(model: SentenceTransformer, search: SearchOptions, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that determines embeddings and neighbours, for the manifest of a work folder."""
    irrelevant = ("batch_size", "search_device")
    settings = {key: value for key, value in asdict(search).items() if key not in irrelevant}
    return {**inputs, **settings, "encoder": encoder_digest(model, resolve_prompt(model, search.prompt_or_none))}


def embed_texts(
    model: SentenceTransformer,
    texts: Sequence[str],
    folder: Path,
    search: SearchOptions,
    advance: Advance = lambda n: None,
    part: slice = ALL,
) -> Rows:
    """Embed texts with a model into shards."""
    prompt = resolve_prompt(model, search.prompt_or_none)

    def encode(chunk: list[str]) -> NDArray[Any]:
        return model.encode(
            chunk, prompt=prompt, batch_size=search.batch_size, show_progress_bar=False, convert_to_numpy=True
        )

    with packed(model), bfloat16(model, enabled=search.bf16):
        return encode_shards(
            texts, folder, encode, size=search.shard_size, half=search.half, advance=advance, part=part
        )


def build_index(pool: Rows, folder: Path, search: SearchOptions, advance: Advance = lambda n: None) -> Approximate:
    """Build the approximate index of some rows, and keep it in a folder."""
    index = Approximate.build(pool, search.index, probes=search.probes, advance=advance)
    index.save(folder / INDEX)
    return index


def search_shards(
    queries: Rows,
    pool: Rows,
    folder: Path,
    search: SearchOptions,
    advance: Advance = lambda n: None,
    part: slice = ALL,
) -> None:
    """Find the neighbours of rows in a pool, in shards. Existing shards are reused.

    An approximate search builds its index unless it exists, and measures its recall.
    """
    device = search.search_device or ("cuda" if torch.cuda.is_available() else None)
    first = folder / "neighbours" / f"{0:06d}.npz"

    def exactly(query_qh: NDArray[np.float32]) -> Neighbours:
        return nearest_neighbours(query_qh, pool, search.k, device=device)

    @cache  # read on first use only
    def index() -> Approximate:
        return read_kept(folder / INDEX, partial(_read_index, len(pool))) or build_index(pool, folder, search)

    for at in range(len(queries.blocks))[part]:
        path = first.with_name(f"{at:06d}.npz")
        if read_kept(path, partial(_read_neighbours, len(queries.blocks[at]))) is None:
            query_qh = queries.block(at)
            shard = exactly(query_qh) if search.index == "exact" else index().search(query_qh, pool, search.k)
            with write_atomically(path) as file:
                np.savez(file, similarity=shard.similarity_qk, row=shard.row_qk)
        advance(len(queries.blocks[at]))
    if search.index != "exact" and not part.start and read_part(folder / RECALL) is None:
        sample_qh = queries.block(0)[:RECALL_QUERIES]
        approximate = _read_neighbours(len(queries.blocks[0]), first).take(slice(len(sample_qh)))
        write_part(folder / RECALL, {"recall": recall(approximate, exactly(sample_qh))})


def prepare(search: SearchOptions | None, engine: EngineOptions | None) -> tuple[SearchOptions, EngineOptions]:
    """Check what an engine requires before slow work: its options, its storage and the arguments of its executor.

    Returns the options, or their defaults. On this machine, ``bf16`` is disabled if float32 is faster.
    """
    search, engine = search or SearchOptions(), engine or EngineOptions()
    engine.check()
    if engine.executor is not None:
        os.environ.setdefault("LOGURU_DIAGNOSE", "NO")  # else datatrove logs the variables of a failed task, too
        from metaphrase.mining.engine import check_settings  # requires an extra

        check_settings(engine)
    if engine.executor in (None, "local") and not engine.is_last:
        search = replace(search, bf16=usable_bfloat16(wanted=search.bf16))
    return search, engine


def make_shards(
    model: SentenceTransformer,
    texts: Iterable[tuple[str, Sequence[str]]],
    pools: Mapping[str, str],
    work: Path,
    search: SearchOptions,
    engine: EngineOptions,
    *,
    with_rows: bool,
    finish: Callable[..., Any],
    begin: Begin,
    note: Callable[[str], Any],
) -> AbstractContextManager[Path] | None:
    """Compute the embeddings and neighbours of some texts, unless they already exist.

    ``texts`` are the distinct, non-empty texts of each side; ``pools`` has, for each side whose neighbours are searched, the
    side that they are searched in. The work folder has a manifest, and the engine was checked. The last Slurm job calls
    ``finish`` with engine options with which all shards already exist.

    Returns a context with the folder of the shards, a folder for each side, which has the embeddings, too, if
    ``with_rows``; None if the tasks were submitted to Slurm.
    """
    if engine.executor is None:
        rows = {
            side: embed_texts(
                model, of_side, work / side / "embeddings", search, begin(f"Embedding {side}s", len(of_side))
            )
            for side, of_side in texts
        }
        for side, pool in pools.items():
            if search.index != "exact" and not (work / side / INDEX).exists():
                build_index(rows[pool], work / side, search, begin(f"Index of {pool}s", len(rows[pool])))
            advance = begin(f"Neighbours of {side}s", len(rows[side]))
            search_shards(rows[side], rows[pool], work / side, search, advance)
        return nullcontext(work)
    from metaphrase.mining.engine import Work, run_stages  # requires an extra

    counts = {side: len(Sentences.write(work / side, partial(iter, of_side))) for side, of_side in texts}
    encoder = encoder_digest(model, resolve_prompt(model, search.prompt_or_none))
    shared = Work(engine.storage or str(work.resolve()), search, encoder, counts, pools)
    last = partial(finish, replace(engine, executor="local", executor_args=[], is_last=True))
    return run_stages(engine, shared, work, with_rows=with_rows, finish=last, note=note)
