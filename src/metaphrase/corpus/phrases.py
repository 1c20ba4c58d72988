"""Phrase tables: the phrase pairs of an aligned bitext and their probabilities."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from metaphrase.corpus.text import open_text
from metaphrase.corpus.words import Link, Words, parse_links, phrase_pairs
from metaphrase.corpus.writing import text_writer
from metaphrase.exceptions import DataError
from metaphrase.io.files import replacing

#: Columns of a phrase table's file.
HEADER = ("source", "target", "count", "p_target", "p_source")


class Phrase(NamedTuple):
    """A phrase and its translation, in lower case, and the number of their occurrences as a pair.

    ``p_target`` is the probability of the target given the source, ``p_source`` of the source given the target.
    """

    source: str
    target: str
    n: int
    p_target: float
    p_source: float

    @property
    def product(self) -> float:
        """The product of both probabilities."""
        return self.p_target * self.p_source


class PhraseTable:
    """The phrase pairs of an aligned bitext, with their relative frequencies in both directions.

    Phrase pairs come from :func:`metaphrase.corpus.words.phrase_pairs`. Thot's extraction is not used: it keeps few of the
    phrases that differ only in unaligned words at their border, drops some phrases with such words (``{1-0}`` over two
    source words and one target word yields only the longest), and uses files in which a word cannot contain ``|||``.

    Probabilities are computed per pair of languages; a phrase pair that occurs in several has the largest one. Phrases are
    compared in lower case.

    Reference: Koehn et al. 2003, "Statistical Phrase-Based Translation", section 2; Koehn 2010, section 5.2.
    """

    def __init__(self, phrases: Iterable[Phrase] = ()) -> None:
        # strings and plain tuples take less memory than pairs and phrases
        self._facts = {_key(one.source, one.target): one[2:] for one in phrases}

    @classmethod
    def of(cls, pairs: Iterable[tuple[Words, Words, Iterable[Link]]], *, max_length: int = 7) -> PhraseTable:
        """Count the phrase pairs of a bitext: the words of each source and target, and the links between them.

        A phrase has at most ``max_length`` words, on either side.
        """
        counts: dict[tuple[str | None, str | None], Counter[str]] = defaultdict(Counter)
        for source, target, links in pairs:
            forms = [word.lower() for word in source], [word.lower() for word in target]
            counts[source.language, target.language].update(
                _key(" ".join(forms[0][slice(*span)]), " ".join(forms[1][slice(*translation)]))
                for span, translation in phrase_pairs(links, len(source), len(target), max_length=max_length)
            )
        best: dict[str, tuple[int, float, float]] = {}
        for languages in list(counts):
            of_languages = counts.pop(languages)
            sources, targets = Counter[str](), Counter[str]()
            for key, count in of_languages.items():
                one, other = key.split("\t")
                sources[one] += count
                targets[other] += count
            for key, count in of_languages.items():
                one, other = key.split("\t")
                facts = count, count / sources[one], count / targets[other]
                if key not in best or _product(best[key]) < _product(facts):
                    best[key] = facts
        table = cls()
        table._facts = {key: best[key] for key in sorted(best)}
        return table

    @classmethod
    def of_corpus(cls, rows: Iterable[Mapping[str, Any]], *, max_length: int = 7) -> PhraseTable:
        """Count the phrase pairs of a corpus with the column ``alignment``; rows without links are skipped."""
        linked = (
            (Words.of_side(row, "source"), Words.of_side(row, "target"), parse_links(row["alignment"] or ""))
            for row in rows
        )
        return cls.of(linked, max_length=max_length)

    def __len__(self) -> int:
        return len(self._facts)

    def __iter__(self) -> Iterator[Phrase]:
        for key, facts in self._facts.items():
            source, target = key.split("\t")
            yield Phrase(source, target, *facts)

    def score(self, source_words: Sequence[str], target_words: Sequence[str]) -> float:
        """Return ``p(target | source) * p(source | target)`` of two phrases, 0 if they are not in the table."""
        facts = self._facts.get(_key_of_words(source_words, target_words))
        return 0.0 if facts is None else _product(facts)

    def __contains__(self, phrases: tuple[Sequence[str], Sequence[str]]) -> bool:
        """Whether the table has two phrases, given as lists of words, as a pair."""
        return _key_of_words(*phrases) in self._facts

    def filter(self, cut: float, *, min_count: int = 1) -> PhraseTable:
        """Keep phrase pairs with ``p(target | source) * p(source | target) >= cut`` and at least ``min_count`` occurrences.

        Both probabilities of a pair whose sides occur only once are 1: raise ``min_count`` to remove it.
        """
        return PhraseTable(phrase for phrase in self if phrase.product >= cut and phrase.n >= min_count)

    def save(self, path: str | Path) -> Path:
        """Write the table atomically as TSV, compressed if the name ends with ``.gz``."""
        path = Path(path)
        with replacing(path, unique=True) as partial, text_writer(partial, packed=path.suffix == ".gz") as stream:
            stream.write("\t".join(HEADER) + "\n")
            for source, target, count, p_target, p_source in self:
                stream.write(f"{source}\t{target}\t{count}\t{p_target:.6g}\t{p_source:.6g}\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> PhraseTable:
        """Read a table that `save` wrote.

        Raises:
            ValueError: The file is not a phrase table, or is damaged.
        """
        path = Path(path)
        with open_text(path) as lines:
            return cls(_read(lines, path))


def _read(lines: Iterable[str], path: Path) -> Iterator[Phrase]:
    try:
        lines = iter(lines)
        if tuple(next(lines, "").rstrip("\n").split("\t")) != HEADER:
            raise ValueError(f"the columns are not {', '.join(HEADER)}")
        for number, line in enumerate(lines, 2):
            source, target, count, p_target, p_source = line.rstrip("\n").split("\t")
            phrase = Phrase(source, target, int(count), float(p_target), float(p_source))
            if not (0 < phrase.n < 1 << 63 and 0 < phrase.p_target <= 1 and 0 < phrase.p_source <= 1):
                raise ValueError(
                    f"line {number}: the count must be at least 1 and probabilities above 0 and at most 1, but are {count}, "
                    f"{p_target} and {p_source}"
                )
            yield phrase
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is not a phrase table, or is damaged: {error}.") from error


def _key(source: str, target: str) -> str:
    return f"{source}\t{target}"


def _product(facts: tuple[int, float, float]) -> float:
    return facts[1] * facts[2]


def _key_of_words(source_words: Sequence[str], target_words: Sequence[str]) -> str:
    return _key(" ".join(source_words).lower(), " ".join(target_words).lower())
