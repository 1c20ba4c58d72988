"""Reading data sets of the library `datasets`: on the Hub, or in memory."""

from __future__ import annotations

from collections.abc import Iterator

from metaphrase.corpus.files import BitextFile
from metaphrase.corpus.hub import stream_rows
from metaphrase.corpus.readers.columns import read_records
from metaphrase.corpus.rows import Row
from metaphrase.corpus.text import BadLine


def read_hub(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | BadLine]]:
    """Read a Hub data set as a stream."""
    yield from read_records(enumerate(stream_rows(file.name, file.split, file.revision), 1), file)


def read_dataset(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | BadLine]]:
    """Read a data set in memory."""
    yield from read_records(enumerate(file.rows, 1), file)
