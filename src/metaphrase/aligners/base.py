"""What every word aligner is: words in, scored links out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from metaphrase.corpus.words import Link, Words, format_links

#: A sentence and its translation.
WordPair = tuple[Words, Words]


@dataclass(frozen=True)
class Alignment:
    """The word links of a pair.

    Attributes:
        links: ``(source word, target word)``, from 0, sorted.
        scores: One for each link, higher is surer; what it measures is the aligner's affair.
    """

    links: tuple[Link, ...]
    scores: tuple[float, ...]

    @property
    def pharaoh(self) -> str:
        """The links in Pharaoh's form, ``0-0 1-2``."""
        return format_links(self.links)

    @property
    def score_text(self) -> str:
        """The scores, a space between them, in the order of the links."""
        return " ".join(f"{score:.4g}" for score in self.scores)


class Aligner(ABC):
    """Finds which words of a pair translate each other.

    Attributes:
        name: What the command line calls it.
    """

    name: ClassVar[str]

    @abstractmethod
    def align(self, pairs: Sequence[WordPair]) -> list[Alignment]:
        """Align sentence pairs.

        Args:
            pairs: The words of each source and target; a side may be empty.

        Returns:
            One alignment for each pair, in their order.
        """
