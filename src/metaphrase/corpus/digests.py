"""Digests of the training data, which detect another corpus when a run is resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from datasets import Dataset, IterableDataset

from metaphrase.corpus.files import BitextFile
from metaphrase.corpus.selection import Selection

#: Rows hashed at a time.
ROWS = 100_000


def data_digest(dataset: Dataset) -> str:
    """Compute a digest of every row and column, which does not depend on how the rows are stored, chunked or selected.

    >>> rows = [{"source": "ja", "target": "yes"}, {"source": "nein", "target": "no"}]
    >>> one, other = Dataset.from_list(rows), Dataset.from_list(rows[::-1]).select([1, 0])
    >>> data_digest(one) == data_digest(other)
    True
    """
    digest = xxhash.xxh3_64()
    table = dataset.data.table.select(sorted(dataset.column_names))
    indices = dataset._indices  # noqa: SLF001 - `datasets` has no public accessor
    chosen = None if indices is None else indices.column(0)
    for first in range(0, len(dataset), ROWS):
        rows = table.slice(first, ROWS) if chosen is None else table.take(chosen.slice(first, ROWS))
        for name in rows.column_names:
            digest.update(name.encode())
            _add(digest, pa.concat_arrays(rows.column(name).chunks))
    return digest.hexdigest()


def _add(digest: Any, array: Any) -> None:
    """Add the values and lengths of an array, without unused parts of its buffers."""
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        digest.update(pc.binary_length(array).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64))
        wide = pc.drop_null(array).cast(pa.large_binary())
        _, ends, content = wide.buffers()
        if len(wide):
            ends_n = np.frombuffer(ends, dtype=np.int64)[wide.offset : wide.offset + len(wide) + 1]
            digest.update(content[ends_n[0] : ends_n[-1]] if content is not None else b"")
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        digest.update(pc.list_value_length(array).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64))
        _add(digest, array.flatten())
    else:
        digest.update(json.dumps(array.to_pylist(), default=str).encode())


def stream_digest(dataset: IterableDataset) -> str | None:
    """Compute a digest of a stream from `load_corpus`; None for another stream.

    It covers the names and content of the files, which rows are read in which order, and monolingual text.
    """
    iterable = dataset._ex_iterable  # noqa: SLF001 - `datasets` has no public accessor
    files = [
        [
            file.name if not file.paths else "",
            file.revision,
            [path.name for path in file.paths],
            file.sha256,
            file.columns,
        ]
        for file in _files(iterable)
    ]
    content = json.dumps([files, list(_order(iterable))], default=str)
    return xxhash.xxh3_64_hexdigest(content.encode()) if files else None


def check_stream(dataset: IterableDataset) -> None:
    """Check that the files of a stream from `load_corpus` have the content that they had when it was loaded."""
    for file in _files(dataset._ex_iterable):  # noqa: SLF001 - `datasets` has no public accessor
        for pin in file.pins:
            pin.check()


def _files(iterable: Any) -> Iterator[BitextFile]:
    for one in _nested(iterable):
        given = (getattr(one, "kwargs", None) or {}).get("files", ())
        yield from (file for file in given if isinstance(file, BitextFile))


def _order(iterable: Any) -> Iterator[Any]:
    """What selects, mixes and shuffles the rows of a stream."""
    for one in _nested(iterable):
        selection = (getattr(one, "kwargs", None) or {}).get("selection")
        if isinstance(selection, Selection):
            cleaning = selection.cleaning and replace(selection.cleaning, tokenizer=None)
            yield [repr(replace(selection, cleaning=cleaning, languages=frozenset())), sorted(selection.languages)]
        if digest := (getattr(one, "fn_kwargs", None) or {}).get("texts_digest"):
            yield digest
        if isinstance(generator := getattr(one, "generator", None), np.random.Generator):
            settings = ("probabilities", "stopping_strategy", "buffer_size")
            yield [generator.bit_generator.state, *(getattr(one, name, None) for name in settings)]


def _nested(iterable: Any) -> Iterator[Any]:
    """An iterable of `datasets`, and those that it reads."""
    yield iterable
    for inner in (getattr(iterable, "ex_iterable", None), *(getattr(iterable, "ex_iterables", None) or ())):
        if inner is not None:
            yield from _nested(inner)
