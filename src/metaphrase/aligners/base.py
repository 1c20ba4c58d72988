"""The interface of word aligners: words in, scored links out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from metaphrase.corpus.words import Link, Words, format_links
from metaphrase.exceptions import UsageError

#: A sentence and its translation.
WordPair = tuple[Words, Words]
#: How words are found; see `metaphrase.aligners.linking.add_alignment`.
Segmentation = Literal["auto", "whitespace", "icu"]
#: Methods and units of the embedding aligner; see `metaphrase.aligners.embedding.EmbeddingAligner`.
Method = Literal["argmax", "itermax", "csls", "softmax"]
Level = Literal["piece", "word"]


@dataclass(frozen=True)
class Alignment:
    """The word links of a pair.

    Attributes:
        links: ``(source word, target word)``, counted from 0, sorted.
        scores: One score per link; higher is more certain. The scale depends on the aligner.
    """

    links: tuple[Link, ...]
    scores: tuple[float, ...]

    @property
    def pharaoh(self) -> str:
        """The links in the Pharaoh format, ``0-0 1-2``."""
        return format_links(self.links)

    @property
    def score_text(self) -> str:
        """The scores in the order of the links, separated by spaces."""
        return " ".join(f"{score:.4g}" for score in self.scores)


def check_word_pairs(pairs: Sequence[WordPair]) -> None:
    """Refuse sentences that are not divided into words, whose characters would be aligned.

    Raises:
        UsageError: A side is a text.
    """
    if texts := [side for pair in pairs for side in pair if isinstance(side, str)]:
        raise UsageError(f"An aligner reads pairs of Words, but got the text {texts[0][:40]!r}. Pass Words.of(text).")


class Aligner(ABC):
    """Finds which words of a pair translate each other.

    Attributes:
        name: Name on the command line.
    """

    name: str

    @abstractmethod
    def align(self, pairs: Sequence[WordPair]) -> list[Alignment]:
        """Align sentence pairs, of which a side may be empty. Returns one alignment per pair, in input order."""
