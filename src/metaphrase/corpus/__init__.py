"""Parallel text in: TSV, Moses pairs, JSONL, Parquet, TMX and Hub data sets become one clean, labelled data set.

A corpus row has the columns ``source``, ``target``, ``source_lang`` and ``target_lang`` and, where a file has them,
those of ``OPTIONAL``: ``alignment`` (Pharaoh ``i-j``), ``alignment_scores`` (a number for each link), ``segmenter`` (which
words the links count, ``whitespace`` or ``icu``), ``source_bt`` and ``target_bt`` (back-translations, `` ||| `` between
several). The corpus is English-centric: English is the target. A file that says otherwise, by its name (``en-sw.tsv``),
its columns or its suffixes, is turned round, and what belongs to its sides with it; ``target_lang`` puts another language
in English's place.

Reading is strict. Text is UTF-8, a line ends at a line feed and nowhere else, and a file whose sides may be paired
wrongly is refused. A line that cannot be read is dropped and counted, and more than a few of them are an error: the
`CorpusReport` says how many pairs were read, how many were kept, and why the rest were not.
"""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import hashlib
import importlib.metadata
import io
import json
import logging
import math
import random
import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO
from xml.parsers import expat

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    Value,
    interleave_datasets,
    load_dataset,
    load_dataset_builder,
)
from datasets.fingerprint import Hasher
from numpy.typing import NDArray

from metaphrase.corpus.words import format_links, parse_links, word_spans
from metaphrase.exceptions import AlignmentFormatError, CorpusError, MissingFileError, UsageError

logger = logging.getLogger(__name__)

#: A line longer than this on one side is no sentence.
MAX_CHARS = 10_000
#: Above this share of unreadable lines a file is refused, once this many lines were read.
MAX_BAD_RATE, BAD_RATE_AFTER = 0.05, 1000
#: A .gz or Parquet file of which more bytes than the second number came is refused once they are so many times the
#: packed ones: text is seldom packed to less than a twentieth.
MAX_EXPANSION, EXPANSION_AFTER = 200, 64 << 20
#: How many examples of each fault a report keeps.
EXAMPLES = 5

COLUMNS = ("source", "target", "source_lang", "target_lang")
#: Columns that a corpus may have beside these.
OPTIONAL = ("alignment", "alignment_scores", "segmenter", "source_bt", "target_bt")
#: Those of them that hold sentences, with this between several.
BACK_TRANSLATIONS, SEPARATOR = ("source_bt", "target_bt"), " ||| "
SPLITS = ("train", "dev", "test")
FORMATS = {".tsv": "tsv", ".jsonl": "jsonl", ".parquet": "parquet", ".tmx": "tmx"}

_SOURCE_NAMES, _TARGET_NAMES = ("source", "src", "non_english"), ("target", "tgt", "trg", "english")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:_[a-z]{2,8})?")
_NAMED = "[A-Za-z]{2,3}(?:_[A-Za-z]{2,8}|-[A-Z][a-z]{3}|-[A-Z]{2})?"  # sw, zh_CN, zh-Hant, pt-BR
_PAIR = re.compile(rf"(?:^|[._])({_NAMED})-({_NAMED})(?=[._]|$)")
_SPLIT = re.compile(rf"\.({'|'.join(SPLITS)})(?=\.|$)")
_BRACES = re.compile(r"(.*)\{([^,{}]+),([^,{}]+)\}(.*)")
_HUB = re.compile(r"hf:(?P<name>[^:@#]+)(?::(?P<config>[^@#]+))?(?:@(?P<split>[^#]+))?(?:#(?P<revision>.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BREAK = re.compile(r"[\t\n\r]")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
#: Words that are frequent in English and hardly occur elsewhere.
_ENGLISH = frozenset(["the", "of", "and", "to", "with", "that", "this", "you", "from"])
_INSPECTED = 1000
_PEEKED = 100  # pairs of a file that tell which columns a stream has
_CHUNK = 10_000
#: Rows of a Parquet file that are read at a time, at most; bytes that they should be; rows of fields that are read at a time,
#: at least; rows that become Python's at a time.
_PARQUET_ROWS, _PARQUET_BYTES, _PARQUET_FIELDS, _PARQUET_FEW = 1000, 8 << 20, 16, 100
#: Lines of a Moses pair, and lines that one side may have more, in which is looked for where the sides part; lines on
#: either side of that place that must show it, and how many standard errors they must be off.
_COMPARED, _SHIFTED, _PART_LINES, _PART_ERRORS = 1_000_000, 10_000, 20, 4.0

Tokenizer = Callable[[str], Sequence[str]]


# ------------------------------------------------------------------------------------------------------------ cleaning


@dataclass(frozen=True)
class Cleaning:
    """Which pairs are dropped, and how the text of the others is tidied.

    By itself it strips both sides and drops pairs with a side that has neither letter nor digit, and exact duplicates.
    The presets `dap` and `ppa` add the papers' filters.

    Attributes:
        tokenizer: Splits a sentence into the pieces that the filters count; needed where one of them is set.
        duplicates: Drop a pair that occurred before; None means yes, but not in a stream, where the memory of about
            100 bytes for every pair would grow without end.
        control_characters: Remove control characters and ``"``, and turn tabs into spaces.
        forbidden: Drop a pair with one of these strings in either side.
        placeholders: Drop a pair with a side that is one of these strings.
        identical: Drop a pair with identical sides.
        min_pieces: Fewest pieces of either side.
        max_ratio: Drop a pair whose longer side has more pieces than ``max_ratio`` times the shorter one …
        ratio_floor: … and more than this.
        max_shorter: Most pieces of the shorter side.
        max_together: Most pieces of both sides together.
        max_copied: Drop a pair where this share of either side's pieces occurs in the other side, if both sides have
            more than five.
    """

    tokenizer: Tokenizer | None = None
    duplicates: bool | None = None
    control_characters: bool = False
    forbidden: tuple[str, ...] = ()
    placeholders: tuple[str, ...] = ()
    identical: bool = False
    min_pieces: int = 0
    max_ratio: float | None = None
    ratio_floor: int = 0
    max_shorter: int | None = None
    max_together: int | None = None
    max_copied: float | None = None

    @classmethod
    def dap(cls, tokenizer: Tokenizer | None = None) -> Cleaning:
        """The filters of DAP's released code, which counts the pieces of multilingual BERT's tokenizer.

        Args:
            tokenizer: Splits a sentence into pieces, e.g. ``AutoTokenizer.from_pretrained(...).tokenize``. None
                leaves it to `load_corpus`, or to `without_pieces`.

        Reference: Li et al. 2023, "Dual-Alignment Pre-training for Cross-lingual Sentence Embedding".
        """
        return cls(
            tokenizer=tokenizer,
            control_characters=True,
            forbidden=("@", "http"),
            placeholders=("N/A",),
            identical=True,
            min_pieces=4,
            max_ratio=2,
            ratio_floor=32,
            max_shorter=64,
            max_copied=0.5,
        )

    @classmethod
    def ppa(cls, tokenizer: Tokenizer | None = None) -> Cleaning:
        """The length filters of PPA: at least 10 pieces on each side and at most 128 on both together.

        Args:
            tokenizer: Splits a sentence into pieces; PPA counts those of multilingual BERT's tokenizer.

        Reference: Pan et al. 2021, "Multilingual BERT Post-Pretraining Alignment".
        """
        return cls(tokenizer=tokenizer, min_pieces=10, max_together=128)

    @property
    def counts_pieces(self) -> bool:
        """Whether one of the filters counts pieces."""
        limits = (self.max_ratio, self.max_shorter, self.max_together, self.max_copied)
        return self.min_pieces > 0 or any(limit is not None for limit in limits)

    def without_pieces(self) -> Cleaning:
        """The same cleaning without the filters that count pieces."""
        return dataclasses.replace(
            self,
            tokenizer=None,
            min_pieces=0,
            max_ratio=None,
            ratio_floor=0,
            max_shorter=None,
            max_together=None,
            max_copied=None,
        )

    def tidy(self, text: str) -> str:
        """A sentence as it goes into the corpus.

        >>> Cleaning.dap().tidy(' "Habari" yako ')
        'Habari yako'
        """
        if self.control_characters:
            text = _CONTROL.sub("", text).replace("\t", " ").replace('"', "")
        return text.strip()

    def fault(self, source: str, target: str) -> str | None:
        """Why a tidied pair is dropped, or None if it stays; exact duplicates are not this function's affair.

        >>> Cleaning(identical=True).fault("OK", "OK")
        'identical sides'
        """
        return self.text_fault(source, target) or self.piece_fault(source, target)

    def text_fault(self, source: str, target: str) -> str | None:
        """Why a tidied pair is dropped, by the filters that need no pieces."""
        if not any(map(str.isalnum, source)) or not any(map(str.isalnum, target)):
            return "no words"
        if any(string in source or string in target for string in self.forbidden):
            return "forbidden string"
        if source in self.placeholders or target in self.placeholders:
            return "placeholder"
        if self.identical and source == target:
            return "identical sides"
        return None

    def piece_fault(self, source: str, target: str) -> str | None:
        """Why a tidied pair is dropped, by the filters that count pieces."""
        if self.tokenizer is None or not self.counts_pieces:
            return None
        pieces = self.tokenizer(source), self.tokenizer(target)
        shorter, longer = sorted(map(len, pieces))
        if shorter < self.min_pieces:
            return "too few pieces"
        if self.max_ratio is not None and longer > max(self.max_ratio * shorter, self.ratio_floor):
            return "length ratio"
        if self.max_shorter is not None and shorter > self.max_shorter:
            return "too many pieces"
        if self.max_together is not None and shorter + longer > self.max_together:
            return "too many pieces"
        if self.max_copied is not None and shorter > 5:
            for side, other in (pieces, pieces[::-1]):
                if sum(map(set(other).__contains__, side)) >= self.max_copied * len(side):
                    return "copied"
        return None


# -------------------------------------------------------------------------------------------------------------- report


@dataclass
class Counts:
    """What became of the pairs of one file and language; ``read == kept + dropped.total()``."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    english: list[int] = field(default_factory=lambda: [0, 0])  # of the first pairs kept: sides that look English
    identical: int = 0  # of the first pairs kept

    def drop(self, reason: str, example: str) -> None:
        """Count a dropped pair."""
        self.dropped[reason] += 1
        if len(self.examples[reason]) < EXAMPLES:
            self.examples[reason].append(example)


class CorpusReport:
    """How many pairs were read, kept and dropped, per file and language, with the first examples of each reason.

    In a stream it is filled while the stream is read, by the process that reads it (a data loader's workers fill their
    own copies), and a file's counts are those of its latest pass.

    Args:
        logged: Files whose unreadable lines are not logged (again).

    Attributes:
        counts: The `Counts` of each ``(file, language)``; the language of an unreadable line may be unknown (``"?"``).
        sampled: Pairs per language after temperature mixing, where there is one.
    """

    def __init__(self, logged: Iterable[str] = ()) -> None:
        self.counts: dict[tuple[str, str], Counts] = {}
        self.sampled: dict[str, int] = {}
        self._logged = set(logged)

    def __deepcopy__(self, memo: dict[int, Any]) -> CorpusReport:
        return self  # `datasets` copies what a stream is made of; the copies fill this one report

    def of(self, file: str, language: str) -> Counts:
        """The counts of a file and language."""
        key = file, language
        if key not in self.counts:
            self.counts[key] = Counts()
        return self.counts[key]

    def restart(self, file: str) -> None:
        """Forget the counts of a file that is about to be read again."""
        for key in [key for key in self.counts if key[0] == file]:
            del self.counts[key]

    @property
    def read(self) -> int:
        """Pairs read."""
        return sum(counts.read for counts in self.counts.values())

    @property
    def kept(self) -> int:
        """Pairs kept."""
        return sum(counts.kept for counts in self.counts.values())

    @property
    def dropped(self) -> Counter[str]:
        """Pairs dropped, by reason."""
        return sum((counts.dropped for counts in self.counts.values()), Counter[str]())

    @property
    def languages(self) -> dict[str, int]:
        """Pairs kept per source language."""
        kept: Counter[str] = Counter()
        for (_, language), counts in self.counts.items():
            kept[language] += counts.kept
        return {language: n for language, n in kept.items() if n}

    def table(self) -> list[dict[str, Any]]:
        """One row per file and language: ``file``, ``language``, ``read``, ``kept`` and ``dropped`` in words."""
        return [
            {"file": file, "language": language, "read": c.read, "kept": c.kept, "dropped": _in_words(c.dropped)}
            for (file, language), c in self.counts.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """The whole report as plain data."""
        files = [
            {
                "file": file,
                "language": language,
                "read": counts.read,
                "kept": counts.kept,
                "dropped": dict(counts.dropped),
                "examples": dict(counts.examples),
            }
            for (file, language), counts in self.counts.items()
        ]
        report: dict[str, Any] = {"read": self.read, "kept": self.kept, "dropped": dict(self.dropped)}
        report |= {"languages": self.languages, "files": files}
        return report | ({"sampled": dict(self.sampled)} if self.sampled else {})

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CorpusReport:
        """The report that `to_dict` wrote down.

        >>> report = CorpusReport()
        >>> report.of("x.tsv", "sw").drop("duplicate", "x.tsv:3")
        >>> CorpusReport.from_dict(report.to_dict()).dropped
        Counter({'duplicate': 1})
        """
        report = cls()
        for row in content["files"]:
            counts = report.of(row["file"], row["language"])
            counts.read, counts.kept, counts.dropped = row["read"], row["kept"], Counter(row["dropped"])
            counts.examples.update(row["examples"])
        return report

    def __str__(self) -> str:
        rows = [("file", "language", "read", "kept", "dropped")]
        rows += [
            (Path(row["file"]).name, row["language"], f"{row['read']:,}", f"{row['kept']:,}", row["dropped"])
            for row in self.table()
        ]
        if len(rows) > 2:
            rows.append(("total", "", f"{self.read:,}", f"{self.kept:,}", _in_words(self.dropped)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = ("<", "<", ">", ">", "")
        return "\n".join(
            "  ".join(f"{cell:{a}{w if a else ''}}" for cell, a, w in zip(row, aligned, widths, strict=True)).rstrip()
            for row in rows
        )

    def log_unreadable(self, file: str, unreadable: Mapping[str, Sequence[str]], n: int, read: int) -> None:
        """Log a file's unreadable lines, the first time that it is read."""
        if unreadable and file not in self._logged:
            self._logged.add(file)
            logger.warning("%s: %d of %d lines were unreadable: %s.", file, n, read, _first(unreadable))


def _in_words(dropped: Counter[str]) -> str:
    return ", ".join(f"{reason} {n:,}" for reason, n in dropped.most_common())


# --------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class BitextFile:
    """One file (or Moses pair, or Hub data set) of parallel text.

    Attributes:
        name: How it was named; the report and the errors call it so.
        format: ``tsv``, ``jsonl``, ``parquet``, ``tmx``, ``moses`` or ``hub``.
        paths: Its file, or the two files of a Moses pair, source language first; none for a Hub data set.
        source_lang: Language of the column ``source``, as far as the file's name or the caller tells.
        target_lang: Language of the column ``target``.
        into: The corpus's target language.
        split: Split of a Hub data set.
        revision: Branch, tag or commit of a Hub data set; None is what the Hub shows.
        max_expansion: How many times as large as its packed bytes a ``.gz`` or Parquet file may be; None is without end.
    """

    name: str
    format: str
    paths: tuple[Path, ...] = ()
    source_lang: str | None = None
    target_lang: str | None = None
    into: str = "en"
    split: str = "train"
    revision: str | None = None
    max_expansion: float | None = MAX_EXPANSION

    @property
    def language(self) -> str | None:
        """The language that is not the corpus's target."""
        return self.target_lang if self.source_lang == self.into else self.source_lang


def find_files(
    corpus: str | Path | Sequence[str | Path],
    *,
    languages: Sequence[str] | None = None,
    source_lang: str | None = None,
    target_lang: str = "en",
    split: str = "train",
) -> list[BitextFile]:
    """The files of a corpus; see `load_corpus`, whose arguments these are.

    Raises:
        FileNotFoundError: There is no such file, or a folder has none for a language or split.
        ValueError: A file's format or languages cannot be told.
    """
    items = [corpus] if isinstance(corpus, str | Path) else list(corpus)
    wanted = [_code(language) for language in languages or ()]
    into = _code(target_lang)
    given = _code(source_lang) if source_lang else None
    files = list(dict.fromkeys(chain.from_iterable(_files(str(item), into, split) for item in items)))
    if given is None and len(wanted) == 1:
        given = wanted[0]
    for i, file in enumerate(files):
        if file.language is None and given:
            files[i] = dataclasses.replace(file, source_lang=given, target_lang=into)
        elif source_lang and file.language != given:
            raise CorpusError(f"{file.name} is in {file.language!r} by its name, but source_lang is {given!r}.")
    found = {file.language for file in files}
    if wanted and None not in found:
        if missing := [language for language in wanted if language not in found]:
            there = ", ".join(sorted(filter(None, found))) or "none"
            raise MissingFileError(f"The corpus has no pairs for {', '.join(missing)}. Its languages: {there}.")
        files = [file for file in files if file.language in wanted]
    return files


def _files(item: str, into: str, split: str) -> list[BitextFile]:
    """The files behind one name."""
    if item.startswith("hf:"):
        match = _HUB.fullmatch(item)
        if match is None:
            raise CorpusError(
                f"{item!r} is no Hub data set; write hf:org/name, hf:org/name:config, …@split or …#revision."
            )
        pair = _named_pair(match["config"] or Path(match["name"]).name, into)
        return [BitextFile(item, "hub", (), *pair, into, match["split"] or split, match["revision"])]
    path = Path(item)
    if path.is_dir():
        return _folder(path, into, split)
    if braces := _BRACES.fullmatch(item):
        before, first, second, after = braces.groups()
        return [_moses(item, Path(before + first + after), Path(before + second + after), into)]
    if "," in item and not path.exists():
        first, _, second = item.partition(",")
        return [_moses(item, Path(first), Path(second), into)]
    if path.is_file():
        return [BitextFile(item, _format(path), (path,), *_named_pair(_stem(path), into), into)]
    sides = _sides_of(path, into)
    if sides is None:
        raise MissingFileError(f"There is no file, folder or Moses pair {item}.")
    return [_moses(",".join(map(str, sides)), *sides, into)]


def _folder(folder: Path, into: str, split: str) -> list[BitextFile]:
    """Files ``xx-en[.split].ext`` of a folder: those of the split, or without one, for languages that lack it."""
    found: dict[str, list[tuple[str | None, BitextFile]]] = defaultdict(list)
    splits = set()
    for path in sorted(folder.iterdir()):
        source_lang, target_lang = _named_pair(_stem(path), into)
        if source_lang is None or not path.is_file():
            continue
        if path.name.removesuffix(".gz").endswith(tuple(FORMATS)):
            file = BitextFile(str(path), _format(path), (path,), source_lang, target_lang, into)
        elif _suffix(path) == into and (sides := _sides_of(path.with_name(_stem(path)), into)):
            file = _moses(",".join(map(str, sides)), *sides, into)
        else:
            continue
        match = _SPLIT.search(_stem(path))
        splits.add(match[1] if match else None)
        found[str(file.language)].append((match[1] if match else None, file))
    files = []
    for candidates in found.values():
        chosen = [file for part, file in candidates if part == split]
        files += chosen or [file for part, file in candidates if part is None]
    if not files:
        has = f"Its splits are: {', '.join(sorted(filter(None, splits)))}." if splits else "It has no parallel files."
        raise MissingFileError(f"{folder} has no file named xx-{into}[.{split}].tsv.gz or the like. {has}")
    return files


def _moses(name: str, first: Path, second: Path, into: str) -> BitextFile:
    """A Moses pair, its languages told by the suffixes; the corpus's target comes second."""
    for path in (first, second):
        if not path.is_file():
            raise MissingFileError(f"The Moses pair {name} lacks the file {path}.")
    languages = [_code(s) if _LANGUAGE.fullmatch((s := _suffix(path)).lower()) else None for path in (first, second)]
    if languages[0] == into:
        return BitextFile(name, "moses", (second, first), languages[1], into, into)
    if languages[1] == into:
        return BitextFile(name, "moses", (first, second), languages[0], into, into)
    return BitextFile(name, "moses", (first, second), None, None, into)


def _sides_of(prefix: Path, into: str) -> tuple[Path, Path] | None:
    """The two files ``prefix.xx[.gz]`` and ``prefix.en[.gz]``, or None; a pair in the prefix tells which."""
    if not prefix.parent.is_dir():
        return None
    sides: dict[str, Path] = {}
    for path in sorted(prefix.parent.iterdir()):
        code = _suffix(path)
        if _stem(path) == prefix.name and _LANGUAGE.fullmatch(code.lower()):
            sides.setdefault(_code(code), path)
    named = set(filter(None, _named_pair(prefix.name, into)))
    others = [code for code in sides if code != into and (code in named or not named) and code not in FORMATS.values()]
    return (sides[others[0]], sides[into]) if into in sides and len(others) == 1 else None


def _format(path: Path) -> str:
    suffix = "." + _suffix(path)
    if suffix not in FORMATS:
        raise CorpusError(
            f"{path} is of no known format; known are {', '.join(FORMATS)} (also .gz), and the Moses pair 'x.sw,x.en'."
        )
    return FORMATS[suffix]


def _suffix(path: Path) -> str:
    return path.name.removesuffix(".gz").rpartition(".")[2]


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").rpartition(".")[0]


def _named_pair(name: str, into: str) -> tuple[str | None, str | None]:
    """The languages that a name such as ``europarl.sw-en.train`` tells, in its order, if one is the target."""
    for match in _PAIR.finditer(name):
        first, second = map(_code, match.groups())
        if into in (first, second) and first != second:
            return first, second
    return None, None


def _code(language: str) -> str:
    """The bare language: ``zh`` for ``zh_CN`` and ``zh-Hans``."""
    return re.split("[-_]", language.strip().lower())[0]


# ------------------------------------------------------------------------------------------------------------- readers


class _Bad(NamedTuple):
    """What stands in the place of a line that gives no pair; not every one of them is a fault of the file."""

    reason: str
    detail: str = ""
    fault: bool = True


class Row(NamedTuple):
    """A pair as it goes into the corpus."""

    source: str
    target: str
    source_lang: str | None = None
    target_lang: str | None = None
    alignment: str | None = None
    alignment_scores: str | None = None
    segmenter: str | None = None
    source_bt: str | None = None
    target_bt: str | None = None


def read_pairs(
    path: str | Path | BitextFile,
    *,
    source_lang: str | None = None,
    target_lang: str = "en",
    max_chars: int = MAX_CHARS,
    max_bad_rate: float = MAX_BAD_RATE,
    report: CorpusReport | None = None,
) -> Iterator[tuple[int, str, str, dict[str, str]]]:
    """Read the pairs of one file as they stand there, in bounded memory and uncleaned.

    Args:
        path: A file, a Moses pair or a Hub data set, named as for `load_corpus`.
        source_lang: Language of the source, where neither columns nor the file's name tell it.
        target_lang: The language that is made the target.
        max_chars: A side longer than this is unreadable.
        max_bad_rate: Share of unreadable lines, of 1000 or more, above which the file is refused.
        report: Where pairs read and lines dropped are counted.

    Yields:
        Line number (from 1; the row's in Parquet and on the Hub, the unit's in TMX), source, target, and the columns
        among ``source_lang``, ``target_lang`` and ``OPTIONAL`` that are known.

    Raises:
        ValueError: The file is damaged, not UTF-8, not rectangular, or has too many unreadable lines; the message
            names the file and the line.
    """
    file = path if isinstance(path, BitextFile) else _one_file(path, source_lang, target_lang)
    report = CorpusReport() if report is None else report
    report.restart(file.name)
    unreadable: dict[str, list[str]] = {}
    read = bad = 0

    def check_rate() -> None:
        if read >= BAD_RATE_AFTER and bad > max_bad_rate * read:
            raise CorpusError(
                f"{file.name}: {bad} of the first {read} lines are unreadable, more than {max_bad_rate:.0%}: "
                f"{_first(unreadable)}. Mend the file, or raise max_bad_rate."
            )

    try:
        for line, row in _READERS[file.format](file, max_chars):
            read += 1
            checked = row if isinstance(row, _Bad) else _checked(row, file.into, max_chars)
            if isinstance(checked, Row):
                report.of(file.name, checked.source_lang or "?").read += 1
                known = zip(Row._fields[2:], checked[2:], strict=True)
                yield line, checked.source, checked.target, {name: value for name, value in known if value is not None}
                continue
            counts = report.of(file.name, file.language or "?")
            counts.read += 1
            counts.drop(checked.reason, f"{file.name}:{line}" + (f" ({checked.detail})" if checked.detail else ""))
            if checked.fault:
                bad += 1
                unreadable[checked.reason] = counts.examples[checked.reason]
                check_rate()
        check_rate()
        if read and bad == read:
            raise CorpusError(f"None of the {read} lines of {file.name} is a pair: {_first(unreadable)}.")
    finally:
        report.log_unreadable(file.name, unreadable, bad, read)


def read_parallel(path: str | Path) -> list[tuple[str, str]]:
    """Read a TSV file of parallel sentences whose every line must be right, such as a test set.

    Args:
        path: A ``.tsv`` or ``.tsv.gz`` file with the header ``source target …``.

    Returns:
        ``(source, target)`` of each line; English is the target.

    Raises:
        ValueError: The header is missing or a line is malformed; the message names the file and the line.
    """
    file = _one_file(path, None, "en")
    if file.format != "tsv":
        raise CorpusError(f"{path} is no TSV file.")
    with closing(_lines(file.paths[0], MAX_CHARS, file.max_expansion)) as lines:
        first = next(lines, None)
    if first is not None and not isinstance(first[1], _Bad) and _layout(first[1].split("\t"), file) is None:
        raise CorpusError(f"{path}:1: there is no header 'source<TAB>target', but {first[1][:80]!r}.")
    pairs = []
    for line, row in _read_tsv(file, MAX_CHARS):
        checked = row if isinstance(row, _Bad) else _checked(row, file.into, MAX_CHARS)
        if isinstance(checked, _Bad):
            raise CorpusError(f"{path}:{line}: {' '.join(filter(None, (checked.reason, checked.detail)))}.")
        pairs.append((checked.source, checked.target))
    return pairs


def _one_file(path: str | Path, source_lang: str | None, target_lang: str) -> BitextFile:
    files = find_files(path, source_lang=source_lang, target_lang=target_lang)
    if len(files) != 1:
        raise CorpusError(f"{path} has {len(files)} parallel files; name one of them.")
    return files[0]


def _first(unreadable: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{reason} at {', '.join(lines)}" for reason, lines in unreadable.items())


def _checked(row: Row, into: str, max_chars: int) -> Row | _Bad:
    """A row the right way round, or what is wrong with it."""
    source, target = row.source, row.target
    if not source.strip() or not target.strip():
        return _Bad("empty side")
    if len(source) > max_chars or len(target) > max_chars:
        return _Bad("too long", f"{max(len(source), len(target))} characters")
    texts = source + target
    for name in BACK_TRANSLATIONS:
        text = getattr(row, name)
        if not isinstance(text, str | None):
            return _Bad("not text", f"{name} is {text!r:.40}")
        texts += text or ""
    if "\0" in texts:
        return _Bad("not text", "NUL")
    try:
        texts.encode()
    except UnicodeEncodeError:
        return _Bad("not text", "lone surrogate")
    for language in (row.source_lang, row.target_lang):
        if language is not None and not (language.isascii() and language.isalnum()):
            return _Bad("no language", f"{language!r:.40}")
    try:
        row = _with_links(row)
    except ValueError as error:
        return _Bad("bad alignment", str(error))
    if row.source_lang == into and row.target_lang not in (into, None):
        return _turned(row)
    return row


def _with_links(row: Row) -> Row:
    """A row whose links fit its words.

    Raises:
        ValueError: They do not.
    """
    if row.alignment is None:
        return row._replace(alignment_scores=None, segmenter=None)
    if not isinstance(row.alignment, str):
        raise AlignmentFormatError(f"{str(row.alignment)[:40]!r} is not in the form '0-0 1-2'")
    links = parse_links(row.alignment)
    segmenter = row.segmenter or "whitespace"
    n_source = len(word_spans(row.source, row.source_lang, segmenter))
    n_target = len(word_spans(row.target, row.target_lang, segmenter))
    if any(i >= n_source or j >= n_target for i, j in links):
        raise AlignmentFormatError(f"a link points outside of {n_source} and {n_target} words")
    if not row.alignment_scores:
        return row._replace(alignment_scores=None)
    if not isinstance(row.alignment_scores, str):
        raise AlignmentFormatError(f"the scores {row.alignment_scores!r:.40} are no text")
    if len([float(score) for score in row.alignment_scores.split()]) != len(links):
        raise AlignmentFormatError(f"{len(row.alignment_scores.split())} scores for {len(links)} links")
    return row


def _turned(row: Row) -> Row:
    alignment = row.alignment
    if alignment is not None:
        alignment = format_links((j, i) for i, j in parse_links(alignment))
    return row._replace(
        source=row.target,
        target=row.source,
        source_lang=row.target_lang,
        target_lang=row.source_lang,
        alignment=alignment,
        source_bt=row.target_bt,
        target_bt=row.source_bt,
    )


class _Unpacked(io.RawIOBase):
    """The bytes of a gzip file, as long as they are not too many for what is packed."""

    def __init__(self, path: Path, max_expansion: float | None) -> None:
        self.path, self.max_expansion, self.size = path, max_expansion, 0
        self.packed = path.open("rb")
        self.stream = gzip.GzipFile(fileobj=self.packed)

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Unpack some bytes.

        Raises:
            CorpusError: They are too many.
        """
        count = self.stream.readinto(buffer)
        self.size += count
        if self.max_expansion is not None and self.size > EXPANSION_AFTER:
            packed = self.packed.tell()
            if self.size > self.max_expansion * packed:
                raise CorpusError(
                    f"{self.path} unpacks to more than {self.max_expansion:g} times its size: {self.size >> 20:,} MiB came "
                    f"of {packed >> 10:,} KiB, and it was read no further. Text does not shrink so far. If you trust the "
                    "file, unpack it first, or pass max_expansion=None."
                )
        return count

    def close(self) -> None:
        """Close the file."""
        self.stream.close()
        self.packed.close()
        super().close()


def _open(path: Path, max_expansion: float | None) -> BinaryIO:
    """A file's bytes, unpacked if they are gzip, whatever its name says."""
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    return io.BufferedReader(_Unpacked(path, max_expansion), 1 << 17) if packed else path.open("rb")


def _damage(path: Path, line: int, error: Exception) -> CorpusError:
    return CorpusError(f"{path}, after line {line}: the gzip file is damaged or ends early ({error}). Fetch it again.")


@contextmanager
def open_text(
    path: Path, *, newline: str | None = "\n", max_expansion: float | None = MAX_EXPANSION
) -> Iterator[TextIO]:
    """The UTF-8 text of a file, unpacked if it is gzip, without a byte order mark.

    Args:
        path: The file.
        newline: See :func:`open`.
        max_expansion: How many times as large as its packed bytes it may be, beyond its first 64 MiB.

    Raises:
        ValueError: The file is damaged, unpacks to too much, or is not UTF-8; the message names it, and the line.
    """
    try:
        with (
            _open(path, max_expansion) as raw,
            io.TextIOWrapper(raw, encoding="utf-8-sig", newline=newline) as text,
        ):
            yield text
    except _DAMAGED as error:
        raise CorpusError(f"{path}: the gzip file is damaged or ends early ({error}). Fetch it again.") from error
    except UnicodeDecodeError as error:
        raise _not_utf8(path, max_expansion) from error


def _not_utf8(path: Path, max_expansion: float | None) -> CorpusError:
    """The error for a file, which names the first line that is not UTF-8."""
    with _open(path, max_expansion) as stream:
        for number, raw in enumerate(stream, 1):
            try:
                raw.decode("utf-8")
            except UnicodeDecodeError as error:
                found = f"byte {raw[error.start]:#04x} at {error.start}"
                return CorpusError(f"{path}:{number}: this is not UTF-8 ({found}). Convert the file to UTF-8.")
    return CorpusError(f"{path} is not UTF-8. Convert it.")


def _most_bytes(max_chars: int) -> int:
    """Bytes of a line: two sides of four-byte characters, and the other columns."""
    return 8 * max_chars + (1 << 16)


def _lines(
    path: Path, max_chars: int, max_expansion: float | None = MAX_EXPANSION
) -> Generator[tuple[int, str | _Bad], None, None]:
    """Numbered lines of a UTF-8 file, split at line feeds only, in bounded memory."""
    limit = _most_bytes(max_chars)
    number = 0
    with _open(path, max_expansion) as stream:
        try:
            while raw := stream.readline(limit):
                number += 1
                if number == 1 and (raw[:2] in (b"\xff\xfe", b"\xfe\xff") or raw.count(0) > len(raw) / 4):
                    raise CorpusError(f"{path}:1: this is UTF-16 text; convert it to UTF-8.")
                if len(raw) == limit and not raw.endswith(b"\n"):
                    while (rest := stream.readline(limit)) and not rest.endswith(b"\n"):
                        pass
                    yield number, _Bad("too long", f"more than {limit} bytes")
                    continue
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                raw = raw.removesuffix(b"\n").removesuffix(b"\r")
                if b"\0" in raw:
                    yield number, _Bad("not text", "NUL byte")
                    continue
                try:
                    text = raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    yield number, _Bad("not UTF-8", f"byte {raw[error.start]:#04x} at {error.start}")
                    continue
                yield number, text
        except _DAMAGED as error:
            raise _damage(path, number, error) from error


def _read_tsv(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | _Bad]]:
    lines: Iterator[tuple[int, str | _Bad]] = _lines(file.paths[0], max_chars, file.max_expansion)
    first = next(lines, None)
    if first is None:
        return
    if isinstance(first[1], _Bad):
        raise CorpusError(f"{file.name}:1: {first[1].reason} ({first[1].detail}); a TSV begins with its header.")
    columns = first[1].split("\t")
    if _layout(columns, file) is None:
        if len(columns) != 2:
            raise CorpusError(
                f"{file.name}:1: without a header, a TSV has two columns, source and target, not {len(columns)}. "
                "Give it a header such as 'source<TAB>target<TAB>source_lang'."
            )
        columns, lines = ["source", "target"], chain([first], lines)
    if len(set(columns)) < len(columns):
        raise CorpusError(f"{file.name}:1: the header names a column twice: {', '.join(columns)}.")

    def records() -> Iterator[tuple[int, Mapping[str, str] | _Bad]]:
        for line, text in lines:
            if isinstance(text, _Bad):
                yield line, text
            elif len(fields := text.split("\t")) != len(columns):
                yield line, _Bad("wrong number of columns", f"{len(fields)}, not {len(columns)}")
            else:
                yield line, dict(zip(columns, fields, strict=True))

    yield from _rows_of(records(), file)


def _read_jsonl(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | _Bad]]:
    def records() -> Iterator[tuple[int, Mapping[str, Any] | _Bad]]:
        for line, text in _lines(file.paths[0], max_chars, file.max_expansion):
            if isinstance(text, _Bad):
                yield line, text
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                yield line, _Bad("not JSON", str(error))
                continue
            yield line, record if isinstance(record, dict) else _Bad("not JSON", "no object")

    yield from _rows_of(records(), file)


def _read_parquet(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | _Bad]]:
    yield from _rows_of(enumerate(_parquet_records(file, max_chars), 1), file)


def _parquet_records(file: BitextFile, max_chars: int) -> Iterator[dict[str, Any] | _Bad]:
    """Rows of a Parquet file in bounded memory, of the columns of a pair alone: others may hold what Python cannot.

    A column of text is read as its distinct values and their places, so that a long value costs its bytes once, however
    many rows have it. A row with a value that is longer than a line may be is unreadable.
    """
    path, limit = file.paths[0], _most_bytes(max_chars)
    try:
        with pq.ParquetFile(path) as parquet:
            metadata, leaves = parquet.metadata, _parquet_leaves(parquet.schema_arrow, file)
        layout = _layout(leaves, file)
        if layout is None:
            if metadata.num_rows:
                yield dict.fromkeys(leaves)
            return
        wanted = {name: leaf for name, leaf in leaves.items() if name in (*layout[:4], *layout.optional)}
        for name, leaf in wanted.items():
            if not (leaf.text or pa.types.is_primitive(leaf.kind) or pa.types.is_null(leaf.kind)):
                raise CorpusError(f"{file.name}: the column {name!r} holds {leaf.kind}, but should hold text.")
        rows = _parquet_batch(file, metadata, list(wanted.values()))
        text = [leaf.path for leaf in wanted.values() if leaf.text and leaf.field is None]
        with pq.ParquetFile(path, metadata=metadata, read_dictionary=text) as parquet:
            for batch in parquet.iter_batches(rows, columns=[leaf.path for leaf in wanted.values()]):
                yield from _parquet_rows({name: leaf.of(batch) for name, leaf in wanted.items()}, limit)
    except CorpusError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise CorpusError(f"{file.name} is no readable Parquet file: {error}") from error


class _Leaf(NamedTuple):
    """A column of a Parquet file, or a field of one."""

    column: str
    field: str | None
    kind: pa.DataType

    @property
    def path(self) -> str:
        """As Parquet calls it."""
        return self.column if self.field is None else f"{self.column}.{self.field}"

    @property
    def text(self) -> bool:
        """Whether it holds strings (or bytes, which are refused row by row)."""
        kind = self.kind.value_type if pa.types.is_dictionary(self.kind) else self.kind
        return bool(
            pa.types.is_string(kind)
            or pa.types.is_large_string(kind)
            or pa.types.is_string_view(kind)
            or pa.types.is_binary(kind)
            or pa.types.is_large_binary(kind)
        )

    def of(self, batch: pa.RecordBatch) -> pa.Array:
        """Its values."""
        column = batch.column(self.column)
        values = column if self.field is None else pc.struct_field(column, self.field)
        return values.cast(pa.large_string()) if pa.types.is_string_view(values.type) else values


def _parquet_leaves(schema: pa.Schema, file: BitextFile) -> dict[str, _Leaf]:
    """Columns by name; in place of a column ``translation`` of ``{language: text}``, its languages.

    Raises:
        CorpusError: A name is there twice.
    """
    if len(set(schema.names)) < len(schema.names):
        raise CorpusError(f"{file.name} names a column twice: {', '.join(schema.names)}.")
    leaves = {field.name: _Leaf(field.name, None, field.type) for field in schema}
    if "translation" in leaves and pa.types.is_struct(kind := leaves["translation"].kind):
        del leaves["translation"]
        leaves |= {field.name: _Leaf("translation", field.name, field.type) for field in kind.fields}
    return leaves


def _parquet_batch(file: BitextFile, metadata: pq.FileMetaData, leaves: Sequence[_Leaf]) -> int:
    """How many rows are read at a time, so that they are few bytes even where all are different.

    Of a field every row may have the longest value, since Arrow does not read the distinct ones of a field.

    Raises:
        CorpusError: The columns unpack to too much.
    """
    are_fields = any(leaf.field is not None for leaf in leaves)
    packed, size, longest = file.paths[0].stat().st_size, 0, 1.0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):  # its columns, if damaged, abort the process
        size += group.total_byte_size
        longest = max(longest, group.total_byte_size / (1 if are_fields else max(1, group.num_rows)))
    if file.max_expansion is not None and size > max(EXPANSION_AFTER, file.max_expansion * packed):
        raise CorpusError(
            f"{file.name} unpacks to more than {file.max_expansion:g} times its size: {size >> 20:,} MiB would come of "
            f"{packed >> 10:,} KiB, and it was not read. Text does not shrink so far. If you trust the file, write it "
            "without compression, or pass max_expansion=None."
        )
    return max(_PARQUET_FIELDS if are_fields else 1, min(_PARQUET_ROWS, int(_PARQUET_BYTES / longest)))


def _parquet_rows(columns: dict[str, pa.Array], limit: int) -> Iterator[dict[str, Any] | _Bad]:
    """The rows of a batch; only a few at a time become Python's."""
    n = len(next(iter(columns.values())))
    is_long_n = np.zeros(n, dtype=bool)
    for name, column in columns.items():
        places = column.indices if pa.types.is_dictionary(column.type) else None
        values = column if places is None else column.dictionary
        if pa.types.is_primitive(values.type) or pa.types.is_null(values.type):
            continue
        is_long_d = pc.greater(pc.binary_length(values), limit)
        if pc.any(is_long_d).as_py():
            is_long = is_long_d if places is None else is_long_d.take(places)
            is_long_n |= is_long.fill_null(False).to_numpy(zero_copy_only=False)
            short = pc.if_else(is_long_d, pa.scalar(None, values.type), values)
            columns[name] = short if places is None else pa.DictionaryArray.from_arrays(places, short)
    for first in range(0, n, _PARQUET_FEW):
        few = [column.slice(first, _PARQUET_FEW) for column in columns.values()]
        few = [(part.dictionary_decode() if pa.types.is_dictionary(part.type) else part).to_pylist() for part in few]
        for is_long, row in zip(is_long_n[first : first + _PARQUET_FEW], zip(*few, strict=True), strict=True):
            if is_long:
                yield _Bad("too long", f"more than {limit} bytes")
            else:
                yield dict(zip(columns, row, strict=True))


def _read_hub(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | _Bad]]:
    stream = load_dataset(*_hub_name(file), split=file.split, streaming=True, revision=file.revision)
    yield from _rows_of(enumerate(stream, 1), file)


def _hub_name(file: BitextFile) -> tuple[str, str | None]:
    match = _HUB.fullmatch(file.name)
    assert match is not None
    return match["name"], match["config"]


def _pinned(file: BitextFile) -> BitextFile:
    """A Hub data set at the commit that it has now, whatever is pushed while it is read."""
    if file.format != "hub":
        return file
    revision = load_dataset_builder(*_hub_name(file), revision=file.revision).hash
    return dataclasses.replace(file, revision=revision) if _COMMIT.fullmatch(revision or "") else file


def _read_moses(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | _Bad]]:
    check_line_counts(file)
    sides = (_lines(path, max_chars, file.max_expansion) for path in file.paths)
    for (line, source), (_, target) in zip(*sides, strict=True):
        if isinstance(source, _Bad):
            yield line, source
        elif isinstance(target, _Bad):
            yield line, target
        else:
            yield line, Row(source, target, file.source_lang, file.target_lang)


def check_line_counts(file: BitextFile) -> None:
    """Refuse a Moses pair whose files differ in length.

    Raises:
        ValueError: With both counts and, where the lengths of the lines show it, the place from which on the sides do not
            match.
    """
    first, second = (_count_lines(path, file.max_expansion) for path in file.paths)
    if first != second:
        place = _parting(file, first - second)
        where = "" if place is None else f" By the lengths of the lines, the sides part near line {place:,}."
        raise CorpusError(
            f"The sides of a Moses pair have as many lines as each other, but {file.paths[0]} has {first} and "
            f"{file.paths[1]} has {second}. A line is missing somewhere, and none after it is paired right: fetch "
            f"both again.{where}"
        )


def _parting(file: BitextFile, more: int) -> int | None:
    """The line from which on the first file's lines fit the second's ``more`` lines above better than those beside them.

    Lines fit if the ratio of their lengths is the usual one. The place is the one before which lines fit those beside
    them, and behind which the others, by the largest sum; None where that is not clear.
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
    before, behind = _surely_above(gain_n[:at]), _surely_above(-gain_n[at:])
    if behind and (before or at < _PART_LINES):
        return int(rows_n[at]) + 1
    return None


def _surely_above(values_n: NDArray[np.float64]) -> bool:
    """Whether numbers, if they are enough, have a mean above 0."""
    if len(values_n) < _PART_LINES:
        return False
    return float(values_n.mean()) > _PART_ERRORS * max(float(values_n.std()), 1e-9) / math.sqrt(len(values_n))


def _line_lengths(path: Path, max_expansion: float | None) -> NDArray[np.int64]:
    """Bytes of a file's first lines, line feeds included."""
    ends, size, lines = [], 0, 0
    for chunk in _chunks(path, max_expansion):
        ends.append(size + 1 + np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10))
        size, lines = size + len(chunk), lines + len(ends[-1])
        if lines >= _COMPARED:
            break
    return np.diff(np.concatenate([[0], *ends]))[:_COMPARED]


def _chunks(path: Path, max_expansion: float | None) -> Iterator[bytes]:
    lines = 0
    with _open(path, max_expansion) as stream:
        try:
            while chunk := stream.read(1 << 20):
                yield chunk
                lines += chunk.count(b"\n")
        except _DAMAGED as error:
            raise _damage(path, lines, error) from error


def _count_lines(path: Path, max_expansion: float | None) -> int:
    lines, last = 0, b"\n"
    for chunk in _chunks(path, max_expansion):
        lines, last = lines + chunk.count(b"\n"), chunk[-1:]
    return lines + (last != b"\n")


def _read_tmx(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | _Bad]]:
    parser = _TmxParser(file, max_chars)
    for chunk in _chunks(file.paths[0], file.max_expansion):
        yield from parser.feed(chunk)
    yield from parser.feed(b"", last=True)


class _TmxParser:
    """The translation units of a TMX file, each language beside the corpus's target, in bounded memory."""

    def __init__(self, file: BitextFile, max_chars: int) -> None:
        self.file, self.max_chars = file, max_chars
        self.rows: list[tuple[int, Row | _Bad]] = []
        self.line, self.language = 0, ""
        self.texts: dict[str, str] = {}
        self.parts: list[str] | None = None  # of the segment that is being read
        self.length = 0
        self.codes = 0  # depth of inline formatting codes, which are no text
        self.expat = expat.ParserCreate()
        self.expat.StartElementHandler = self.start
        self.expat.EndElementHandler = self.end
        self.expat.CharacterDataHandler = self.characters

    def feed(self, chunk: bytes, *, last: bool = False) -> list[tuple[int, Row | _Bad]]:
        """The rows that end in a piece of the file.

        Raises:
            CorpusError: It is not well-formed, or in an encoding that cannot be read.
        """
        path = self.file.paths[0]
        try:
            self.expat.Parse(chunk, last)
        except expat.ExpatError as error:
            raise CorpusError(f"{path}:{error.lineno}: this is not well-formed TMX ({error}).") from error
        except (ValueError, LookupError) as error:
            raise CorpusError(f"{path}:1: TMX in this encoding is not read ({error}). Convert it to UTF-8.") from error
        rows, self.rows = self.rows, []
        return rows

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "tu":
            self.line, self.texts = self.expat.CurrentLineNumber, {}
        elif name == "tuv":
            self.language = _code(attributes.get("xml:lang") or attributes.get("lang") or "")
        elif name == "seg":
            self.parts, self.length = [], 0
        elif name in ("bpt", "ept", "it", "ph"):
            self.codes += 1

    def characters(self, text: str) -> None:
        if self.parts is not None and not self.codes and self.length <= self.max_chars:
            self.parts.append(text)
            self.length += len(text)

    def end(self, name: str) -> None:
        if name == "seg" and self.parts is not None:
            if self.language not in self.texts:
                self.texts[self.language] = "".join(self.parts).replace("\n", " ")
            elif self.language == self.file.into or self.file.language in (self.language, None):
                self.rows.append((self.line, _Bad("another variant", f"in {self.language!r}", fault=False)))
            self.parts = None
        elif name in ("bpt", "ept", "it", "ph"):
            self.codes -= 1
        elif name == "tu":
            target = self.texts.pop(self.file.into, None)
            wanted = self.file.language
            sources = {code: text for code, text in self.texts.items() if code and wanted in (code, None)}
            if target is None or not sources:
                others = ", ".join(self.texts) or "nothing"
                self.rows.append((self.line, _Bad("other languages", f"the unit has {others}", fault=False)))
                return
            self.rows += [(self.line, Row(text, target, code, self.file.into)) for code, text in sources.items()]


_READERS: dict[str, Callable[[BitextFile, int], Iterator[tuple[int, Row | _Bad]]]] = {
    "tsv": _read_tsv,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "tmx": _read_tmx,
    "moses": _read_moses,
    "hub": _read_hub,
}


class _Layout(NamedTuple):
    """Which columns hold what, and the languages of a row without columns for them."""

    source: str
    target: str
    source_lang: str
    target_lang: str
    optional: tuple[str, ...]
    languages: tuple[str | None, str | None]


def _layout(names: Iterable[str], file: BitextFile) -> _Layout | None:
    """The columns of a pair: ``source`` and ``target``, or the languages' codes, or None if the names tell neither."""
    columns = {name.strip().lower(): name for name in names}
    source = next((columns[name] for name in _SOURCE_NAMES if name in columns), None)
    target = next((columns[name] for name in _TARGET_NAMES if name in columns), None)
    languages = file.source_lang, file.target_lang
    if "english" in columns or source is None or target is None:
        codes = {_code(name): column for name, column in columns.items() if _LANGUAGE.fullmatch(name)}
        others = [code for code in codes if code != file.into and file.language in (code, None)]
        languages = file.language, file.into
        target = target or codes.get(file.into)
        if source is None and len(others) == 1:
            source, languages = codes[others[0]], (others[0], file.into)
    if source is None or target is None:
        return None
    source_lang, target_lang, *optional = (
        columns.get(name, name) for name in ("source_lang", "target_lang", *OPTIONAL)
    )
    return _Layout(source, target, source_lang, target_lang, tuple(optional), languages)


def _rows_of(
    records: Iterable[tuple[int, Mapping[str, Any] | _Bad]], file: BitextFile
) -> Iterator[tuple[int, Row | _Bad]]:
    """Rows of records with named columns; a column ``translation`` of ``{language: text}`` counts as those columns."""
    layout: _Layout | None = None
    for line, record in records:
        if isinstance(record, _Bad):
            yield line, record
            continue
        if isinstance(record.get("translation"), Mapping):
            record = {**record, **record["translation"]}
        if (
            layout is None or not {layout.source, layout.target} <= record.keys()
        ):  # lines may spell their names each in its way
            layout = _layout(record, file) or layout
            if layout is None:
                raise CorpusError(
                    f"{file.name}:{line}: no columns 'source' and 'target' (or two language codes, one of them "
                    f"{file.into!r}); found {', '.join(map(repr, record))}. Rename them."
                )
        source, target = record.get(layout.source), record.get(layout.target)
        if not isinstance(source, str) or not isinstance(target, str):
            yield line, _Bad("missing side", f"{layout.source if not isinstance(source, str) else layout.target!r}")
            continue
        source_lang, target_lang = layout.languages
        if value := record.get(layout.source_lang):
            source_lang = _code(str(value))
        if value := record.get(layout.target_lang):
            target_lang = _code(str(value))
        yield line, Row(source, target, source_lang, target_lang, *map(record.get, layout.optional))


# -------------------------------------------------------------------------------------------------------------- corpus


@dataclass
class Corpus:
    """A corpus that was read, or is about to be.

    Attributes:
        dataset: Rows ``source``, ``target``, ``source_lang``, ``target_lang`` and those of ``OPTIONAL`` that a file has.
        report: What was read, kept and dropped.
        files: One dict per file: ``path``, ``file`` (its bare name), ``language``, ``languages`` (both sides') and,
            unless it is a stream, ``pairs`` kept and ``sha256`` (of both files, with a comma, for a Moses pair).
    """

    dataset: Dataset | IterableDataset
    report: CorpusReport
    files: list[dict[str, Any]]


@dataclass(frozen=True)
class _Reading:
    """How pairs become rows."""

    cleaning: Cleaning | None
    drop_duplicates: bool
    languages: frozenset[str]
    limit: int | None
    max_chars: int
    max_bad_rate: float


def load_corpus(
    corpus: str | Path | Sequence[str | Path],
    *,
    languages: Sequence[str] | None = None,
    source_lang: str | None = None,
    target_lang: str = "en",
    split: str = "train",
    streaming: bool = False,
    on_disk: str | Path | None = None,
    cleaning: Cleaning | None = Cleaning(),
    temperature: float | None = None,
    limit: int | None = None,
    seed: int = 42,
    tokenizer: Any = None,
    max_chars: int = MAX_CHARS,
    max_bad_rate: float = MAX_BAD_RATE,
    max_expansion: float | None = MAX_EXPANSION,
) -> Corpus:
    """Read parallel text.

    A corpus is one of these, or a list of them:

    - a file ``.tsv``, ``.jsonl``, ``.parquet`` or ``.tmx``, packed (``.gz``) or not. A TSV's header names its columns:
      ``source target [source_lang target_lang alignment …]`` (see ``OPTIONAL``), or the languages' codes; without one it
      has two columns. There is no quoting;
    - a Moses pair: ``europarl.sw-en.sw,europarl.sw-en.en``, ``europarl.sw-en.{sw,en}`` or their prefix
      ``europarl.sw-en``;
    - a folder, every ``xx-en[.split].<ext>`` in it;
    - a Hub data set ``hf:org/name[:config][@split][#revision]``, read at the commit that it has at the start.

    A row's language is what its columns say, else the file's name (``sw-en.train.tsv.gz``, ``x.sw-en.jsonl``, Moses
    suffixes), else ``source_lang``, or ``languages`` where there is one. A pair whose source is in the target language
    (``en-sw.tsv``) is turned round.

    Without streaming, ``temperature`` resamples the corpus at its size. In a stream, languages are interleaved at
    random: without a temperature in proportion to their sizes, each pair once in a pass; with one in proportion to
    ``size ** temperature``, until every language has been read to its end (``stopping_strategy="all_exhausted"``), so
    that pairs of small ones recur. Within a language a stream keeps the files' order: shuffle it with
    ``dataset.shuffle(seed=…, buffer_size=…)``, which a trainer that replays the stream resumes exactly.

    Args:
        corpus: What to read.
        languages: Source languages to take; of a single file that does not tell its own, its language.
        source_lang: Language of the sources, for files that do not tell.
        target_lang: The target language of the corpus.
        split: Which of ``xx-en.train.tsv.gz``, ``xx-en.dev.tsv.gz``, … to take from a folder or the Hub; a file
            of a folder that names no split stands in for a missing one.
        streaming: Read while training, in bounded memory; the report is then filled while the stream is read.
        on_disk: Folder for the clean pairs, which are read from there and not held in memory: of a corpus that is larger
            than that, every pair has its number still, so that a trainer goes on at any place without reading what is
            before it. Where the folder holds this corpus already, it is not read again. About 100 bytes of memory for
            every pair find duplicates, unless the cleaning says not to look for them.
        cleaning: What to drop; None keeps every readable pair as it is.
        temperature: Exponent of the mixture of languages, ``n ** temperature``: 1 as they are, 0 evenly, multilingual
            BERT's 0.7 between.
        limit: Keep the first so many pairs of each language.
        seed: Of the mixture.
        tokenizer: Counts pieces for a cleaning that has no tokenizer of its own: a function from text to pieces, or a
            tokenizer with a method ``tokenize``.
        max_chars: A side longer than this is unreadable.
        max_bad_rate: Share of unreadable lines, of 1000 or more, above which a file is refused.
        max_expansion: How many times as large as its packed bytes a ``.gz`` or Parquet file may be, beyond its first 64 MiB;
            None is without end.

    Raises:
        FileNotFoundError: A file, or a language of the folder, is not there.
        ValueError: A file is damaged, unpacks to too much, cannot be paired, has too many unreadable lines, or does not
            tell its language.
    """
    files = find_files(corpus, languages=languages, source_lang=source_lang, target_lang=target_lang, split=split)
    if cleaning is not None and cleaning.counts_pieces and cleaning.tokenizer is None:
        if tokenizer is None:
            raise ValueError("This cleaning counts pieces: pass a tokenizer, or use `cleaning.without_pieces()`.")
        cleaning = dataclasses.replace(cleaning, tokenizer=getattr(tokenizer, "tokenize", tokenizer))
    drop = cleaning is not None and (not streaming if cleaning.duplicates is None else cleaning.duplicates)
    wanted = frozenset(map(_code, languages or ()))
    reading = _Reading(cleaning, drop, wanted, limit, max_chars, max_bad_rate)
    files = [dataclasses.replace(_pinned(file), max_expansion=max_expansion) for file in files]
    if streaming and on_disk is not None:
        raise UsageError(
            "`streaming` and `on_disk` were given, but a corpus is a stream or kept on disk. Leave out one."
        )
    if streaming:
        return _stream(files, reading, temperature, seed)
    read = _in_memory(files, reading) if on_disk is None else _on_disk(files, reading, Path(on_disk))
    return read if temperature is None else _mixed(read, temperature, seed)


def _rows(files: Iterable[BitextFile], reading: _Reading, report: CorpusReport) -> Iterator[Row]:
    """The clean rows of some files, counted in the report."""
    cleaning, limit = reading.cleaning, reading.limit
    kept: Counter[str] = Counter()
    seen: set[bytes] = set()
    for file in files:
        if limit is not None and file.language and kept[file.language] >= limit:
            continue
        pairs = read_pairs(file, max_chars=reading.max_chars, max_bad_rate=reading.max_bad_rate, report=report)
        for line, source, target, known in pairs:
            language = known.get("source_lang")
            if language is None:
                raise _unknown_language(file)
            counts = report.of(file.name, language)
            row = Row(source, target, language, known.get("target_lang") or file.into, *map(known.get, OPTIONAL))
            reason: str | None = None
            if reading.languages and language not in reading.languages:
                reason = "language not chosen"
            elif cleaning is not None:
                tidied = _tidied(row, cleaning)
                if tidied is None:
                    reason = "alignment lost"
                else:
                    row = tidied
                    reason = cleaning.fault(row.source, row.target)
            if reason is None and limit is not None and kept[language] >= limit:
                reason = "beyond the limit"
            if reason is None and reading.drop_duplicates:
                key = hashlib.blake2b("\0".join(row[:4]).encode(), digest_size=16).digest()  # type: ignore[arg-type]
                reason = "duplicate" if key in seen else None
                seen.add(key)
            if reason is not None:
                counts.drop(reason, f"{file.name}:{line}")
                continue
            counts.kept += 1
            kept[language] += 1
            if counts.kept <= _INSPECTED:
                _look(counts, row, file.name)
            yield row
            if limit is not None and file.language and kept[file.language] >= limit:
                break


def _unknown_language(file: BitextFile) -> CorpusError:
    return CorpusError(
        f"{file.name} does not tell its language. Name it like 'sw-{file.into}.tsv', give it a column 'source_lang', "
        "or pass the language: languages=['sw']."
    )


def _tidied(row: Row, cleaning: Cleaning) -> Row | None:
    """A row with its texts tidied, or None if its links cannot be followed."""
    texts = {
        name: SEPARATOR.join(filter(None, map(cleaning.tidy, text.split(SEPARATOR))))
        for name in BACK_TRANSLATIONS
        if (text := getattr(row, name))
    }
    tidied = row._replace(source=cleaning.tidy(row.source), target=cleaning.tidy(row.target), **texts)
    if row.alignment is not None and tidied[:2] != row[:2]:
        return _renumbered(row, tidied, cleaning)
    return tidied


def _renumbered(row: Row, tidied: Row, cleaning: Cleaning) -> Row | None:
    """A tidied row with its links after tidying, which may have emptied words; None if the words cannot be followed."""
    segmenter = row.segmenter or "whitespace"
    places = []
    for text, tidy, language in zip(row[:2], tidied[:2], row[2:4], strict=True):
        words = [cleaning.tidy(text[start:end]) for start, end in word_spans(text, language, segmenter)]
        if [word for word in words if word] != [
            tidy[start:end] for start, end in word_spans(tidy, language, segmenter)
        ]:
            return None
        numbers = iter(range(len(words)))
        places.append([next(numbers) if word else None for word in words])
    links = parse_links(row.alignment or "")
    scores = row.alignment_scores.split() if row.alignment_scores else [""] * len(links)
    moved = [(places[0][i], places[1][j], score) for (i, j), score in zip(links, scores, strict=True)]
    kept = [(i, j, score) for i, j, score in moved if i is not None and j is not None]
    return tidied._replace(
        alignment=format_links((i, j) for i, j, _ in kept),
        alignment_scores=row.alignment_scores and " ".join(score for _, _, score in kept),
    )


def _look(counts: Counts, row: Row, file: str) -> None:
    """Look for sides that are swapped or the same among a file's first pairs."""
    counts.identical += row.source == row.target
    for side, text in enumerate((row.source, row.target)):
        counts.english[side] += not _ENGLISH.isdisjoint(text.lower().split())
    if counts.kept in (100, _INSPECTED):
        if counts.identical > counts.kept / 2:
            raise CorpusError(
                f"{file}: both sides are the same text in {counts.identical} of the first {counts.kept} pairs. "
                "Was one side given twice?"
            )
        source, target = counts.english
        if row.target_lang == "en" and source > max(2 * target, counts.kept / 5):
            message = "%s: %d of the first %d sources look English, %d of the targets. Are the sides swapped?"
            logger.warning(message, file, source, counts.kept, target)


def _features(optional: Iterable[str]) -> Features:
    there = set(optional)
    return Features({name: Value("string") for name in (*COLUMNS, *OPTIONAL) if name in COLUMNS or name in there})


def _in_memory(files: Sequence[BitextFile], reading: _Reading) -> Corpus:
    report, tables = CorpusReport(), list[pa.Table]()
    present, facts = _read_all(files, reading, report, tables.append)
    features = _features(present)
    columns = {name: pa.chunked_array([table[name].chunk(0) for table in tables]) for name in features}
    return Corpus(Dataset.from_dict(columns, features=features), report, facts)


def _on_disk(files: Sequence[BitextFile], reading: _Reading, folder: Path) -> Corpus:
    """The clean pairs in an Arrow file, which is mapped into memory; beside it what is known of them, written last."""
    arrow, about, key = folder / "pairs.arrow", folder / "pairs.json", _kept_as(files, reading)
    with suppress(OSError, ValueError, KeyError):
        known = json.loads(about.read_text(encoding="utf-8"))
        if known["key"] == key and known["bytes"] == arrow.stat().st_size:
            logger.info("The corpus is in %s already and is not read again.", arrow)
            dataset = Dataset.from_file(str(arrow)).select_columns(known["columns"])
            return Corpus(dataset, CorpusReport.from_dict(known["report"]), known["files"])
    folder.mkdir(parents=True, exist_ok=True)
    about.unlink(missing_ok=True)
    partial, report = arrow.with_suffix(".partial"), CorpusReport()
    schema = pa.schema([(name, pa.string()) for name in Row._fields])
    with partial.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        present, facts = _read_all(files, reading, report, writer.write_table)
    partial.replace(arrow)
    columns = list(_features(present))
    known = {"key": key, "bytes": arrow.stat().st_size, "columns": columns, "report": report.to_dict(), "files": facts}
    written = about.with_suffix(".partial")
    written.write_text(json.dumps(known, ensure_ascii=False), encoding="utf-8")
    written.replace(about)
    return Corpus(Dataset.from_file(str(arrow)).select_columns(columns), report, facts)


def _kept_as(files: Sequence[BitextFile], reading: _Reading) -> str:
    """By which a corpus on disk is known again: its files as they are now, and how they are read."""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for file in files for path in file.paths]
    how = dataclasses.replace(reading, languages=frozenset()), sorted(reading.languages)
    return str(Hasher.hash((files, stats, how, importlib.metadata.version("metaphrase"))))


def _read_all(
    files: Sequence[BitextFile], reading: _Reading, report: CorpusReport, write: Callable[[pa.Table], Any]
) -> tuple[set[str], list[dict[str, Any]]]:
    """Read every pair, a chunk at a time.

    Returns:
        The optional columns that have a value anywhere, and what is known of each file.

    Raises:
        CorpusError: No pair was kept, or none of a language that was asked for.
    """
    present = set[str]()
    rows = _rows(files, reading, report)
    while chunk := list(islice(rows, _CHUNK)):
        columns = {
            name: pa.array(values, pa.string())
            for name, values in zip(Row._fields, zip(*chunk, strict=True), strict=True)
        }
        present.update(name for name, column in columns.items() if len(column) > column.null_count)
        write(pa.table({n: c.fill_null("") if n in BACK_TRANSLATIONS else c for n, c in columns.items()}))
    if not report.kept:
        raise CorpusError(f"No pair was kept of {_names(files)}.\n{report}")
    if missing := reading.languages - set(report.languages):
        there = ", ".join(sorted(report.languages))
        raise CorpusError(f"No pair was kept for {', '.join(sorted(missing))}; the corpus has: {there}.")
    facts = []
    for file in files:
        counts = {language: c for (name, language), c in report.counts.items() if name == file.name}
        hashes = ",".join(map(_sha256, file.paths))
        found = [language for language, c in counts.items() if c.kept]
        pairs = sum(c.kept for c in counts.values())
        facts.append(_facts(file, found) | {"pairs": pairs, "sha256": hashes or None})
        if not pairs and report.of(file.name, file.language or "?").read:
            logger.warning("%s: no pair of it was kept.", file.name)
    return present, facts


def _mixed(corpus: Corpus, temperature: float, seed: int) -> Corpus:
    """The corpus resampled at its size."""
    assert isinstance(corpus.dataset, Dataset)
    dataset = corpus.dataset.select(mix(corpus.dataset["source_lang"], temperature, seed))
    corpus.report.sampled = dict(Counter(dataset["source_lang"]))
    return dataclasses.replace(corpus, dataset=dataset)


def _names(files: Iterable[BitextFile]) -> str:
    return ", ".join(file.name for file in files)


def _facts(file: BitextFile, languages: Sequence[str]) -> dict[str, Any]:
    name = ",".join(path.name for path in file.paths) or file.name
    both = sorted({*languages, file.into})
    facts = {"path": file.name, "file": name, "language": ", ".join(languages), "languages": both}
    return facts | ({"revision": file.revision} if file.revision else {})


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def shares(sizes: Mapping[str, int], temperature: float) -> dict[str, float]:
    """Each language's share of a mixture, in proportion to ``size ** temperature``.

    The exponent is the smoothing of multilingual BERT (0.7): 1 leaves the languages as they are, 0 makes them equal.

    >>> shares({"sw": 100, "te": 400}, 0.5)
    {'sw': 0.3333333333333333, 'te': 0.6666666666666666}
    """
    weights = {language: size**temperature for language, size in sizes.items() if size}
    return {language: weight / sum(weights.values()) for language, weight in weights.items()}


def mix(languages: Sequence[str], temperature: float, seed: int) -> list[int]:
    """Row numbers of a mixture of the same size: every row as often as any other of its language, but for one.

    Args:
        languages: The language of each row.
        temperature: Exponent of the sizes; see `shares`.
        seed: Of the choice and of the order.
    """
    rows: dict[str, list[int]] = defaultdict(list)
    for i, language in enumerate(languages):
        rows[language].append(i)
    total = sum(map(len, rows.values()))
    exact = {code: p * total for code, p in shares({c: len(r) for c, r in rows.items()}, temperature).items()}
    counts = {language: math.floor(n) for language, n in exact.items()}
    rest = sorted(exact, key=lambda language: (counts[language] - exact[language], language))
    for language in rest[: total - sum(counts.values())]:
        counts[language] += 1
    generator = random.Random(seed)
    mixture: list[int] = []
    for language in sorted(rows):
        copies, more = divmod(counts[language], len(rows[language]))
        mixture += rows[language] * copies + generator.sample(rows[language], more)
    generator.shuffle(mixture)
    return mixture


def _stream(files: Sequence[BitextFile], reading: _Reading, temperature: float | None, seed: int) -> Corpus:
    """One interleaved stream; a language's files are its shards, unless there is a limit to count up to."""
    report = CorpusReport()
    groups: dict[str | None, list[BitextFile]] = defaultdict(list)
    facts, optional = [], set[str]()
    for file in files:
        if file.format == "moses":
            check_line_counts(file)
        glance = CorpusReport(logged={file.name})
        known = [row[3] for row in islice(read_pairs(file, max_chars=reading.max_chars, report=glance), _PEEKED)]
        if not known:
            raise CorpusError(f"{file.name}: no pairs at all.")
        optional.update(*known)
        if "source_lang" not in known[0]:
            raise _unknown_language(file)
        facts.append(_facts(file, [known[0]["source_lang"]]))
        groups[file.language].append(file)
    features = _features(optional)
    if temperature is not None and None in groups:
        raise CorpusError(
            f"A stream is mixed by files, but {_names(groups[None])} does not tell its language by its name. "
            "Split it by language, or read it without streaming."
        )
    streams = [
        IterableDataset.from_generator(
            _stream_rows,
            features=features,
            gen_kwargs={
                "files": group if reading.limit is None else tuple(group),
                "reading": reading,
                "report": report,
                "columns": tuple(features),
            },
        )
        for group in groups.values()
    ]
    if len(streams) == 1:
        return Corpus(streams[0], report, facts)
    sizes = {str(code): sum(map(_size, group)) for code, group in groups.items()}
    if reading.limit is not None:
        sizes = {language: min(size, reading.limit) for language, size in sizes.items()}
    once = temperature is None
    dataset = interleave_datasets(
        streams,
        probabilities=list(shares(sizes, 1.0 if temperature is None else temperature).values()),
        seed=seed,
        stopping_strategy="all_exhausted_without_replacement" if once else "all_exhausted",
    )
    return Corpus(dataset, report, facts)


def _stream_rows(
    files: Sequence[BitextFile], reading: _Reading, report: CorpusReport, columns: tuple[str, ...]
) -> Iterator[dict[str, str | None]]:
    for row in _rows(files, reading, report):
        there = {name: value for name, value in row._asdict().items() if value is not None}
        yield {name: there.get(name, "" if name in BACK_TRANSLATIONS else None) for name in columns}


def _size(file: BitextFile) -> int:
    """About how many pairs a file has, without parsing them."""
    if file.format == "parquet":
        return int(pq.ParquetFile(file.paths[0]).metadata.num_rows)
    if file.format == "tmx":
        return max(1, sum(chunk.count(b"</tu>") for chunk in _chunks(file.paths[0], file.max_expansion)))
    if file.format == "hub":
        splits = load_dataset_builder(*_hub_name(file), revision=file.revision).info.splits or {}
        if file.split not in splits:
            raise CorpusError(
                f"The size of {file.name} is not known, so it cannot be mixed: read it without streaming."
            )
        return int(splits[file.split].num_examples)
    return _count_lines(file.paths[0], file.max_expansion)


# ------------------------------------------------------------------------------------------------------------- writing

#: Formats that `write_corpus` knows.
WRITTEN = (".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet")


def check_writable(path: str | Path) -> None:
    """Refuse a file name whose format `write_corpus` does not know.

    Raises:
        ValueError: With the formats that it knows.
    """
    if not str(path).endswith(WRITTEN):
        raise CorpusError(f"{path} is of no format that can be written; write {', '.join(WRITTEN)}.")


def write_corpus(dataset: Dataset, path: str | Path) -> Path:
    """Write a corpus so that `load_corpus` reads it, the whole file or nothing.

    Line feeds and tabs within a sentence become spaces in a TSV, which leaves its words, and so its links, as they are.

    Args:
        dataset: Rows of text.
        path: ``.tsv``, ``.jsonl`` (both also ``.gz``) or ``.parquet``.

    Raises:
        ValueError: The format is not known.
    """
    check_writable(path)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    if path.suffix == ".parquet":
        schema = dataset.features.arrow_schema.remove_metadata()
        with pq.ParquetWriter(part, schema) as writer:
            for table in dataset.with_format("arrow").iter(_CHUNK):
                writer.write_table(table.cast(schema))
    else:
        with text_writer(part, packed=path.suffix == ".gz") as stream:
            if ".tsv" in path.suffixes[-2:]:
                _write_tsv(dataset, stream)
            else:
                for row in dataset:
                    stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    return part.replace(path)


@contextmanager
def text_writer(path: Path, *, packed: bool) -> Iterator[TextIO]:
    """UTF-8 text, packed with gzip without a date or not, with line feeds as they are on every system."""
    with path.open("wb") as raw:
        if not packed:
            with io.TextIOWrapper(raw, encoding="utf-8", newline="\n") as stream:
                yield stream
            return
        with (
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0, compresslevel=6) as gz,
            io.TextIOWrapper(gz, encoding="utf-8", newline="\n") as stream,
        ):
            yield stream


def _write_tsv(dataset: Dataset, stream: TextIO) -> None:
    stream.write("\t".join(dataset.column_names) + "\n")
    for batch in dataset.iter(_CHUNK):
        for row in zip(*batch.values(), strict=True):
            stream.write("\t".join(_BREAK.sub(" ", cell or "") for cell in row) + "\n")


# ------------------------------------------------------------------------------------------------------------- leakage


def overlap(train: Any, test: Any) -> int:
    """How many test pairs have a sentence that is in the training corpus too, on the same side.

    Sentences are compared after NFKC normalisation, case folding and joining of whitespace.

    Args:
        train: Rows with ``source`` and ``target``: a data set or an iterable of mappings.
        test: The same.

    >>> overlap([{"source": "Habari", "target": "Hello"}], [{"source": "Jambo", "target": "HELLO"}])
    1
    """
    known: tuple[set[str], set[str]] = set(), set()
    for pair in _texts(train):
        for side, text in zip(known, pair, strict=True):
            side.add(normalised(text))
    return sum(any(normalised(text) in side for side, text in zip(known, pair, strict=True)) for pair in _texts(test))


def _texts(rows: Any) -> Iterator[tuple[str, str]]:
    if isinstance(rows, Dataset | IterableDataset):
        for batch in rows.select_columns(["source", "target"]).iter(batch_size=1000):
            yield from zip(batch["source"], batch["target"], strict=True)
    else:
        yield from ((row["source"], row["target"]) for row in rows)


def normalised(text: str) -> str:
    """A sentence as it is compared with others: NFKC, case folded, whitespace joined."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
