"""Reading TSV."""

from __future__ import annotations

from collections.abc import Iterator

from metaphrase.corpus.files import BitextFile
from metaphrase.corpus.readers.columns import read_table
from metaphrase.corpus.rows import Row
from metaphrase.corpus.text import BadLine, read_lines


def read_tsv(file: BitextFile, max_chars: int, *, needs_header: bool = False) -> Iterator[tuple[int, Row | BadLine]]:
    """Read a TSV file without quoting, with a header, or with two columns and no header unless it needs one."""
    lines = read_lines(file.paths[0], max_chars, file.max_expansion)
    records = ((number, line if isinstance(line, BadLine) else line.split("\t")) for number, line in lines)
    yield from read_table(records, file, needs_header=needs_header)
