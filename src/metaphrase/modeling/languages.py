"""Language codes as integers, and language embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import PreTrainedModel

from metaphrase.encoders.adapters import shared_copy
from metaphrase.exceptions import CorpusError, ModelError, UsageError


def language_id(language: str) -> int:
    """Encode a language code of up to eight ASCII characters as an integer, to store it in a tensor.

    Raises:
        UsageError: The code is longer.

    >>> language_id("en") == int.from_bytes(b"en")
    True
    """
    number = int.from_bytes(language.encode())
    if number.bit_length() > 63:
        raise UsageError(
            f"The language code {language!r} is too long. Use a code of ISO 639, with a script where it matters, such as "
            "zh-Hant."
        )
    return number


class LanguageEmbedding(nn.Module):
    """One learned vector per language.

    Args:
        languages: Language codes as in the corpus, such as ``sw`` or ``zh-Hant``.
        hidden: Width of a vector.
    """

    def __init__(self, languages: Sequence[str], hidden: int) -> None:
        super().__init__()
        self.languages = tuple(sorted(languages, key=language_id))
        self.register_buffer("codes", torch.tensor([language_id(language) for language in self.languages]))
        self.table = nn.Embedding(len(self.languages), hidden)

    def forward(self, code: Tensor) -> Tensor:
        """Look up the vectors of languages.

        Args:
            code: Values of :func:`language_id`, any shape.

        Returns:
            Shape ``(…, hidden)``.

        Raises:
            ValueError: The embedding has no vector for a language.
        """
        row = torch.searchsorted(self.codes, code).clamp(max=len(self.codes) - 1)
        if not torch.equal(self.codes[row], code):
            if (code == 0).any():
                raise CorpusError(
                    "A language embedding requires the language of every text, but some rows have none. Fill the columns "
                    "'source_lang' and 'target_lang' (on the command line: --languages, or files named like sw-en.tsv)."
                )
            unknown = {int(c).to_bytes(8).lstrip(b"\0").decode() for c in code[self.codes[row] != code].unique()}
            raise UsageError(
                f"The language embedding covers {', '.join(self.languages)}, but not "
                f"{', '.join(map(repr, sorted(unknown)))}. Pass `languages` of the whole corpus to AlignmentLoss."
            )
        return self.table(row)

    def of(self, language: str) -> Tensor:
        """Look up the vector of one language, shape ``(hidden,)``."""
        return self(torch.tensor(language_id(language), device=self.codes.device))


def token_type_table(encoder: PreTrainedModel) -> nn.Embedding:
    """Return the token type embeddings of an encoder, into which a language vector is folded after training."""
    table = getattr(getattr(encoder, "embeddings", None), "token_type_embeddings", None)
    if not isinstance(table, nn.Embedding) or table.embedding_dim != encoder.config.hidden_size:
        raise ModelError(
            f"An input language embedding is released as part of the token type embeddings, but {type(encoder).__name__} "
            "has none of its hidden size. Use an encoder of the BERT or XLM-R family, or set language_embedding to false."
        )
    return table


def fold_language(
    model: SentenceTransformer, language_embedding: LanguageEmbedding, language: str
) -> SentenceTransformer:
    """Fold the vector of one language into a stock model for the texts of this language.

    In training, every token receives the vector of its language and that of token type 0. The returned model has their sum
    as its token type 0. It shares all other weights with `model`, which is not changed.

    Args:
        model: The trained encoder.
        language_embedding: The language embedding trained with it (``loss.heads.language_embedding``).
        language: Language code as in the corpus, such as ``sw`` or ``zh-Hant``.

    Raises:
        ValueError: The embedding has no vector for the language, or the encoder has no token types.

    Reference: Miao et al. 2024 (WACSE), section 6.1.
    """
    vector_h = language_embedding.of(language).detach()
    folded = shared_copy(model)
    transformer: Any = folded[0]
    table = token_type_table(transformer.auto_model)
    weight_vh = table.weight.detach().clone()
    weight_vh[0] += vector_h.to(weight_vh)
    table.weight = nn.Parameter(weight_vh)
    return folded


def fold_languages(
    model: SentenceTransformer, language_embedding: LanguageEmbedding
) -> dict[str, SentenceTransformer]:
    """Build one stock model per language of an embedding, see :func:`fold_language`."""
    return {language: fold_language(model, language_embedding, language) for language in language_embedding.languages}
