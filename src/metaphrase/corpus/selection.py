"""The clean rows of files: cleaned, without duplicates, of the chosen languages, up to a limit."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from metaphrase.corpus.cleaning import Cleaning, tidy_row
from metaphrase.corpus.files import BitextFile, source_language, states_languages
from metaphrase.corpus.readers import read_pairs
from metaphrase.corpus.report import CorpusReport, Counts
from metaphrase.corpus.rows import OPTIONAL, Row
from metaphrase.corpus.text import composed
from metaphrase.exceptions import CorpusError
from metaphrase.io.digests import unchanged

logger = logging.getLogger(__name__)

#: Words that are frequent in English and rare in other languages.
_ENGLISH = frozenset(["the", "of", "and", "to", "with", "that", "this", "you", "from"])
#: Pairs of each file that are inspected for swapped or identical sides.
_INSPECTED = 1000


@dataclass(frozen=True)
class Selection:
    """Which pairs of a file become rows. An empty set of languages keeps all; the limit is for each language."""

    cleaning: Cleaning | None
    drop_duplicates: bool
    languages: frozenset[str]
    limit: int | None
    max_chars: int
    max_bad_rate: float


def select_rows(files: Iterable[BitextFile], selection: Selection, report: CorpusReport) -> Iterator[Row]:
    """Read the clean rows of some files."""
    limit = _Limit(selection)
    seen: set[bytes] = set()
    for file in files:
        if limit.ends(file):
            continue
        pairs = read_pairs(file, max_chars=selection.max_chars, max_bad_rate=selection.max_bad_rate, report=report)
        with unchanged(file.pins):  # also if reading stops at the limit
            for line, source, target, known in pairs:
                language = source_language(known, file)
                counts = report.of(file.name, language)
                row = Row(source, target, language, known.get("target_lang") or file.into, *map(known.get, OPTIONAL))
                row, reason = _clean(row, selection, file.into)
                if reason is None and limit.is_reached(language):
                    reason = "beyond the limit"
                if reason is None and selection.drop_duplicates and _is_repeated(row, seen):
                    reason = "duplicate"
                if reason is not None:
                    counts.drop(reason, f"{file.name}:{line}")
                    continue
                counts.kept += 1
                limit.kept[language] += 1
                if counts.kept <= _INSPECTED:
                    _inspect(counts, row, file.name)
                yield row
                if limit.ends(file):
                    break


class _Limit:
    """The number of rows kept of each language, and their limit."""

    def __init__(self, selection: Selection) -> None:
        self.kept: Counter[str] = Counter()
        self._limit, self._languages = selection.limit, selection.languages
        self._has_others = cache(states_languages)

    def is_reached(self, language: str | None) -> bool:
        return self._limit is not None and language is not None and self.kept[language] >= self._limit

    def ends(self, file: BitextFile) -> bool:
        """Whether all further rows of a file are beyond the limit."""
        if self._languages and all(map(self.is_reached, self._languages)):
            return True
        return self.is_reached(file.language) and not self._has_others(file)


def _clean(row: Row, selection: Selection, into: str) -> tuple[Row, str | None]:
    """A tidied row of a corpus with a target language, and why it is dropped."""
    if row.source_lang is not None and (row.source_lang == row.target_lang or row.target_lang != into):
        return row, "other languages"
    if selection.languages and row.source_lang not in selection.languages:
        return row, "language not chosen"
    if selection.cleaning is None:
        return row, None
    tidied = tidy_row(row, selection.cleaning)
    if tidied is None:
        return row, "alignment lost"
    return tidied, selection.cleaning.fault(tidied.source, tidied.target)


def _is_repeated(row: Row, seen: set[bytes]) -> bool:
    """Whether the texts and languages of a row occurred before, in any Unicode form and spacing; records their digest."""
    key = hashlib.blake2b(composed("\0".join(map(str, row[:4]))).encode(), digest_size=16).digest()
    if key in seen:
        return True
    seen.add(key)
    return False


def _inspect(counts: Counts, row: Row, file: str) -> None:
    """Check the first pairs of a file for swapped or identical sides."""
    counts.identical += row.source == row.target
    for side, text in enumerate((row.source, row.target)):
        counts.english[side] += not _ENGLISH.isdisjoint(text.lower().split())
    if counts.kept in (100, _INSPECTED):
        if counts.identical > counts.kept / 2:
            raise CorpusError(
                f"{file}: both sides are the same text in {counts.identical} of the first {counts.kept} pairs. "
                "Check that the two sides are not the same file or column."
            )
        source, target = counts.english
        if row.target_lang == "en" and source > max(2 * target, counts.kept / 5):
            message = "%s: %d of the first %d sources look English, %d of the targets. Are the sides swapped?"
            logger.warning(message, file, source, counts.kept, target)
