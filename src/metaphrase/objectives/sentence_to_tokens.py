"""XTR: predict which pieces the other sentence holds from a sentence embedding, the token-level half of EMS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.languages import LanguageEmbedding
from metaphrase.modeling.views import View, source_view, target_view
from metaphrase.objectives.base import Granularity, HeadSources, Objective
from metaphrase.objectives.vocabulary import Vocabulary, VocabularyHead

#: Width of the embedding of the language to predict (the released code's).
LANGUAGE_WIDTH = 128


class DistributionHead(nn.Module):
    """A distribution over the vocabulary from an embedding: ``softmax(W · LN(swish(D [l ; s])) + b)``.

    Args:
        config: The encoder's configuration.
        languages: Languages that are told apart in ``l``; none leaves it out.
        special_ids: Ids of pieces that are no part of a text.
        vocabulary: Settings of the :class:`VocabularyHead`.
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

    def forward(self, sentence_bh: Tensor, language_b: Tensor) -> Tensor:
        """The states that are projected on the vocabulary.

        Args:
            sentence_bh: Embeddings, shape ``(batch, hidden)``.
            language_b: Code of the language to predict, shape ``(batch,)``.

        Returns:
            Shape ``(batch, hidden)``.
        """
        if self.languages is not None and self.language_norm is not None:
            language_bh = self.dropout(self.language_norm(self.languages(language_b)))
            sentence_bh = torch.cat([language_bh, sentence_bh], dim=-1)
        return self.mlp(sentence_bh)


def piece_frequencies(
    ids_bl: Tensor, counted_bl: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Relative frequencies of the pieces of each sentence.

    Args:
        ids_bl: Pieces, shape ``(batch, length)``.
        counted_bl: True at pieces that count.
        dtype: Type of the frequencies.

    Returns:
        ``rows_k``, ``labels_k`` and ``shares_k``: sentence, piece and frequency, once for each piece that a sentence holds.

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
    """Divergence of the predicted distribution over pieces from the true one.

    ``Σ_v p log p - Σ_v p log q``, averaged over the sentences. Only the pieces with ``p > 0`` are ever listed.

    Args:
        head: Gives ``q``.
        sentence_bh: Embeddings, shape ``(batch, hidden)``.
        language_b: Code of the language to predict, shape ``(batch,)``.
        rows_k: Embedding that each listed piece is to be predicted from (see :func:`piece_frequencies`).
        labels_k: The pieces.
        shares_k: Their frequencies ``p``.
        table_vh: The encoder's input embeddings, for tied heads.

    Returns:
        Scalar, from 0; a zero with a graph where no piece is listed.

    Reference: Mao et al. 2024 (EMS), cross-lingual token-level reconstruction.
    """
    weights_k = shares_k / len(sentence_bh)
    hidden_bh = head(sentence_bh, language_b)
    cross_entropy = head.vocabulary(hidden_bh, labels_k, table_vh, rows_k=rows_k, weights_k=weights_k)
    return cross_entropy + (weights_k * shares_k.log()).sum()


class SentenceToTokens(Objective):
    """Predict the pieces of the other sentence, as a distribution, from a sentence embedding alone.

    The sum of both directions. It costs one row of the vocabulary projection for a sentence, where objectives that predict
    place by place need one for each piece.

    Args:
        max_length: Pieces kept of a sentence.
        vocabulary: ``"tied"`` or ``"untied"`` (see :class:`VocabularyHead`).
        language_embeddings: Tell the head the language to predict.

    Inputs: the columns ``source`` and ``target``; with language embeddings also ``source_lang`` and ``target_lang``.

    Relations: :class:`RepresentationTranslation` predicts the other sentence too, but place by place, from the states of
    all pieces, and never touches the sentence embedding.

    Reference: Mao et al. 2024 (EMS), cross-lingual token-level reconstruction. Pieces are counted as often as they occur;
    the released code gives ``1 / length`` to each that occurs, so that repeated pieces leave a sum below 1.
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

    def __init__(
        self, *, max_length: int = 32, vocabulary: Vocabulary = "tied", language_embeddings: bool = True
    ) -> None:
        super().__init__(max_length=max_length)
        if vocabulary == "english":
            raise ValueError("XTR predicts pieces of both sides; its vocabulary is 'tied' or 'untied', not 'english'.")
        self.vocabulary: Vocabulary = vocabulary
        self.language_embeddings = language_embeddings

    def views(self) -> tuple[View, ...]:
        """Both sides."""
        return source_view(self.max_length), target_view(self.max_length)

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """Languages of the corpus, special pieces, and shape of the vocabulary projection.

        Raises:
            ValueError: Language embeddings are wanted and no language is known.
        """
        if self.language_embeddings and not sources.languages:
            raise ValueError(
                "XTR's language embeddings need the languages of the corpus, but none is known. Pass `languages` to "
                "AlignmentLoss, or set language_embeddings to false."
            )
        return {
            "languages": list(sources.languages) if self.language_embeddings else [],
            "special_ids": sorted(sources.tokenizer.all_special_ids),
            "vocabulary": VocabularyHead.settings(sources, self.vocabulary, "none"),
        }

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module:
        """The MLP, the language embedding and the vocabulary projection."""
        return DistributionHead(config, **settings)

    def fill_head(self, sources: HeadSources) -> None:
        """Copy the table, where the head has its own; the MLP starts fresh."""
        self.head.vocabulary.fill(sources)

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Scalar divergence, summed over the directions."""
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
        dtype = torch.promote_types(side.table_vh.dtype, torch.float32)
        return piece_frequencies(side.ids_bl, counted_bl, dtype)
