"""Reading the pairs of one file, with one module for each file format.

A reader yields the numbered rows of a file, or a `BadLine` for an unusable line, in bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from metaphrase.corpus.files import BitextFile, dataset_rows, find_file
from metaphrase.corpus.readers.columns import read_records
from metaphrase.corpus.readers.csv import read_csv
from metaphrase.corpus.readers.jsonl import read_jsonl
from metaphrase.corpus.readers.moses import read_moses
from metaphrase.corpus.readers.parquet import read_parquet
from metaphrase.corpus.readers.tmx import read_tmx
from metaphrase.corpus.readers.tsv import read_tsv
from metaphrase.corpus.report import CorpusReport, format_examples
from metaphrase.corpus.rows import Row, check_row
from metaphrase.corpus.text import BAD_RATE_AFTER, EMPTY, MAX_BAD_RATE, MAX_CHARS, BadLine
from metaphrase.exceptions import CorpusError
from metaphrase.io.counts import counted
from metaphrase.io.digests import unchanged


def read_dataset(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | BadLine]]:
    """Read a data set of the library `datasets`: in memory, or as a stream from the Hub."""
    yield from read_records(enumerate(dataset_rows(file), 1), file)


#: The reader of each format of a `BitextFile`.
READERS: dict[str, Callable[[BitextFile, int], Iterator[tuple[int, Row | BadLine]]]] = {
    "tsv": read_tsv,
    "csv": read_csv,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "tmx": read_tmx,
    "moses": read_moses,
    "hub": read_dataset,
    "dataset": read_dataset,
}


def read_pairs(
    path: str | Path | BitextFile,
    *,
    source_lang: str | None = None,
    target_lang: str = "en",
    max_chars: int = MAX_CHARS,
    max_bad_rate: float = MAX_BAD_RATE,
    report: CorpusReport | None = None,
) -> Iterator[tuple[int, str, str, dict[str, str]]]:
    """Read the pairs of one file in bounded memory, without cleaning.

    Args:
        path: A file, a Moses pair or a Hub data set, named as for `load_corpus`.
        source_lang: Language of the source, if neither columns nor the file's name state it.
        target_lang: The target language of the corpus.
        max_chars: A side with more characters is unreadable.
        max_bad_rate: The file is refused if a larger share of its lines is unreadable, once 1000 lines are read.
        report: Receives the counts of pairs read and lines dropped.

    Yields:
        Line number (from 1; the row's in Parquet and on the Hub, the unit's in TMX), source, target, and the known
        columns among ``source_lang``, ``target_lang`` and ``OPTIONAL``.

    Raises:
        ValueError: The file is damaged, not UTF-8, not rectangular, has too many unreadable lines, or changes while it is
            read; the message names the file and the line.
    """
    file = path if isinstance(path, BitextFile) else find_file(path, source_lang=source_lang, target_lang=target_lang)
    file = file.pinned()
    report = CorpusReport() if report is None else report
    report.restart(file.name)
    unreadable: dict[str, list[str]] = {}
    read = bad = empty = 0

    def check_rate() -> None:
        if read >= BAD_RATE_AFTER and bad > max_bad_rate * read:
            raise CorpusError(
                f"{file.name}: {bad} of the first {read} lines are unreadable, more than {max_bad_rate:.0%}: "
                f"{format_examples(unreadable)}. Fix the file, or load it in Python with a larger max_bad_rate."
            )

    try:
        with unchanged(file.pins):
            for line, row in READERS[file.format](file, max_chars):
                read += 1
                checked = row if isinstance(row, BadLine) else check_row(row, file.into, max_chars)
                if isinstance(checked, Row):
                    report.of(file.name, checked.source_lang or "?").read += 1
                    known = zip(Row._fields[2:], checked[2:], strict=True)
                    named = {name: value for name, value in known if value is not None}
                    yield line, checked.source, checked.target, named
                    continue
                counts = report.of(file.name, file.language or "?")
                counts.read += 1
                counts.drop(checked.reason, f"{file.name}:{line}" + (f" ({checked.detail})" if checked.detail else ""))
                empty += checked.reason == EMPTY
                bad += checked.fault
                if checked.fault or checked.reason == EMPTY:
                    unreadable[checked.reason] = counts.examples[checked.reason]
                    check_rate()
        check_rate()
        if not read:
            raise CorpusError(f"{file.name} has no pairs: it is empty, or has nothing but a header.")
        if bad + empty == read:
            raise CorpusError(
                f"{file.name} has no readable pair in {counted(read, 'line')}: {format_examples(unreadable)}."
            )
    finally:
        report.log_unreadable(file.name, unreadable, bad + empty, read)


def read_parallel(path: str | Path) -> list[tuple[str, str]]:
    """Read a TSV file with the header ``source target …`` in which every line must be valid, such as a test set.

    Returns ``(source, target)`` of each line; English is the target.

    Raises:
        ValueError: The header is missing, or a line is malformed or in another language than the file; the message names the
            file and the line.
    """
    file = find_file(path)
    if file.format != "tsv":
        raise CorpusError(f"{path} is not a TSV file.")
    pairs, language = [], file.language
    with unchanged(file.pinned().pins):
        for line, row in read_tsv(file, MAX_CHARS, needs_header=True):
            checked = row if isinstance(row, BadLine) else check_row(row, file.into, MAX_CHARS)
            if isinstance(checked, BadLine):
                raise CorpusError(f"{path}:{line}: {' '.join(filter(None, (checked.reason, checked.detail)))}.")
            language = language or checked.source_lang
            if checked.source_lang not in (language, None) or checked.target_lang not in (file.into, None):
                raise CorpusError(
                    f"{path}:{line}: a test set has one language, here {language!r} with {file.into!r}, but this pair is in "
                    f"{checked.source_lang!r} and {checked.target_lang!r}. Write a file for each language, such as "
                    "sw-en.tsv.gz."
                )
            pairs.append((checked.source, checked.target))
    return pairs
