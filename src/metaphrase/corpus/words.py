"""Words of a text: their positions, links and word pieces.

Links refer to the words of :func:`word_spans`. An aligner and a view that reads its links must use the same segmenter,
whose name is stored with the links in the column ``segmenter``.
"""

from __future__ import annotations

import logging
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from metaphrase.corpus.codes import bare_language
from metaphrase.exceptions import AlignmentFormatError, MissingExtraError
from metaphrase.io.environment import install_command

logger = logging.getLogger(__name__)

Link = tuple[int, int]
Span = tuple[int, int]
Segmenter = Literal["whitespace", "icu"]

#: Languages that are written without spaces between words.
UNSPACED = frozenset({"zh", "yue", "wuu", "ja", "th", "lo", "km", "my", "bo", "dz"})

#: Sentences of a side of a corpus that show whether it is tokenised.
_SAMPLE = 300
_WORD = re.compile(r"\S+")
_LINK = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")


def word_spans(text: str, language: str | None = None, segmenter: str = "whitespace") -> list[Span]:
    """Find the start and end of each word in a text.

    ``"whitespace"`` splits at spaces. ``"icu"`` also splits between spaces, with the dictionaries of the Unicode project,
    if the language is written without spaces (`is_unspaced`). Returns start and exclusive end in characters.

    >>> word_spans("the cat")
    [(0, 3), (4, 7)]
    """
    spans = [match.span() for match in _WORD.finditer(text)]
    if segmenter == "whitespace":
        return spans
    if segmenter != "icu":
        raise ValueError(f"A segmenter is 'whitespace' or 'icu', not {segmenter!r}.")
    if language is None or not is_unspaced(language):
        return spans
    return [(start + a, start + b) for start, end in spans for a, b in _icu_spans(text[start:end], language)]


def is_unspaced(language: str | None) -> bool:
    """Whether a language is written without spaces between words, in any of its scripts and regions.

    >>> is_unspaced("zh-Hant"), is_unspaced("sw")
    (True, False)
    """
    return language is not None and bare_language(language) in UNSPACED


def is_tokenised(text: str, language: str | None) -> bool:
    """Whether the words of a text in a language without spaces are already separated by spaces.

    Spaces in such a language separate phrases. They separate words if ICU splits the text between them in few places: into
    less than 1.5 words on average, without text in Latin letters, in a text of at least two.

    >>> is_tokenised("我们 喜欢 北京大学 。", "zh"), is_tokenised("我们喜欢北京大学。 你呢？", "zh")
    (True, False)
    """
    if language is None or not is_unspaced(language):
        return False
    chunks, words = _chunks_and_words(text, language)
    return chunks > 1 and words < 1.5 * chunks


def _chunks_and_words(text: str, language: str) -> tuple[int, int]:
    """Number of the chunks between spaces that have letters other than Latin ones, and of the words that ICU finds there."""
    chunks = [chunk for chunk in _WORD.findall(text) if any(c.isalpha() and not c.isascii() for c in chunk)]
    return len(chunks), sum(len(list(_icu_spans(chunk, language))) for chunk in chunks)


def are_tokenised(texts: Sequence[str], language: str | None) -> bool | None:
    """Whether the words of one side of a corpus are already separated by spaces, judged from a sample of its sentences.

    Sentences of a single word, such as "北京大学 。", do not count. The side is tokenised if `is_tokenised` holds for two
    thirds of the others, and it is not if it holds for at most one third. None means that each sentence has to be judged
    by itself.

    >>> are_tokenised(["我们 喜欢 北京大学 。", "猫 喝 牛奶 。", "北京大学 。"], "zh")
    True
    >>> are_tokenised(["我们喜欢北京大学。"], "zh")
    False
    """
    if language is None or not is_unspaced(language):
        return False
    sample = texts[:: max(1, len(texts) // _SAMPLE)][:_SAMPLE]
    counted = [_chunks_and_words(text, language) for text in sample]
    votes = [chunks > 1 and words < 1.5 * chunks for chunks, words in counted if words > 1]
    tokenised, of = sum(votes), len(votes)
    if not tokenised or 3 * tokenised <= of:
        return False if votes else None
    found = True if 3 * tokenised >= 2 * of else None
    _log_tokenised(language, "Most" if found else "Some")
    return found


@cache
def _log_tokenised(language: str, share: str) -> None:
    """Log once that texts of a language are tokenised."""
    words = "words" if share == "Most" else "words of these"
    logger.info("%s sentences in %s are tokenised already: spaces separate the %s.", share, language, words)


def segmenter_of_text(text: str, language: str | None, tokenised: bool | None = None) -> Segmenter:
    """The segmenter that finds the words of a text: ICU in a language without spaces, unless the text is tokenised.

    ``tokenised`` states this for the text's side of a corpus, see `are_tokenised`; None judges the text by itself.
    """
    known = is_tokenised(text, language) if tokenised is None else tokenised
    return "icu" if is_unspaced(language) and not known else "whitespace"


def segmenter_of_side(segmenter: str | None, side: str) -> str:
    """The segmenter of the ``"source"`` or ``"target"`` of a pair, given that of the pair.

    ``"icu-source"`` and ``"icu-target"`` are ICU on one side only, if the other one is tokenised.

    >>> segmenter_of_side("icu-target", "source"), segmenter_of_side("icu-target", "target")
    ('whitespace', 'icu')
    """
    if segmenter in ("icu-source", "icu-target"):
        return "icu" if segmenter == f"icu-{side}" else "whitespace"
    return segmenter or "whitespace"


def _icu_spans(chunk: str, language: str) -> Iterator[Span]:
    """The start and end of each word that ICU finds in a text without spaces."""
    breaker = _word_breaker()
    # ICU counts UTF-16 units: a character beyond the basic plane is two of them.
    units = [0, *accumulate(2 if ord(c) > 0xFFFF else 1 for c in chunk)]
    character_at = {unit: at for at, unit in enumerate(units)}
    at = 0
    for _, unit in breaker(chunk, language).segments():
        end = character_at[unit]
        if any(unicodedata.category(c) != "Cf" for c in chunk[at:end]):  # a zero-width space is not a word
            yield at, end
        at = end


@cache
def _word_breaker() -> Any:
    try:
        from icu4py.breakers import WordBreaker
    except ImportError as error:
        raise MissingExtraError(
            f"Finding the words of languages written without spaces requires ICU: {install_command('align')}."
        ) from error
    return WordBreaker


@dataclass(frozen=True)
class Words:
    """A text and its words: ``(start, end)`` of each in characters.

    The language, if known, is a code as in the corpus, such as ``sw`` or ``zh-Hant``.
    """

    text: str
    spans: tuple[Span, ...]
    language: str | None = None

    @classmethod
    def of(cls, text: str, language: str | None = None, segmenter: str = "whitespace") -> Words:
        """Split a text into words with :func:`word_spans`."""
        return cls(text, tuple(word_spans(text, language, segmenter)), language)

    @classmethod
    def of_side(cls, row: Mapping[str, Any], side: str) -> Words:
        """Split the ``"source"`` or ``"target"`` of a row into words, with the row's segmenter."""
        return cls.of(row[side], row.get(f"{side}_lang"), segmenter_of_side(row.get("segmenter"), side))

    @classmethod
    def of_texts(cls, texts: Sequence[str], language: str | None) -> list[Words]:
        """Split the texts of one side of a corpus into words, with ICU if its language and the texts require it."""
        tokenised = are_tokenised(texts, language)
        return [cls.of(text, language, segmenter_of_text(text, language, tokenised)) for text in texts]

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[str]:
        return (self.text[start:end] for start, end in self.spans)


def parse_links(alignment: str) -> list[Link]:
    """Parse links in the Pharaoh format.

    Raises:
        AlignmentFormatError: The links are not text of the form ``0-0 1-2``.

    >>> parse_links("0-0 1-2")
    [(0, 0), (1, 2)]
    """
    if not isinstance(alignment, str):
        raise AlignmentFormatError(
            f"An alignment is text of the form '0-0 1-2', not {reprlib.repr(alignment)}. Convert pairs of numbers with "
            "metaphrase.corpus.words.format_links(pairs)."
        )
    matches = [_LINK.fullmatch(link) for link in alignment.split()]
    if None in matches:
        raise AlignmentFormatError(f"An alignment has the form '0-0 1-2', not {alignment[:80]!r}.")
    return [(int(match[1]), int(match[2])) for match in matches if match]


def check_links(links: Iterable[Link], n_source: int, n_target: int) -> None:
    """Check that links join words that exist.

    Raises:
        ValueError: A link points outside of the words.
    """
    if any(i >= n_source or j >= n_target for i, j in links):
        raise AlignmentFormatError(f"a link points outside of the {n_source} and {n_target} words")


def format_links(links: Iterable[Link]) -> str:
    """Format links in the Pharaoh format.

    >>> format_links([(0, 0), (1, 2)])
    '0-0 1-2'
    """
    return " ".join(f"{i}-{j}" for i, j in links)


def piece_spans(encoding: Any, words: Words, *, disjoint: bool = False) -> np.ndarray:
    """Find the pieces of each word.

    A word is the run of pieces whose characters overlap it. A word that truncation cut, or that the tokenizer's
    normaliser removed, has the empty span ``(0, 0)``.

    A piece can cross a word boundary where the text has no spaces: one in six pieces of XLM-R does so in Thai text that
    ICU segmented. By default such a piece belongs to all words that it overlaps.

    Args:
        encoding: The ``tokenizers.Encoding`` of ``words.text`` (``tokenizer(texts).encodings[i]``).
        words: The words.
        disjoint: Assign each piece to one word only: the word that most of its characters belong to, the first in a tie.
            A word that keeps no piece has the empty span.

    Returns:
        First piece and exclusive end of each word, shape ``(words, 2)``, int64.
    """
    spans_w2 = np.zeros((len(words), 2), dtype=np.int64)
    if not len(words):
        return spans_w2
    word_at = np.full(len(words.text) + 1, -1)
    for word, (start, end) in enumerate(words.spans):
        word_at[start:end] = word
    cut: set[int] = set()
    for rest in encoding.overflowing:
        cut.update(word for span in rest.offsets for word in word_at[span[0] : span[1]])
    for piece, ((start, end), special) in enumerate(zip(encoding.offsets, encoding.special_tokens_mask, strict=True)):
        if special:
            continue
        overlapped = word_at[start:end]
        overlapped = overlapped[overlapped >= 0]
        owners = [int(np.bincount(overlapped).argmax())] if disjoint and len(overlapped) else set(overlapped.tolist())
        for word in owners:
            if spans_w2[word, 1] == 0:
                spans_w2[word, 0] = piece
            spans_w2[word, 1] = piece + 1
    for word in cut - {-1}:
        spans_w2[word] = 0
    return spans_w2


def phrase_pairs(
    links: Iterable[Link], n_source: int, n_target: int, *, max_length: int = 7
) -> list[tuple[Span, Span]]:
    """Extract the phrase pairs that are consistent with an alignment.

    A source and a target span are a phrase pair if at least one link joins them, and no link joins a word inside one of
    them with a word outside the other. Unaligned words at the border of a target span result in several phrase pairs.
    ``max_length`` is the maximum number of words of a phrase, on either side (Moses: 7).

    Returns ``((source start, source end), (target start, target end))`` in words, ends exclusive, sorted.

    Reference: Koehn 2010, Statistical Machine Translation, section 5.2.3; Och and Ney 2004.

    >>> phrase_pairs([(0, 0), (1, 2), (2, 1)], 3, 3, max_length=2)
    [((0, 1), (0, 1)), ((1, 2), (2, 3)), ((1, 3), (1, 3)), ((2, 3), (1, 2))]
    """
    of_source: list[list[int]] = [[] for _ in range(n_source)]
    of_target: list[list[int]] = [[] for _ in range(n_target)]
    for i, j in links:
        of_source[i].append(j)
        of_target[j].append(i)
    pairs = []
    for first in range(n_source):
        low, high = n_target, -1
        for last in range(first, min(first + max_length, n_source)):
            low, high = min([low, *of_source[last]]), max([high, *of_source[last]])
            if high < 0:
                continue
            if high - low >= max_length:
                break
            if any(not first <= i <= last for back in of_target[low : high + 1] for i in back):
                continue
            start = low
            while start >= 0 and high - start < max_length and (start == low or not of_target[start]):
                end = high
                while end < n_target and end - start < max_length and (end == high or not of_target[end]):
                    pairs.append(((first, last + 1), (start, end + 1)))
                    end += 1
                start -= 1
    return sorted(pairs)
