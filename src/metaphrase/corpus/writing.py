"""Writing a corpus to a file that `load_corpus` reads."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pyarrow.parquet as pq
from datasets import Dataset, Value

from metaphrase.corpus.text import one_line
from metaphrase.exceptions import CorpusError
from metaphrase.io.files import replacing

#: Formats that `write_corpus` writes.
WRITTEN = (".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet")

_CHUNK = 10_000


def check_format(path: str | Path) -> None:
    """Check that `write_corpus` knows the format of a file name."""
    if not str(path).endswith(WRITTEN):
        raise CorpusError(f"Cannot write {path}: the format is unknown. Supported formats: {', '.join(WRITTEN)}.")


def is_tsv(path: str | Path) -> bool:
    """Whether `write_corpus` writes a file of this name as TSV.

    >>> is_tsv("a.tsv.gz"), is_tsv("a.tsv.jsonl")
    (True, False)
    """
    return str(path).removesuffix(".gz").endswith(".tsv")


def write_corpus(dataset: Dataset, path: str | Path) -> Path:
    """Write a corpus atomically, in a format that `load_corpus` reads.

    The suffix of the path is ``.tsv``, ``.jsonl`` (both also ``.gz``) or ``.parquet``; the last two also hold lists. In a
    TSV, line breaks and tabs within a sentence become spaces, which keeps its words and their links.

    Raises:
        ValueError: The format is unknown, or a TSV cannot hold the values of a column.
    """
    check_format(path)
    path = Path(path)
    with replacing(path) as partial:
        if path.suffix == ".parquet":
            schema = dataset.features.arrow_schema.remove_metadata()
            with pq.ParquetWriter(partial, schema) as writer:
                for table in dataset.with_format("arrow").iter(_CHUNK):
                    writer.write_table(table.cast(schema))
        else:
            with text_writer(partial, packed=path.suffix == ".gz") as stream:
                if is_tsv(path):
                    _write_tsv(dataset, stream)
                else:
                    for row in dataset:
                        stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


@contextmanager
def text_writer(path: Path, *, packed: bool) -> Iterator[TextIO]:
    """Open a UTF-8 file for writing, with line feeds on every system.

    Compressed files have no time stamp, so that equal text produces equal bytes.
    """
    with path.open("wb") as raw:
        if not packed:
            with io.TextIOWrapper(raw, encoding="utf-8", newline="\n") as stream:
                yield stream
            return
        with (
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0, compresslevel=6) as gz,
            io.TextIOWrapper(gz, encoding="utf-8", newline="\n") as stream,
        ):
            yield stream


def _write_tsv(dataset: Dataset, stream: TextIO) -> None:
    if lists := [name for name, feature in dataset.features.items() if not isinstance(feature, Value)]:
        raise CorpusError(
            f"A TSV cannot hold the lists of the column {lists[0]!r}. Write .jsonl or .parquet, or remove it."
        )
    stream.write("\t".join(dataset.column_names) + "\n")
    for batch in dataset.iter(_CHUNK):
        for row in zip(*batch.values(), strict=True):
            stream.write("\t".join("" if cell is None else one_line(str(cell)) for cell in row) + "\n")
