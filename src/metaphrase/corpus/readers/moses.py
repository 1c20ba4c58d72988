"""Reading Moses pairs: two text files whose lines translate each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from metaphrase.corpus.files import BitextFile
from metaphrase.corpus.rows import Row
from metaphrase.corpus.text import BadLine, count_lines, read_chunks, read_lines
from metaphrase.exceptions import CorpusError

#: Maximum number of lines searched for a shift of the sides, and the largest shift.
_COMPARED, _SHIFTED = 1_000_000, 10_000
#: Minimum number of lines on either side of a shift, and minimum number of standard errors, as evidence.
_PART_LINES, _PART_ERRORS = 20, 4.0


def read_moses(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | BadLine]]:
    """Read a Moses pair, line by line."""
    check_line_counts(file)
    sides = (read_lines(path, max_chars, file.max_expansion) for path in file.paths)
    for (line, source), (_, target) in zip(*sides, strict=True):
        if isinstance(source, BadLine):
            yield line, source
        elif isinstance(target, BadLine):
            yield line, target
        else:
            yield line, Row(source, target, file.source_lang, file.target_lang)


def check_line_counts(file: BitextFile) -> None:
    """Check that the files of a Moses pair have the same number of lines.

    Raises:
        ValueError: The numbers differ. The message has both counts and, if the lengths of the lines reveal it, the first
            line that does not match.
    """
    first, second = (count_lines(path, file.max_expansion) for path in file.paths)
    if first != second:
        place = _first_shifted_line(file, first - second)
        where = "" if place is None else f" Judging from line lengths, the shift starts near line {place:,}."
        raise CorpusError(
            f"The sides of a Moses pair must have the same number of lines, but {file.paths[0]} has {first} and "
            f"{file.paths[1]} has {second}. A line is missing, and the pairs after it are wrong: download both files "
            f"again.{where}"
        )


def _first_shifted_line(file: BitextFile, more: int) -> int | None:
    """Find the first line of the first file from which its lines match those ``more`` lines above in the second file.

    Two lines match if the ratio of their lengths is close to the mean. The result maximises the match with lines of the
    same number before it plus the match with the lines above after it. None if the evidence is weak.
    """
    if abs(more) > _SHIFTED:
        return None
    log_s, log_t = (np.log(_line_lengths(path, file.max_expansion)) for path in file.paths)
    rows_n = np.arange(max(0, more), min(len(log_s), len(log_t), len(log_t) + more))
    if not len(rows_n):
        return None
    usual = log_s.mean() - log_t.mean()
    beside_n, above_n = (np.abs(log_s[rows_n] - log_t[rows_n - by] - usual) for by in (0, more))
    gain_n = above_n - beside_n
    at = int(np.append(0, np.cumsum(gain_n)).argmax())
    before, after = _clearly_positive(gain_n[:at]), _clearly_positive(-gain_n[at:])
    if after and (before or at < _PART_LINES):
        return int(rows_n[at]) + 1
    return None


def _clearly_positive(values_n: NDArray[np.float64]) -> bool:
    """Whether there are enough values, with a mean significantly above 0."""
    if len(values_n) < _PART_LINES:
        return False
    return float(values_n.mean()) > _PART_ERRORS * max(float(values_n.std()), 1e-9) / math.sqrt(len(values_n))


def _line_lengths(path: Path, max_expansion: float | None) -> NDArray[np.int64]:
    """Lengths in bytes of a file's first lines, including line feeds."""
    ends, size, lines = [], 0, 0
    for chunk in read_chunks(path, max_expansion):
        ends.append(size + 1 + np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10))
        size, lines = size + len(chunk), lines + len(ends[-1])
        if lines >= _COMPARED:
            break
    return np.diff(np.concatenate([[0], *ends]))[:_COMPARED]
