"""XTR: predict the token distribution of the translation from a sentence embedding, the token-level objective of EMS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.languages import LanguageEmbedding
from metaphrase.objectives.base import Granularity, HeadSources, Objective, check_embedding_size, corpus_languages
from metaphrase.objectives.vocabulary import FullVocabulary, VocabularyHead

#: Width of the embedding of the language to predict, as in the released code.
LANGUAGE_WIDTH = 128


class DistributionHead(nn.Module):
    """A distribution over the vocabulary from an embedding: ``softmax(W · LN(swish(D [LN(l) ; s])) + b)``.

    The language vector ``l`` has LayerNorm and dropout, as in the released code.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        languages: Sequence[str],
        special_ids: Sequence[int],
        vocabulary: Mapping[str, Any],
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.languages = LanguageEmbedding(languages, LANGUAGE_WIDTH) if languages else None
        self.language_norm = nn.LayerNorm(LANGUAGE_WIDTH, eps=1e-12) if languages else None
        self.dropout = nn.Dropout(getattr(config, "hidden_dropout_prob", 0.1))
        width = hidden + (LANGUAGE_WIDTH if languages else 0)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.LayerNorm(hidden, eps=1e-12))
        self.vocabulary = VocabularyHead(config, **vocabulary)
        self.register_buffer("special_ids", torch.tensor(special_ids))

    def fill(self, sources: HeadSources) -> None:
        """Initialise the table of an untied head; the MLP keeps its random initialisation."""
        self.vocabulary.fill(sources)

    def forward(self, sentence_bh: Tensor, language_b: Tensor) -> Tensor:
        """Compute the states to project on the vocabulary."""
        if self.languages is not None and self.language_norm is not None:
            language_bh = self.dropout(self.language_norm(self.languages(language_b)))
            sentence_bh = torch.cat([language_bh, sentence_bh], dim=-1)
        return self.mlp(sentence_bh)


def piece_frequencies(
    ids_bl: Tensor, counted_bl: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Relative frequencies of the pieces of each sentence.

    Returns ``rows_k``, ``labels_k`` and ``shares_k``: sentence, piece and frequency, once per distinct piece of a sentence.

    >>> [part.tolist() for part in piece_frequencies(torch.tensor([[5, 7, 5, 5]]), torch.ones(1, 4, dtype=torch.bool))]
    [[0, 0], [5, 7], [0.75, 0.25]]
    """
    stride = ids_bl.max() + 1
    places_bl = torch.arange(len(ids_bl), device=ids_bl.device)[:, None] * stride + ids_bl
    places_k, counts_k = torch.unique(places_bl[counted_bl], return_counts=True)
    rows_k = places_k // stride
    return rows_k, places_k % stride, counts_k.to(dtype) / counted_bl.sum(dim=1)[rows_k]


def sentence_to_tokens(
    head: DistributionHead,
    sentence_bh: Tensor,
    language_b: Tensor,
    rows_k: Tensor,
    labels_k: Tensor,
    shares_k: Tensor,
    table_vh: Tensor,
) -> Tensor:
    """KL divergence of the predicted distribution over pieces from the true one.

    ``Σ_v p log p - Σ_v p log q``, averaged over the sentences. Only pieces with ``p > 0`` are stored.

    Args:
        head: Predicts ``q``.
        sentence_bh: Sentence embeddings, shape ``(batch, hidden)``.
        language_b: Id of the language to predict (see :func:`language_id`), shape ``(batch,)``.
        rows_k: Row of the embedding from which each piece is predicted (see :func:`piece_frequencies`).
        labels_k: The pieces.
        shares_k: Their frequencies ``p``.
        table_vh: The encoder's input embeddings, for tied heads.

    Returns:
        Non-negative scalar; a zero with a graph if there are no pieces.

    Reference: Mao et al. 2024 (EMS), cross-lingual token-level reconstruction.
    """
    weights_k = shares_k / len(sentence_bh)
    hidden_bh = head(sentence_bh, language_b)
    cross_entropy = head.vocabulary(hidden_bh, labels_k, table_vh, rows_k=rows_k, weights_k=weights_k)
    return cross_entropy + (weights_k * shares_k.log()).sum()


@dataclass(eq=False, repr=False, kw_only=True)
class SentenceToTokens(Objective):
    """Predict the pieces of the other sentence, as a distribution, from a sentence embedding only.

    The loss is the sum of both directions. It projects one state per sentence on the vocabulary; objectives that predict
    position by position project one per piece.

    Args:
        vocabulary: ``"tied"`` or ``"untied"`` (see :class:`VocabularyHead`).
        language_embeddings: Provide the language to predict to the head.

    Inputs: the columns ``source`` and ``target``; with language embeddings also ``source_lang`` and ``target_lang``.

    Relations: :class:`RepresentationTranslation` predicts the other sentence position by position, from the states of all
    pieces, and does not use the sentence embedding.

    Reference: Mao et al. 2024 (EMS), cross-lingual token-level reconstruction. Pieces are counted as often as they occur; the
    released code assigns ``1 / length`` to each distinct piece, so its distribution sums to less than 1 if pieces repeat.
    """

    name: ClassVar[str] = "xtr"
    granularity: ClassVar[Granularity] = "token"
    citation: ClassVar[str] = """\
@article{mao-etal-2024-ems,
    title = "{EMS}: Efficient and Effective Massively Multilingual Sentence Embedding Learning",
    author = "Mao, Zhuoyuan and Chu, Chenhui and Kurohashi, Sadao",
    journal = "IEEE/ACM Transactions on Audio, Speech, and Language Processing",
    year = "2024",
}"""

    vocabulary: FullVocabulary = "tied"
    language_embeddings: bool = True

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """Return the languages of the corpus, the special pieces, and the shape of the vocabulary projection.

        Raises:
            ModelError: Language embeddings are requested and the languages are unknown, or sentence embeddings have another
                size than the encoder's states.
        """
        check_embedding_size(sources, self.name)
        return {
            "languages": corpus_languages(sources, self.name) if self.language_embeddings else [],
            "special_ids": sorted(sources.tokenizer.all_special_ids),
            "vocabulary": VocabularyHead.settings(sources, self.vocabulary, "none"),
        }

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module:
        """Build the MLP, the language embedding and the vocabulary projection."""
        return DistributionHead(config, **settings)

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the divergence, summed over both directions."""
        source, target = encodings["source"], encodings["target"]
        of_target, of_source = self._frequencies(target), self._frequencies(source)
        rows_k = torch.cat([of_target[0], of_source[0] + len(source.ids_bl)])
        return 2 * sentence_to_tokens(
            self.head,
            torch.cat([source.sentence_bh, target.sentence_bh]),
            torch.cat([target.features["language"], source.features["language"]]),
            rows_k,
            torch.cat([of_target[1], of_source[1]]),
            torch.cat([of_target[2], of_source[2]]),
            source.table_vh,
        )

    def _frequencies(self, side: Encoding) -> tuple[Tensor, Tensor, Tensor]:
        counted_bl = side.mask_bl & ~torch.isin(side.ids_bl, self.head.special_ids)
        return piece_frequencies(side.ids_bl, counted_bl, torch.promote_types(side.table_vh.dtype, torch.float32))
