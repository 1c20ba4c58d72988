"""Reading CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from metaphrase.corpus.files import BitextFile
from metaphrase.corpus.readers.columns import find_layout, header_columns, read_records
from metaphrase.corpus.rows import Row
from metaphrase.corpus.text import BadLine, max_line_bytes, read_lines
from metaphrase.exceptions import CorpusError

#: Spreadsheets of languages with a decimal comma separate columns by semicolons.
_DELIMITERS = (",", ";", "\t")


def read_csv(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | BadLine]]:
    """Read a CSV file (RFC 4180), with a header, or with two columns and no header; its header tells the delimiter."""
    records = _records(read_lines(file.paths[0], max_chars, file.max_expansion), max_line_bytes(max_chars))
    first = next(records, None)
    if first is None:
        return
    if isinstance(first[1], BadLine):
        raise CorpusError(
            f"{file.name}:1: {first[1].reason} ({first[1].detail}). The first line of a CSV is its header."
        )
    headers = {delimiter: _split(first[1], delimiter) for delimiter in _DELIMITERS}
    found = [one for one, names in headers.items() if isinstance(names, list) and find_layout(names, file)]
    delimiter = (found or [max(_DELIMITERS, key=first[1].count)])[0]
    names = headers[delimiter]
    if isinstance(names, BadLine):
        raise CorpusError(f"{file.name}:1: {names.reason} ({names.detail}).")
    columns = header_columns(names, file)

    def rows() -> Iterator[tuple[int, Mapping[str, str] | BadLine]]:
        for line, record in records if columns else chain([first], records):
            values = record if isinstance(record, BadLine) else _split(record, delimiter)
            expected = columns or ["source", "target"]
            if isinstance(values, list) and len(values) != len(expected):
                values = BadLine("wrong number of columns", f"{len(values)}, not {len(expected)}")
            yield line, values if isinstance(values, BadLine) else dict(zip(expected, values, strict=True))

    yield from read_records(rows(), file)


def _records(lines: Iterable[tuple[int, str | BadLine]], limit: int) -> Iterator[tuple[int, str | BadLine]]:
    """The lines of each record, with the number of its first line: a quoted value may contain line feeds."""
    start, parts, size, quotes = 0, list[str](), 0, 0
    for number, line in lines:
        if isinstance(line, BadLine):
            yield number, line
            parts, size, quotes = [], 0, 0
            continue
        start = start if parts else number
        parts.append(line)
        size, quotes = size + len(line.encode()), quotes + line.count('"')
        if quotes % 2 == 0:
            yield start, "\n".join(parts)
        elif size > limit:
            yield start, BadLine("unclosed quotation mark", f"no other one in {limit} bytes")
        else:
            continue
        parts, size, quotes = [], 0, 0
    if parts:
        yield start, BadLine("unclosed quotation mark", "until the end of the file")


def _split(record: str, delimiter: str) -> list[str] | BadLine:
    try:
        (values,) = csv.reader([record], delimiter=delimiter, strict=True) if record else [[""]]
    except (csv.Error, ValueError) as error:
        return BadLine("not CSV", str(error))
    return values
