"""Word-level contrast, the finest of the three granularities of MGC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from metaphrase.exceptions import ModelError
from metaphrase.io.arguments import Temperature
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.functional import cosines, info_nce, inside_spans, pooled_spans
from metaphrase.modeling.views import SIDES, View, WordPieces, links_view
from metaphrase.objectives.base import Granularity, HeadSources, Objective, check_unused
from metaphrase.objectives.word_translation_ranking import word_translation_ranking

Kind = Literal["hard", "soft"]
Units = Literal["mean", "first"]
Reduction = Literal["anchor_mean", "sum"]

MGC_CITATION = """\
@inproceedings{li-etal-2021-multi-granularity,
    title = "Multi-Granularity Contrasting for Cross-Lingual Pre-Training",
    author = "Li, Shicheng and Yang, Pengcheng and Luo, Fuli and Xie, Jun",
    booktitle = "Findings of the Association for Computational Linguistics: ACL-IJCNLP 2021",
    pages = "1708--1717",
    year = "2021",
}"""


class WordStates(NamedTuple):
    """The states of the words and of the pieces of one side.

    Attributes:
        words_bwh: State of each word, shape ``(batch, words, hidden)``.
        word_bw: True at usable words, false at cut words and padding, shape ``(batch, words)``.
        tokens_blh: State of each piece, shape ``(batch, length, hidden)``.
        piece_bl: True at the pieces of words, false at special tokens and padding, shape ``(batch, length)``.
    """

    words_bwh: Tensor
    word_bw: Tensor
    tokens_blh: Tensor
    piece_bl: Tensor


def word_states(tokens_blh: Tensor, spans_bw2: Tensor, *, units: Units = "mean") -> WordStates:
    """Compute the states of words from those of their pieces.

    Padding has the span ``(0, 0)``.

    Reference: Li et al. 2021 (MGC), section 2.1, does not define the state of a word of several pieces; equation 6 takes the
    mean over a span.
    """
    start_bw, end_bw = spans_bw2.unbind(-1)
    first_bw2 = torch.stack([start_bw, torch.minimum(start_bw + 1, end_bw)], dim=-1)
    piece_bl = inside_spans(spans_bw2, tokens_blh.shape[1]).any(dim=1)
    words_bwh = pooled_spans(tokens_blh, spans_bw2 if units == "mean" else first_bw2)
    return WordStates(words_bwh, end_bw > 0, tokens_blh, piece_bl)


def hard_word_contrast(
    source: WordStates,
    target: WordStates,
    links_bn2: Tensor,
    *,
    temperature: float = 0.1,
    mask_positives: bool = False,
    reduction: Reduction = "anchor_mean",
) -> Tensor:
    """Each linked word must identify its partner among all words of the other sentence.

    Each word of a link is an anchor. Words without a link are negatives only. The loss of an anchor is 0 if the other
    sentence has one word. The equations assume one-to-one links; if a word has several, each is a term.

    Args:
        source: States of the source's words.
        target: States of the target's words.
        links_bn2: Source and target word of each link, -1 for padding, shape ``(batch, links, 2)``.
        temperature: Softmax temperature τ.
        mask_positives: Exclude the other words that an anchor is linked to from its negatives.
        reduction: ``"anchor_mean"`` is the mean over the anchors of the batch; ``"sum"`` sums over the anchors of a
            sentence pair (equation 4 as printed) and takes the mean over pairs.

    Returns:
        Scalar; a zero with a graph without links.

    Reference: Li et al. 2021 (MGC), section 2.2, equations 1 to 4.
    """
    losses_2n = word_translation_ranking(
        cosines(source.words_bwh, target.words_bwh),
        links_bn2,
        source.word_bw,
        target.word_bw,
        temperature=temperature,
        mask_positives=mask_positives,
    )
    return reduced(losses_2n.flatten(), len(links_bn2), reduction)


def soft_word_contrast(
    attention: nn.MultiheadAttention,
    source: WordStates,
    target: WordStates,
    *,
    temperature: float = 0.1,
    reduction: Reduction = "anchor_mean",
) -> Tensor:
    """Each word must identify its attention output among those of the other words of its sentence.

    The words are the queries, the pieces of the other sentence the keys and values of the attention.

    Args:
        attention: Attention that replaces an aligner, shared by both directions.
        source: States of the source's words.
        target: States of the target's words.
        temperature: Softmax temperature τ.
        reduction: As for :func:`hard_word_contrast`.

    Returns:
        Scalar; a zero with a graph if no pair has words on both sides.

    Reference: Li et al. 2021 (MGC), section 2.2, equation 5.
    """
    losses = [_attended(attention, source, target, temperature), _attended(attention, target, source, temperature)]
    return reduced(torch.cat(losses), len(source.words_bwh), reduction)


def _attended(attention: nn.MultiheadAttention, query: WordStates, key: WordStates, temperature: float) -> Tensor:
    """Loss of each word of the query side, for pairs with pieces on the key side, shape ``(anchors,)``."""
    readable_b1 = key.piece_bl.any(dim=1, keepdim=True)
    ignored_bl = ~key.piece_bl & readable_b1  # avoids a softmax over nothing; rows without pieces have no anchors
    attended_bwh, _ = attention(
        query.words_bwh, key.tokens_blh, key.tokens_blh, key_padding_mask=ignored_bl, need_weights=False
    )
    anchor_bw = query.word_bw & readable_b1
    own_bw = torch.arange(anchor_bw.shape[1], device=anchor_bw.device).expand_as(anchor_bw)
    similarity_bww = cosines(query.words_bwh, attended_bwh)
    return info_nce(similarity_bww, own_bw, anchor_bw[:, None], temperature=temperature)[anchor_bw]


def reduced(losses_n: Tensor, batch: int, reduction: Reduction) -> Tensor:
    """Reduce the losses of all anchors: their mean, or the mean over sentence pairs of their sums."""
    return losses_n.sum() / (batch if reduction == "sum" else max(len(losses_n), 1))


@dataclass(eq=False, repr=False, kw_only=True)
class WordContrast(Objective):
    """Contrast the state of each word with those of the words of its translation.

    Args:
        kind: ``"hard"`` uses the links of an aligner (MGC-HARD), ``"soft"`` a learned attention over the other sentence that
            is discarded after training (MGC-SOFT).
        temperature: Softmax temperature τ.
        mutual: For ``"hard"``: use only links whose two words are each other's best (see
            :func:`metaphrase.modeling.views.mutual_links`), as in section 2.2. All one-to-one links are mutual.
        mask_positives: For ``"hard"`` with links that are not one-to-one: exclude the other words that an anchor is linked
            to from its negatives.
        units: State of a word: the ``"mean"`` of its pieces, or its ``"first"`` piece.
        reduction: ``"anchor_mean"`` or the paper's ``"sum"`` (see :func:`hard_word_contrast`).

    Inputs: the columns ``source`` and ``target``; for ``"hard"`` also ``alignment``, and ``alignment_scores`` for mutual
    links.

    Relations: ``wtr`` (WACSE) ranks the same candidates by pairwise similarities of pieces; :class:`SpanContrast` and
    :class:`SentenceContrast` are the coarser granularities of MGC.

    Reference: Li et al. 2021 (MGC), section 2.2, equations 2 to 5.
    """

    name: ClassVar[str] = "word-contrast"
    granularity: ClassVar[Granularity] = "word"
    reads_words: ClassVar[bool] = True
    citation: ClassVar[str] = MGC_CITATION

    kind: Kind = "hard"
    temperature: Temperature = 0.1
    mutual: bool = False
    mask_positives: bool = False
    units: Units = "mean"
    reduction: Reduction = "anchor_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        hard = self.kind == "hard"
        if not hard:
            check_unused(self, ("mutual", "mask_positives"), "kind: hard")
        self.words = links_view(self.max_length, mutual=self.mutual) if hard else WordPieces("words", self.max_length)

    def views(self) -> tuple[View, ...]:
        """Return both sides and their words."""
        return *super().views(), self.words

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """Check that the encoder has attention heads, whose number ``"soft"`` adopts.

        Raises:
            ModelError: It has none.
        """
        if self.kind == "soft" and not hasattr(sources.encoder.config, "num_attention_heads"):
            raise ModelError(
                f"'kind: soft' of {self.name!r} attends with as many heads as the encoder, but "
                f"{type(sources.encoder).__name__} has no attention. Use 'kind: hard', or an encoder of the BERT or XLM-R "
                "family."
            )
        return {}

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module | None:
        """Build the attention of ``"soft"``, with the encoder's number of heads."""
        if self.kind == "hard":
            return None
        return nn.MultiheadAttention(
            config.hidden_size,
            config.num_attention_heads,
            dropout=getattr(config, "attention_probs_dropout_prob", 0.0),
            batch_first=True,
        )

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the loss over the words of the batch."""
        features = encodings[self.words.name].features
        source, target = (
            word_states(encodings[side].tokens_blh, features[f"{side}_spans"], units=self.units) for side in SIDES
        )
        settings: dict[str, Any] = {"temperature": self.temperature, "reduction": self.reduction}
        if self.kind == "soft":
            return soft_word_contrast(self.head, source, target, **settings)
        return hard_word_contrast(source, target, features["links"], mask_positives=self.mask_positives, **settings)
