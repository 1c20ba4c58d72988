"""AWP: aligned word prediction, the first word-level half of WACSE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from metaphrase.io.arguments import Length, Rate
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.views import (
    SIDES,
    UNSCORED,
    Batch,
    Generators,
    Side,
    View,
    best_partners,
    kept_links,
    languages_of,
    own_stream,
    pad_rows,
)
from metaphrase.objectives.base import Granularity
from metaphrase.objectives.masked_language_modeling import MaskedPrediction, masked_language_modeling
from metaphrase.objectives.vocabulary import VocabularyHead


@dataclass(frozen=True)
class MaskedWords(View):
    """One side of the pairs with its linked words masked; ``labels`` are the pieces of their translations.

    All pieces of a linked word are masked. The first ``min(p, q)`` of them are labelled, where ``p`` and ``q`` are the
    numbers of pieces of the word and of its partner. Also provides the ``language`` of each text.

    ``max_mask_ratio`` is the maximum share of a sentence's pieces to mask. Words are drawn at random, independently of
    the other side; words with more pieces than the remaining budget are skipped.
    """

    columns: ClassVar[tuple[str, ...]] = ("alignment",)
    side: Side
    max_length: Length
    max_mask_ratio: Rate = 1.0

    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Build masked ids, labels, and the language of each text."""
        ids = {side: batch.pieces(side, self.max_length) for side in SIDES}
        spans = {side: batch.words(side, self.max_length) for side in SIDES}
        other: Side = "target" if self.side == "source" else "source"
        rows: dict[str, list[Any]] = {"input_ids": [], "labels": []}
        for row, (example, rng) in enumerate(zip(batch.examples, rngs, strict=True)):
            links = kept_links(example, spans["source"][row], spans["target"][row])
            if self.side == "target":
                links = {(y, x): score for (x, y), score in links.items()}
            partners = best_partners([*links], [*links.values()])
            masked_l, spans_w2 = np.array(ids[self.side][row]), spans[self.side][row]
            other_ids, other_spans_w2 = ids[other][row], spans[other][row]
            if self.max_mask_ratio < 1:
                room = self.max_mask_ratio * (len(masked_l) - batch.tokenizer.num_special_tokens_to_add())
                drawn = _draw_words(partners, spans_w2, room, own_stream(rng, self.name))
                partners = {word: partners[word] for word in drawn}
            labels_l = np.full(len(masked_l), UNSCORED)
            for word, partner in partners.items():
                start, end = spans_w2[word]
                translation = other_ids[slice(*other_spans_w2[partner])][: end - start]
                masked_l[start:end] = batch.tokenizer.mask_token_id
                labels_l[start : start + len(translation)] = translation
            rows["input_ids"].append(masked_l)
            rows["labels"].append(labels_l)
        return {**pad_rows(batch.tokenizer, **rows), "language": languages_of(batch.examples, self.side)}


def _draw_words(words: Iterable[int], spans_w2: np.ndarray, room: float, rng: np.random.Generator) -> list[int]:
    """Draw words in random order, skipping those with more pieces than the remaining budget."""
    drawn = []
    for word in rng.permutation(np.array(list(words), dtype=np.int64)).tolist():
        pieces = int(spans_w2[word, 1] - spans_w2[word, 0])
        if pieces <= room:
            drawn.append(word)
            room -= pieces
    return drawn


def aligned_word_prediction(
    head: VocabularyHead,
    source_bsh: Tensor,
    target_bth: Tensor,
    source_labels_bs: Tensor,
    target_labels_bt: Tensor,
    table_vh: Tensor,
    *,
    reduction: Literal["token_mean", "sum"] = "token_mean",
) -> Tensor:
    """Predict the pieces of a word's translation at the positions of the masked word, on both sides.

    Args:
        head: Transform and vocabulary projection.
        source_bsh: States of the source sentences with masked words, shape ``(batch, source, hidden)``.
        target_bth: States of the target sentences with masked words, shape ``(batch, target, hidden)``.
        source_labels_bs: Target pieces at masked source positions, ``UNSCORED`` elsewhere, shape ``(batch, source)``.
        target_labels_bt: Source pieces at masked target positions, shape ``(batch, target)``.
        table_vh: The encoder's input embeddings, for tied heads.
        reduction: ``"token_mean"`` is the mean over the labelled pieces of the batch, both sides together; ``"sum"`` is
            equation 5 as printed, their sum divided by ``2 · batch``.

    Returns:
        Scalar; a zero with a graph if no word is linked.

    Reference: Miao et al. 2024 (WACSE), section 3.1, equations 4 and 5.
    """
    labels = [source_labels_bs, target_labels_bt]
    loss = masked_language_modeling(head, [source_bsh, target_bth], labels, table_vh)
    if reduction == "sum":
        loss = loss * sum((side != UNSCORED).sum() for side in labels) / (2 * len(source_bsh))
    return loss


@dataclass(eq=False, repr=False, kw_only=True)
class AlignedWordPrediction(MaskedPrediction):
    """Mask linked words and predict their translations at the same positions.

    All linked words of a sentence are masked together, in one pass per side; equation 4 as printed needs one pass per word.

    Args:
        reduction: ``"token_mean"``, or ``"sum"``, the printed sum over words, which weights a sentence by its links.
        max_mask_ratio: Maximum share of a sentence's pieces to mask (the paper has no maximum). If nearly all words are
            linked, a lower value leaves context to predict from.
        vocabulary: ``"tied"`` or ``"untied"`` (see :class:`VocabularyHead`).
        transform: ``"auto"`` (pretrained, or new if the checkpoint has none) or ``"none"``.

    Inputs: the columns ``source``, ``target`` and ``alignment``; ``alignment_scores`` if words have several links.

    Relations: :class:`WordTranslationRanking` aligns the states of the same links without a vocabulary;
    :class:`TranslationLanguageModeling` predicts the masked pieces themselves, with the translation visible.

    Reference: Miao et al. 2024 (WACSE), section 3.1, equations 4 and 5.
    """

    name: ClassVar[str] = "awp"
    granularity: ClassVar[Granularity] = "word"
    reads_words: ClassVar[bool] = True
    citation: ClassVar[str] = """\
@inproceedings{miao-etal-2024-enhancing,
    title = "Enhancing Cross-lingual Sentence Embedding for Low-resource Languages with Word Alignment",
    author = "Miao, Zhongtao and Wu, Qiyu and Zhao, Kaiyan and Wu, Zilong and Tsuruoka, Yoshimasa",
    booktitle = "Findings of the Association for Computational Linguistics: NAACL 2024",
    year = "2024",
}"""

    reduction: Literal["token_mean", "sum"] = "token_mean"
    max_mask_ratio: Rate = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ratio = self.max_mask_ratio
        self.sides = tuple(
            MaskedWords(f"masked-words-{side}-{ratio:g}", side, self.max_length, ratio) for side in SIDES
        )

    def views(self) -> tuple[View, ...]:
        """Return both sides with masked words."""
        return self.sides

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the loss over the labelled pieces."""
        source, target = (encodings[view.name] for view in self.sides)
        return aligned_word_prediction(
            self.head,
            source.tokens_blh,
            target.tokens_blh,
            source.features["labels"],
            target.features["labels"],
            source.table_vh,
            reduction=self.reduction,
        )
