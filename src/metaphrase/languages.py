"""Languages as numbers, and as learned vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def language_code(language: str) -> int:
    """A language's code as a number, so that it can travel in a tensor.

    >>> language_code("en") == int.from_bytes(b"en")
    True
    """
    return int.from_bytes(language.encode()[:7])


class LanguageEmbedding(nn.Module):
    """One learned vector for each language.

    Args:
        languages: ISO 639-1 codes.
        hidden: Width of a vector.
    """

    def __init__(self, languages: Sequence[str], hidden: int) -> None:
        super().__init__()
        self.languages = tuple(sorted(languages, key=language_code))
        self.register_buffer("codes", torch.tensor([language_code(language) for language in self.languages]))
        self.table = nn.Embedding(len(self.languages), hidden)

    def forward(self, code: Tensor) -> Tensor:
        """The vectors of some languages.

        Args:
            code: What :func:`language_code` made of them, any shape.

        Returns:
            Shape ``(…, hidden)``.

        Raises:
            ValueError: A language is not among those that the embedding was made for.
        """
        row = torch.searchsorted(self.codes, code).clamp(max=len(self.codes) - 1)
        if not torch.equal(self.codes[row], code):
            unknown = {int(c).to_bytes(7).lstrip(b"\0").decode() for c in code[self.codes[row] != code].unique()}
            raise ValueError(
                f"There is a language embedding for {', '.join(self.languages)}, but none for "
                f"{', '.join(map(repr, sorted(unknown)))}. Pass `languages` of the whole corpus to AlignmentLoss."
            )
        return self.table(row)

    def of(self, language: str) -> Tensor:
        """The vector of one language, shape ``(hidden,)``."""
        return self(torch.tensor(language_code(language), device=self.codes.device))
