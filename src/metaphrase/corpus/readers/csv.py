"""Reading CSV."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from metaphrase.corpus.files import BitextFile
from metaphrase.corpus.readers.columns import find_layout, read_table
from metaphrase.corpus.rows import Row
from metaphrase.corpus.text import BadLine, max_line_bytes, read_lines

#: Spreadsheets of languages with a decimal comma separate columns by semicolons.
_DELIMITERS = (",", ";", "\t")
#: Lines that show the delimiter of a file without a header.
_PEEKED = 100
#: First line of files that are written for Excel, with the delimiter.
_SEP = re.compile(r"sep=([,;|\t])", re.IGNORECASE)

_Line = tuple[int, str | BadLine]


def read_csv(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | BadLine]]:
    """Read a CSV file (RFC 4180), with a header, or with two columns and no header."""
    lines: Iterator[_Line] = read_lines(file.paths[0], max_chars, file.max_expansion)
    limit = max_line_bytes(max_chars)
    peeked = list(islice(lines, _PEEKED))
    if not peeked:
        return
    if isinstance(first := peeked[0][1], str) and (match := _SEP.fullmatch(first)):
        delimiter, peeked = match[1], peeked[1:]
    else:
        delimiter = _delimiter(peeked, file, limit)
    yield from read_table(_records(chain(peeked, lines), delimiter, limit), file)


def _delimiter(peeked: list[_Line], file: BitextFile, limit: int) -> str:
    """The delimiter with which the first line is a header, else the one with which most records have two values."""
    for delimiter in _DELIMITERS:
        names = next(_records(peeked[:1], delimiter, limit))[1]
        if isinstance(names, list) and find_layout(names, file):
            return delimiter

    def pairs(delimiter: str) -> tuple[int, int]:
        found = sum(isinstance(one, list) and len(one) == 2 for _, one in _records(peeked, delimiter, limit))
        return found, str(peeked[0][1]).count(delimiter)

    return max(_DELIMITERS, key=pairs)


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
            yield number, BadLine("unclosed quotation mark", f"no closing one in the next {limit} readable bytes")
            again.extendleft(reversed(taken[1:]))
        except csv.Error as error:
            yield from ((at, BadLine("not CSV", str(error))) for at, _ in taken)
