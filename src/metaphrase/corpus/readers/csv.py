"""Reading CSV."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from metaphrase.corpus.files import BitextFile
from metaphrase.corpus.readers.columns import find_layout, header_columns, read_records
from metaphrase.corpus.rows import Row
from metaphrase.corpus.text import BadLine, max_line_bytes, read_lines
from metaphrase.exceptions import CorpusError

#: Spreadsheets of languages with a decimal comma separate columns by semicolons.
_DELIMITERS = (",", ";", "\t")
#: First line of files that are written for Excel, with the delimiter.
_SEP = re.compile(r"sep=([,;|\t])", re.IGNORECASE)

_Line = tuple[int, str | BadLine]


def read_csv(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | BadLine]]:
    """Read a CSV file (RFC 4180), with a header, or with two columns and no header; its header tells the delimiter."""
    lines, limit = read_lines(file.paths[0], max_chars, file.max_expansion), max_line_bytes(max_chars)
    first = next(lines, None)
    if first is None:
        return
    if isinstance(first[1], BadLine):
        raise CorpusError(
            f"{file.name}:1: {first[1].reason} ({first[1].detail}). The first line of a CSV is its header."
        )
    if match := _SEP.fullmatch(first[1]):
        records = _records(lines, match[1], limit)
    else:
        headers = {delimiter: next(_records([first], delimiter, limit))[1] for delimiter in _DELIMITERS}
        found = [one for one, names in headers.items() if isinstance(names, list) and find_layout(names, file)]
        records = _records(chain([first], lines), (found or [max(_DELIMITERS, key=first[1].count)])[0], limit)
    header = next(records, None)
    if header is None:
        return
    if isinstance(header[1], BadLine):
        raise CorpusError(f"{file.name}:1: {header[1].reason} ({header[1].detail}).")
    columns = header_columns(header[1], file)
    expected = columns or ["source", "target"]

    def rows() -> Iterator[tuple[int, Mapping[str, str] | BadLine]]:
        for line, values in records if columns else chain([header], records):
            if isinstance(values, list) and len(values) != len(expected):
                values = BadLine("wrong number of columns", f"{len(values)}, not {len(expected)}")
            yield line, values if isinstance(values, BadLine) else dict(zip(expected, values, strict=True))

    yield from read_records(rows(), file)


class _Unclosed(Exception):
    """A quotation mark is not closed."""


def _records(lines: Iterable[_Line], delimiter: str, limit: int) -> Iterator[tuple[int, list[str] | BadLine]]:
    """The values of each record, with the number of its first line: a quoted value may contain line feeds.

    All lines of a record that is not CSV are unusable. If a quotation mark is never closed, only its line is.
    """
    rest, again = iter(lines), deque[_Line]()  # read again after an unclosed quotation mark

    def following() -> _Line | None:
        return again.popleft() if again else next(rest, None)

    def texts() -> Iterator[str]:
        size = 0
        while (line := following()) is not None:
            taken.append(line)
            if isinstance(line[1], BadLine) or size > limit:
                raise _Unclosed
            size += len(line[1].encode())
            yield f"{line[1]}\n"
        raise _Unclosed

    while (line := following()) is not None:
        number, text = line
        if isinstance(text, BadLine):
            yield number, text
            continue
        taken = [line]
        try:
            yield number, next(csv.reader(chain([f"{text}\n"], texts()), delimiter=delimiter, strict=True))
        except _Unclosed:
            yield number, BadLine("unclosed quotation mark", f"no other one in the next {limit} readable bytes")
            again.extendleft(reversed(taken[1:]))
        except csv.Error as error:
            yield from ((at, BadLine("not CSV", str(error))) for at, _ in taken)
