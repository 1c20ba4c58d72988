"""Word-level contrasting, the finest of MGC's three granularities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.functional import cosines, inside_spans, masked_ranking, pooled_spans
from metaphrase.modeling.views import Example, View, links_view, pad_arrays, source_view, target_view, tokenize_words
from metaphrase.objectives.base import Granularity, Objective
from metaphrase.objectives.word_translation_ranking import word_translation_ranking

Kind = Literal["hard", "soft"]
Units = Literal["mean", "first"]
Reduction = Literal["token_mean", "sum"]

MGC_CITATION = """\
@inproceedings{li-etal-2021-multi-granularity,
    title = "Multi-Granularity Contrasting for Cross-Lingual Pre-Training",
    author = "Li, Shicheng and Yang, Pengcheng and Luo, Fuli and Xie, Jun",
    booktitle = "Findings of the Association for Computational Linguistics: ACL-IJCNLP 2021",
    pages = "1708--1717",
    year = "2021",
}"""


@dataclass(frozen=True)
class WordPieces(View):
    """The words of both sides in terms of the views ``source`` and ``target``; needs no links.

    Gives ``source_spans`` and ``target_spans``, ``(batch, words, 2)``: first piece of each word and the one behind its
    last, ``(0, 0)`` for a word that truncation cut and for padding.

    Attributes:
        max_length: Pieces kept of a sentence, special tokens included.
    """

    encoded: ClassVar[bool] = False
    max_length: int

    def build(
        self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, rngs: Sequence[np.random.Generator]
    ) -> dict[str, Tensor]:
        """Spans of each pair."""
        _, source = tokenize_words(examples, "source", tokenizer, self.max_length)
        _, target = tokenize_words(examples, "target", tokenizer, self.max_length)
        return {"source_spans": pad_arrays(source, (0, 2)), "target_spans": pad_arrays(target, (0, 2))}


class WordStates(NamedTuple):
    """The states of a side's words, and of its pieces.

    Attributes:
        words_bwh: State of each word, shape ``(batch, words, hidden)``.
        word_bw: True at words that are whole, false at padding, shape ``(batch, words)``.
        tokens_blh: State of each piece, shape ``(batch, length, hidden)``.
        piece_bl: True at the pieces of words, false at special tokens and padding, shape ``(batch, length)``.
    """

    words_bwh: Tensor
    word_bw: Tensor
    tokens_blh: Tensor
    piece_bl: Tensor


def word_states(tokens_blh: Tensor, spans_bw2: Tensor, *, units: Units = "mean") -> WordStates:
    """The states of words.

    Args:
        tokens_blh: State of each piece, shape ``(batch, length, hidden)``.
        spans_bw2: First piece of each word and the one behind its last, ``(0, 0)`` for padding, shape
            ``(batch, words, 2)``.
        units: The state of a word is the ``"mean"`` of its pieces' or its ``"first"`` piece's.

    Reference: Li et al. 2021 (MGC), section 2.1, leaves open what the state of a word of several pieces is; equation 6
    takes the mean over a span.
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
    reduction: Reduction = "token_mean",
) -> Tensor:
    """Each linked word must pick out the word that it is linked to among all words of the other sentence.

    Both words of a link are an anchor once. Words without a link are no anchors but do compete; an anchor whose
    translation has one word costs nothing. The equations assume links that are one-to-one; where a word has several,
    each counts.

    Args:
        source: States of the source's words.
        target: States of the target's words.
        links_bn2: Source and target word of each link, -1 for padding, shape ``(batch, links, 2)``.
        temperature: Softmax temperature τ.
        mask_positives: Let the other words that an anchor is linked to not compete.
        reduction: ``"token_mean"`` is the mean over the anchors of the batch; ``"sum"`` sums over the anchors of a
            sentence pair (equation 4 as printed) and takes the mean over pairs.

    Returns:
        Scalar; a zero with a graph where nothing is linked.

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
    reduction: Reduction = "token_mean",
) -> Tensor:
    """Each word must pick out what it attends to in the other sentence among what its sentence's words attend to there.

    Words are the queries, the other sentence's pieces the keys and values.

    Args:
        attention: What stands in for an aligner, the same for both directions.
        source: States of the source's words.
        target: States of the target's words.
        temperature: Softmax temperature τ.
        reduction: As for :func:`hard_word_contrast`.

    Returns:
        Scalar; a zero with a graph where no pair has words on both sides.

    Reference: Li et al. 2021 (MGC), section 2.2, equation 5.
    """
    losses = [_attended(attention, source, target, temperature), _attended(attention, target, source, temperature)]
    return reduced(torch.cat(losses), len(source.words_bwh), reduction)


def _attended(attention: nn.MultiheadAttention, asking: WordStates, asked: WordStates, temperature: float) -> Tensor:
    """Loss of each word of one side that has something to attend to in the other, shape ``(anchors,)``."""
    readable_b1 = asked.piece_bl.any(dim=1, keepdim=True)
    ignored_bl = ~asked.piece_bl & readable_b1  # a softmax over nothing would be NaN; those rows are no anchors
    attended_bwh, _ = attention(
        asking.words_bwh, asked.tokens_blh, asked.tokens_blh, key_padding_mask=ignored_bl, need_weights=False
    )
    anchor_bw = asking.word_bw & readable_b1
    own_bw = torch.arange(anchor_bw.shape[1], device=anchor_bw.device).expand_as(anchor_bw)
    similarity_bww = cosines(asking.words_bwh, attended_bwh)
    return masked_ranking(similarity_bww, own_bw, anchor_bw[:, None], temperature=temperature)[anchor_bw]


def reduced(losses_n: Tensor, batch: int, reduction: Reduction) -> Tensor:
    """The losses of all anchors of a batch as one number: their mean, or the mean over sentence pairs of their sums."""
    return losses_n.sum() / (batch if reduction == "sum" else max(len(losses_n), 1))


class WordContrast(Objective):
    """Contrast each word's state with those of the words of its own translation.

    Args:
        max_length: Pieces kept of a sentence.
        kind: ``"hard"`` takes the translations of words from an aligner (MGC-HARD), ``"soft"`` from an attention over the
            other sentence that is learned and dropped after training (MGC-SOFT).
        temperature: Softmax temperature τ.
        mask_positives: For ``"hard"`` with links that are not one-to-one: let the other words that an anchor is linked to
            not compete.
        units: The state of a word is the ``"mean"`` of its pieces' or its ``"first"`` piece's.
        reduction: ``"token_mean"`` or the paper's ``"sum"`` (see :func:`hard_word_contrast`).

    Inputs: the columns ``source`` and ``target``; ``"hard"`` needs ``alignment``, best the mutual links (the
    intersection of both directions) of fast_align.

    Relations: ``wtr`` (WACSE) ranks the same candidates by pairwise similarities of pieces; :class:`SpanContrast` and
    :class:`SentenceContrast` are the coarser two of MGC's granularities.

    Reference: Li et al. 2021 (MGC), section 2.2, equations 2 to 5.
    """

    name: ClassVar[str] = "word-contrast"
    granularity: ClassVar[Granularity] = "word"
    reads_words: ClassVar[bool] = True
    citation: ClassVar[str] = MGC_CITATION

    def __init__(
        self,
        *,
        max_length: int = 32,
        kind: Kind = "hard",
        temperature: float = 0.1,
        mutual: bool = False,
        mask_positives: bool = False,
        units: Units = "mean",
        reduction: Reduction = "token_mean",
    ) -> None:
        super().__init__(max_length=max_length)
        if kind not in ("hard", "soft"):
            raise ValueError(f"Word contrasting is 'hard' or 'soft', not {kind!r}.")
        if units not in ("mean", "first"):
            raise ValueError(f"The state of a word is its pieces' 'mean' or its 'first' piece's, not {units!r}.")
        if reduction not in ("token_mean", "sum"):
            raise ValueError(f"A reduction is 'token_mean' or 'sum', not {reduction!r}.")
        self.kind: Kind = kind
        self.temperature = temperature
        self.mask_positives = mask_positives
        self.units: Units = units
        self.reduction: Reduction = reduction
        self.words: View = links_view(max_length, mutual=mutual) if kind == "hard" else WordPieces("words", max_length)

    def views(self) -> tuple[View, ...]:
        """Both sides and their words."""
        return source_view(self.max_length), target_view(self.max_length), self.words

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module | None:
        """The attention of ``"soft"``, with as many heads as the encoder's."""
        if self.kind == "hard":
            return None
        return nn.MultiheadAttention(
            config.hidden_size,
            config.num_attention_heads,
            dropout=getattr(config, "attention_probs_dropout_prob", 0.0),
            batch_first=True,
        )

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Scalar loss over the words of the batch."""
        features = encodings[self.words.name].features
        source, target = (
            word_states(encodings[side].tokens_blh, features[f"{side}_spans"], units=self.units)
            for side in ("source", "target")
        )
        settings: dict[str, Any] = {"temperature": self.temperature, "reduction": self.reduction}
        if self.kind == "soft":
            return soft_word_contrast(self.head, source, target, **settings)
        return hard_word_contrast(source, target, features["links"], mask_positives=self.mask_positives, **settings)
