"""Reading Moses pairs: two text files whose lines translate each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from metaphrase.corpus.files import BitextFile
from metaphrase.corpus.rows import Row
from metaphrase.corpus.shifts import find_shift, length_similarity
from metaphrase.corpus.text import BadLine, count_lines, read_chunks, read_lines
from metaphrase.exceptions import CorpusError

#: Maximum number of lines searched for a shift of the sides, and the largest shift.
_COMPARED, _SHIFTED = 1_000_000, 10_000


def read_moses(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | BadLine]]:
    """Read a Moses pair, line by line."""
    _check_line_counts(file)
    sides = (read_lines(path, max_chars, file.max_expansion) for path in file.paths)
    for (line, source), (_, target) in zip(*sides, strict=True):
        if isinstance(source, BadLine):
            yield line, source
        elif isinstance(target, BadLine):
            yield line, target
        else:
            yield line, Row(source, target, file.source_lang, file.target_lang)


def _check_line_counts(file: BitextFile) -> None:
    """Check that the files of a Moses pair have the same number of lines."""
    first, second = (count_lines(path, file.max_expansion) for path in file.paths)
    if first != second:
        place = _first_shifted_line(file, first - second)
        where = "" if place is None else f" Judging from line lengths, the shift starts near line {place:,}."
        raise CorpusError(
            f"The sides of a Moses pair must have the same number of lines, but {file.paths[0]} has {first} and "
            f"{file.paths[1]} has {second}. Lines are missing, and the pairs after them are wrong: download or export "
            f"both files again.{where}"
        )


def _first_shifted_line(file: BitextFile, more: int) -> int | None:
    """The line of the first file from which lines match those ``more`` lines above in the second, by their lengths."""
    length_n, length_m = (_line_lengths(path, file.max_expansion) for path in file.paths)
    n = min(len(length_n), len(length_m))
    if abs(more) > min(n, _SHIFTED):
        return None
    shift = find_shift(length_similarity(length_n, length_m), np.arange(n), shifts=[-more])
    return None if shift is None else shift.first + 1


def _line_lengths(path: Path, max_expansion: float | None) -> NDArray[np.int64]:
    """Lengths in bytes of a file's first lines, including line feeds."""
    ends, size, lines = [], 0, 0
    for chunk in read_chunks(path, max_expansion):
        ends.append(size + 1 + np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10))
        size, lines = size + len(chunk), lines + len(ends[-1])
        if lines >= _COMPARED:
            break
    return np.diff(np.concatenate([[0], *ends]))[:_COMPARED]
