"""WTR: word translation ranking, the second word-level objective of WACSE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from metaphrase.io.arguments import Temperature
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.functional import at_least_float32, cosines, info_nce, inside_spans, pooled_spans
from metaphrase.modeling.views import View, links_view
from metaphrase.objectives.aligned_word_prediction import AlignedWordPrediction
from metaphrase.objectives.base import Granularity, Objective

WordSimilarity = Literal["pairwise", "pooled", "max"]


def word_similarity(
    source_bsh: Tensor,
    target_bth: Tensor,
    source_spans_bx2: Tensor,
    target_spans_by2: Tensor,
    *,
    similarity: WordSimilarity = "pairwise",
) -> Tensor:
    """Similarity of each word of a sentence to each word of its translation, in float32 or wider.

    ``"pairwise"`` is the mean cosine over all pairs of pieces, which is the dot product of the mean normalised states;
    ``"pooled"`` the cosine of the mean states; ``"max"`` the largest cosine of a pair of pieces. Returns shape ``(batch,
    source words, target words)``; undefined for empty spans.

    Reference: Miao et al. 2024 (WACSE), section 3.2, φ of equation 6.
    """
    source_bsh, target_bth = at_least_float32(source_bsh), at_least_float32(target_bth)
    with torch.autocast(source_bsh.device.type, enabled=False):
        if similarity == "pooled":
            return cosines(pooled_spans(source_bsh, source_spans_bx2), pooled_spans(target_bth, target_spans_by2))
        source_bsh, target_bth = F.normalize(source_bsh, dim=-1), F.normalize(target_bth, dim=-1)
        if similarity == "pairwise":
            return pooled_spans(source_bsh, source_spans_bx2) @ pooled_spans(target_bth, target_spans_by2).mT
        cosine_bxt = _largest(source_bsh @ target_bth.mT, source_spans_bx2)
        return _largest(cosine_bxt.mT, target_spans_by2).mT


def _largest(values_blc: Tensor, spans_bw2: Tensor) -> Tensor:
    """Maximum over each span of the second axis, shape ``(batch, words, …)``."""
    outside_bwl = ~inside_spans(spans_bw2, values_blc.shape[1])
    return values_blc[:, None].masked_fill(outside_bwl[..., None], -torch.inf).amax(dim=2)


def word_translation_ranking(
    similarity_bxy: Tensor,
    links_bn2: Tensor,
    source_word_bx: Tensor,
    target_word_by: Tensor,
    *,
    temperature: float = 0.05,
    mask_positives: bool = False,
) -> Tensor:
    """Each linked word must identify its translation among the words of the other sentence.

    ``-log exp(φ(x, y) / τ) / Σ_y' exp(φ(x, y') / τ)`` for each link, where ``y'`` are all words of the other sentence of the
    pair, and the same from ``y`` to ``x``.

    Args:
        similarity_bxy: φ, shape ``(batch, source words, target words)``.
        links_bn2: Source and target word of each link, ``-1`` for padding, shape ``(batch, links, 2)``.
        source_word_bx: True at candidates, false at padding, shape ``(batch, source words)``.
        target_word_by: The same for the target.
        temperature: Softmax temperature τ.
        mask_positives: Exclude the other words that an anchor is linked to from its denominator.

    Returns:
        The loss of each link, ``x → y`` in row 0 and ``y → x`` in row 1, shape ``(2, links of the batch)``.

    Reference: Miao et al. 2024 (WACSE), section 3.2, equation 6.

    >>> links, word = torch.tensor([[[0, 0]]]), torch.ones(1, 2, dtype=torch.bool)
    >>> word_translation_ranking(torch.eye(2)[None], links, word, word).max().item() < 1e-6
    True
    """
    pair_n, slot_n = (links_bn2[..., 0] >= 0).nonzero(as_tuple=True)
    x_n, y_n = links_bn2[pair_n, slot_n].unbind(dim=-1)
    linked_bxy = torch.zeros_like(similarity_bxy, dtype=torch.bool)
    linked_bxy[pair_n, x_n, y_n] = True
    losses = []
    for similarity_bwc, linked_bwc, candidate_bc, word_n, positive_n in (
        (similarity_bxy, linked_bxy, target_word_by, x_n, y_n),
        (similarity_bxy.mT, linked_bxy.mT, source_word_bx, y_n, x_n),
    ):
        candidate_nc = candidate_bc[pair_n]
        if mask_positives:
            candidate_nc = candidate_nc & ~linked_bwc[pair_n, word_n]
        similarity_nc = similarity_bwc[pair_n, word_n]
        losses.append(info_nce(similarity_nc, positive_n, candidate_nc, temperature=temperature))
    return torch.stack(losses)


@dataclass(eq=False, repr=False, kw_only=True)
class WordTranslationRanking(Objective):
    """Each linked word must identify its translation among the words of the other sentence.

    The states come from the unmasked sentences, which are shared with :class:`TranslationRanking`. Special tokens
    and words that truncation cut are neither anchors nor candidates.

    Args:
        temperature: Softmax temperature τ. The paper prints none; without one the loss cannot approach 0, because cosines
            are at most 1.
        similarity: ``"pairwise"`` (the paper), ``"pooled"`` or ``"max"``, see :func:`word_similarity`.
        mask_positives: Exclude the other words that an anchor is linked to from its denominator (the paper does not).
        reduction: ``"link_mean"`` is the mean over the links of the batch and both directions; ``"sum"`` is equation 8 as
            printed, their sum divided by ``2 · batch``, which weights a sentence by its links.

    Inputs: the columns ``source``, ``target`` and ``alignment``.

    Relations: :class:`AlignedWordPrediction` predicts the pieces of the same links; Wu and Dredze 2020 rank against the
    words of the whole batch.

    Reference: Miao et al. 2024 (WACSE), section 3.2, equations 6 to 8.
    """

    name: ClassVar[str] = "wtr"
    granularity: ClassVar[Granularity] = "word"
    reads_words: ClassVar[bool] = True
    citation: ClassVar[str] = AlignedWordPrediction.citation

    temperature: Temperature = 0.05
    similarity: WordSimilarity = "pairwise"
    mask_positives: bool = False
    reduction: Literal["link_mean", "sum"] = "link_mean"

    def views(self) -> tuple[View, ...]:
        """Return both sides and the links between their words."""
        return *super().views(), links_view(self.max_length)

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the ranking loss; a zero with a graph if no word is linked."""
        source, target, links = encodings["source"], encodings["target"], encodings["links"].features
        spans = links["source_spans"], links["target_spans"]
        similarity_bxy = word_similarity(source.tokens_blh, target.tokens_blh, *spans, similarity=self.similarity)
        losses_2n = word_translation_ranking(
            similarity_bxy,
            links["links"],
            *(spans_bw2[..., 1] > 0 for spans_bw2 in spans),
            temperature=self.temperature,
            mask_positives=self.mask_positives,
        )
        terms = losses_2n.numel() if self.reduction == "link_mean" else 2 * len(similarity_bxy)
        return losses_2n.sum() / max(terms, 1)
