"""The rows of a corpus: their columns, and what makes a row valid."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from datasets import Features, Value

from metaphrase.corpus.codes import is_plain
from metaphrase.corpus.text import EMPTY, BadLine, is_blank
from metaphrase.corpus.words import check_links, format_links, parse_links, segmenter_of_side, word_spans
from metaphrase.exceptions import AlignmentFormatError

#: Columns of every corpus.
COLUMNS = ("source", "target", "source_lang", "target_lang")
#: Columns that a corpus may also have.
OPTIONAL = ("alignment", "alignment_scores", "segmenter", "source_bt", "target_bt", "negatives")
#: The optional columns that hold sentences, and the separator between several of them.
SENTENCES, SEPARATOR = ("source_bt", "target_bt", "negatives"), " ||| "
#: Segmenters of one side, and their names for the pair in the other direction.
_OTHER_SIDE = {"icu-source": "icu-target", "icu-target": "icu-source"}


class Row(NamedTuple):
    """A pair of a corpus."""

    source: str
    target: str
    source_lang: str | None = None
    target_lang: str | None = None
    alignment: str | None = None
    alignment_scores: str | None = None
    segmenter: str | None = None
    source_bt: str | None = None
    target_bt: str | None = None
    negatives: str | None = None

    def swapped(self) -> Row:
        """The pair in the other direction, with everything that belongs to a side; negatives belong to the target."""
        alignment = self.alignment
        if alignment is not None:
            alignment = format_links((j, i) for i, j in parse_links(alignment))
        return self._replace(
            source=self.target,
            target=self.source,
            source_lang=self.target_lang,
            target_lang=self.source_lang,
            alignment=alignment,
            segmenter=self.segmenter and _OTHER_SIDE.get(self.segmenter, self.segmenter),
            source_bt=self.target_bt,
            target_bt=self.source_bt,
            negatives=None,
        )


def row_features(optional: Iterable[str]) -> Features:
    """The features of a corpus with some of the optional columns."""
    present = set(optional)
    return Features({name: Value("string") for name in (*COLUMNS, *OPTIONAL) if name in COLUMNS or name in present})


def check_row(row: Row, into: str, max_chars: int) -> Row | BadLine:
    """Validate a row and turn it so that its target is in the corpus's target language.

    Returns the row, or the reason why it is unusable.
    """
    if fault := _text_fault(row, max_chars):
        return fault
    for language in (row.source_lang, row.target_lang):
        if language is not None and not is_plain(language):
            return BadLine("no language", f"{language!r:.40} is not a language code")
    try:
        row = _with_links(row)
    except ValueError as error:
        return BadLine("bad alignment", str(error))
    if row.source_lang == into and row.target_lang not in (into, None):
        return row.swapped()
    return row


def _text_fault(row: Row, max_chars: int) -> BadLine | None:
    """Why the texts of a row are unusable, or None."""
    source, target = row.source, row.target
    if is_blank(source) or is_blank(target):
        return BadLine(EMPTY, fault=False)
    if len(source) > max_chars or len(target) > max_chars:
        return BadLine("too long", f"{max(len(source), len(target))} characters")
    texts = source + target
    for name in SENTENCES:
        texts += getattr(row, name) or ""
    if "\0" in texts:
        return BadLine("not text", "NUL")
    try:
        texts.encode()
    except UnicodeEncodeError:
        return BadLine("not text", "lone surrogate")
    return None


def _with_links(row: Row) -> Row:
    """A row whose links fit its words."""
    if row.alignment is None:
        return row._replace(alignment_scores=None, segmenter=None)
    links = parse_links(row.alignment)
    n_source = len(word_spans(row.source, row.source_lang, segmenter_of_side(row.segmenter, "source")))
    n_target = len(word_spans(row.target, row.target_lang, segmenter_of_side(row.segmenter, "target")))
    check_links(links, n_source, n_target)
    if not row.alignment_scores:
        return row._replace(alignment_scores=None)
    scores = row.alignment_scores.split()
    if odd := [score for score in scores if not _is_finite(score)]:
        raise AlignmentFormatError(f"alignment_scores has {odd[0]!r:.40}, which is not a finite number")
    if len(scores) != len(links):
        raise AlignmentFormatError(f"alignment_scores has {len(scores)} scores for {len(links)} links")
    return row


def _is_finite(number: str) -> bool:
    """Whether a text is a finite number."""
    try:
        return math.isfinite(float(number))
    except ValueError:
        return False
