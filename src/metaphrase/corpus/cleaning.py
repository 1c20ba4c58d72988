"""Cleaning: which pairs of a corpus are dropped, and how the others are tidied."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from metaphrase.corpus.rows import SENTENCES, SEPARATOR, Row
from metaphrase.corpus.text import one_line
from metaphrase.corpus.words import format_links, parse_links, segmenter_of_side, word_spans
from metaphrase.io.arguments import Count, CountOr0, Positive, Share, checked

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

#: Filters that count pieces, if they are set.
_LIMITS = ("max_ratio", "max_shorter", "max_together", "max_copied")

Tokenizer = Callable[[str], Sequence[str]]


@checked
@dataclass(frozen=True)
class Cleaning:
    """Which pairs are dropped, and how the text of the others is tidied.

    The default strips both sides, drops pairs with a side that has neither letters nor digits, and drops duplicates. The
    presets `dap` and `ppa` add the papers' filters.

    Attributes:
        tokenizer: Splits a sentence into the pieces that the filters count; required if one of them is set.
        duplicates: Drop a pair that occurred before, also with another Unicode form (NFC, NFD) or spacing. None enables this
            except in a stream, where the memory, about 100 bytes per pair, would grow without bound.
        control_characters: Remove control characters and ``"``, and replace tabs and line breaks by spaces.
        forbidden: Drop a pair with one of these strings in either side.
        placeholders: Drop a pair with a side that equals one of these strings.
        identical: Drop a pair with identical sides.
        min_pieces: Minimum number of pieces of either side.
        max_ratio: Drop a pair whose longer side has more pieces than ``max_ratio`` times the shorter one …
        ratio_floor: … and more than this.
        max_shorter: Maximum number of pieces of the shorter side.
        max_together: Maximum number of pieces of both sides together.
        max_copied: Drop a pair where this share of either side's pieces occurs in the other side, if both sides have
            more than five.
    """

    tokenizer: Tokenizer | None = None
    duplicates: bool | None = None
    control_characters: bool = False
    forbidden: tuple[str, ...] = ()
    placeholders: tuple[str, ...] = ()
    identical: bool = False
    min_pieces: CountOr0 = 0
    max_ratio: Positive | None = None
    ratio_floor: CountOr0 = 0
    max_shorter: Count | None = None
    max_together: Count | None = None
    max_copied: Share | None = None

    @classmethod
    def dap(cls, tokenizer: Tokenizer | None = None) -> Cleaning:
        """Create the filters of DAP's released code, which counts the pieces of multilingual BERT's tokenizer.

        Args:
            tokenizer: Splits a sentence into pieces, e.g. ``AutoTokenizer.from_pretrained(...).tokenize``. If None,
                `load_corpus` sets it.

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
        """Create the length filters of PPA: at least 10 pieces on each side and at most 128 on both together.

        Args:
            tokenizer: Splits a sentence into pieces; PPA uses multilingual BERT's tokenizer.

        Reference: Pan et al. 2021, "Multilingual BERT Post-Pretraining Alignment".
        """
        return cls(tokenizer=tokenizer, min_pieces=10, max_together=128)

    @property
    def counts_pieces(self) -> bool:
        """Whether one of the filters counts pieces."""
        return self.min_pieces > 0 or any(getattr(self, name) is not None for name in _LIMITS)

    def without_pieces(self) -> Cleaning:
        """Return the same cleaning without the filters that count pieces."""
        limits: dict[str, Any] = dict.fromkeys(_LIMITS)
        return dataclasses.replace(self, tokenizer=None, min_pieces=0, ratio_floor=0, **limits)

    def tidy(self, text: str) -> str:
        """Tidy a sentence.

        >>> Cleaning.dap().tidy(' "Habari" yako ')
        'Habari yako'
        """
        if self.control_characters:
            text = _CONTROL.sub("", one_line(text)).replace('"', "")
        return text.strip()

    def fault(self, source: str, target: str) -> str | None:
        """Return why a tidied pair is dropped, or None if it is kept. Duplicates are found by `load_corpus`.

        >>> Cleaning(identical=True).fault("OK", "OK")
        'identical sides'
        """
        return self.text_fault(source, target) or self.piece_fault(source, target)

    def text_fault(self, source: str, target: str) -> str | None:
        """Return why a tidied pair is dropped by the filters that need no pieces, or None."""
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
        """Return why a tidied pair is dropped by the filters that count pieces, or None."""
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


def tidy_row(row: Row, cleaning: Cleaning) -> Row | None:
    """Tidy the texts of a row and renumber its links.

    None if the words can no longer be matched to the links.
    """
    texts = {
        name: SEPARATOR.join(filter(None, map(cleaning.tidy, text.split(SEPARATOR))))
        for name in SENTENCES
        if (text := getattr(row, name))
    }
    tidied = row._replace(source=cleaning.tidy(row.source), target=cleaning.tidy(row.target), **texts)
    if row.alignment is not None and tidied[:2] != row[:2]:
        return _renumbered(row, tidied, cleaning)
    return tidied


def _renumbered(row: Row, tidied: Row, cleaning: Cleaning) -> Row | None:
    """A tidied row with renumbered links, as tidying may empty words; None if the words cannot be matched."""
    places = []
    for side, text, tidy, language in zip(("source", "target"), row[:2], tidied[:2], row[2:4], strict=True):
        segmenter = segmenter_of_side(row.segmenter, side)
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
