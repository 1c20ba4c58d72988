"""Reading TSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from metaphrase.corpus.files import BitextFile
from metaphrase.corpus.readers.columns import header_columns, read_records
from metaphrase.corpus.rows import Row
from metaphrase.corpus.text import BadLine, read_lines
from metaphrase.exceptions import CorpusError


def read_tsv(file: BitextFile, max_chars: int, *, needs_header: bool = False) -> Iterator[tuple[int, Row | BadLine]]:
    """Read a TSV file without quoting, with a header, or with two columns and no header unless it needs one."""
    lines: Iterator[tuple[int, str | BadLine]] = read_lines(file.paths[0], max_chars, file.max_expansion)
    first = next(lines, None)
    if first is None:
        return
    if isinstance(first[1], BadLine):
        raise CorpusError(
            f"{file.name}:1: {first[1].reason} ({first[1].detail}). The first line of a TSV is its header."
        )
    columns = header_columns(first[1].split("\t"), file)
    if columns is None and needs_header:
        raise CorpusError(f"{file.name}:1: expected a header 'source<TAB>target', found {first[1][:80]!r}.")
    if columns is None:
        columns, lines = ["source", "target"], chain([first], lines)

    def records() -> Iterator[tuple[int, Mapping[str, str] | BadLine]]:
        for line, text in lines:
            if isinstance(text, BadLine):
                yield line, text
            elif len(fields := text.split("\t")) != len(columns):
                yield line, BadLine("wrong number of columns", f"{len(fields)}, not {len(columns)}")
            else:
                yield line, dict(zip(columns, fields, strict=True))

    yield from read_records(records(), file)
