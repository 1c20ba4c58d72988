"""Span-level contrast, the middle one of the three granularities of MGC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from metaphrase.corpus.phrases import PhraseTable
from metaphrase.corpus.words import Span, Words, phrase_pairs
from metaphrase.exceptions import MissingFileError, UsageError
from metaphrase.io.arguments import Count, Length, Share, Temperature
from metaphrase.io.digests import files_sha256
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.functional import cosines, info_nce, pooled_spans
from metaphrase.modeling.views import SIDES, Batch, Example, Generators, View, kept_links, pad_arrays
from metaphrase.objectives.base import Granularity, Objective
from metaphrase.objectives.word_contrast import MGC_CITATION, Reduction, reduced


@dataclass(frozen=True)
class PhrasePairs(View):
    """The phrase pairs of each sentence pair, as positions in the views ``source`` and ``target``.

    A phrase pair is consistent with the alignment (see :func:`metaphrase.corpus.words.phrase_pairs`), has several words on at
    least one side, and no word with an empty span (see :meth:`metaphrase.modeling.views.Batch.words`). If a sentence pair
    has more than ``max_spans``, a sample is drawn. Provides ``source_spans`` and ``target_spans``, ``(batch, phrases, 2)``:
    first piece and exclusive end of each phrase, ``(0, 0)`` for padding. See :class:`SpanContrast` for the settings.
    """

    columns: ClassVar[tuple[str, ...]] = ("alignment",)
    max_length: Length
    max_words: Count = 7
    min_words: Count = 2
    max_spans: Count = 16
    phrase_table: str | None = None
    cut: Share = 0.0

    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Build the piece spans of the phrase pairs of each example."""
        source, target = (batch.words(side, self.max_length) for side in SIDES)
        rows = [self._drawn(*row) for row in zip(batch.examples, source, target, rngs, strict=True)]
        return {
            f"{side}_spans": pad_arrays([row_n22[:, i] for row_n22 in rows], (0, 2)) for i, side in enumerate(SIDES)
        }

    def _drawn(
        self, example: Example, source_w2: np.ndarray, target_w2: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Source and target span of each sampled phrase pair of an example, in pieces, shape ``(phrases, 2, 2)``."""
        # Phrases must be consistent with all links, including those of cut words.
        links = kept_links(example, np.ones_like(source_w2), np.ones_like(target_w2))
        pairs = [
            (source, target)
            for source, target in phrase_pairs([*links], len(source_w2), len(target_w2), max_length=self.max_words)
            if max(_length(source), _length(target)) >= self.min_words
            and source_w2[slice(*source), 1].all()
            and target_w2[slice(*target), 1].all()
        ]
        if self.phrase_table is not None:
            pairs = self._in_table(example, pairs)
        if len(pairs) > self.max_spans:
            pairs = [pairs[i] for i in sorted(rng.choice(len(pairs), self.max_spans, replace=False))]
        spans = [[_pieces(source_w2, source), _pieces(target_w2, target)] for source, target in pairs]
        return np.array(spans, dtype=np.int64).reshape(-1, 2, 2)

    def _in_table(self, example: Example, pairs: list[tuple[Span, Span]]) -> list[tuple[Span, Span]]:
        """Keep the phrase pairs that the phrase table contains with a sufficient score."""
        assert self.phrase_table is not None
        table = load_phrase_table(self.phrase_table)
        source_words, target_words = (list(Words.of_side(example, side)) for side in SIDES)
        scores = [table.score(source_words[slice(*source)], target_words[slice(*target)]) for source, target in pairs]
        return [pair for pair, score in zip(pairs, scores, strict=True) if score > 0 and score >= self.cut]


@cache
def load_phrase_table(path: str) -> PhraseTable:
    """Load a phrase table, once per process."""
    return PhraseTable.load(Path(path).expanduser())


def _length(span: Span) -> int:
    return span[1] - span[0]


def _pieces(spans_w2: np.ndarray, span: Span) -> list[int]:
    return [spans_w2[span[0], 0], spans_w2[span[1] - 1, 1]]


def span_contrast(
    source_bnh: Tensor,
    target_bnh: Tensor,
    source_spans_bn2: Tensor,
    target_spans_bn2: Tensor,
    *,
    temperature: float = 0.1,
    reduction: Reduction = "anchor_mean",
) -> Tensor:
    """Each phrase must identify its translation among the phrases of the other sentence that do not overlap with it.

    Args:
        source_bnh: Mean states of the source phrases, shape ``(batch, phrases, hidden)``.
        target_bnh: Mean states of the target phrases, row ``n`` translating source row ``n``.
        source_spans_bn2: First piece and exclusive end of each source phrase, ``(0, 0)`` for padding, shape
            ``(batch, phrases, 2)``.
        target_spans_bn2: The same for the target.
        temperature: Softmax temperature τ.
        reduction: ``"anchor_mean"`` is the mean over the anchors of the batch, the phrases of both sides; ``"sum"`` sums over
            the anchors of a sentence pair (as printed) and takes the mean over pairs.

    Returns:
        Scalar; a zero with a graph if there are no phrases.

    Reference: Li et al. 2021 (MGC), section 2.3, equation 6.
    """
    similarity_bnn = cosines(source_bnh, target_bnh)
    own_bn = torch.arange(similarity_bnn.shape[1], device=similarity_bnn.device).expand(similarity_bnn.shape[:2])
    anchor_bn = source_spans_bn2[..., 1] > 0
    losses = [
        info_nce(similarity, own_bn, negatives(spans_bn2), temperature=temperature)[anchor_bn]
        for similarity, spans_bn2 in ((similarity_bnn, target_spans_bn2), (similarity_bnn.mT, source_spans_bn2))
    ]
    return reduced(torch.cat(losses), len(source_bnh), reduction)


def negatives(spans_bn2: Tensor) -> Tensor:
    """Mask of the negatives of each span: the spans of the same sentence that do not overlap with it.

    Of equal spans, which may belong to several phrase pairs, only the first is a negative.

    Padding has the span ``(0, 0)``. Returns a boolean tensor, positives × candidates.

    >>> negatives(torch.tensor([[[1, 3], [2, 4], [4, 6], [4, 6], [0, 0]]]))[0].int().tolist()
    [[0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    """
    start_bn, end_bn = spans_bn2.unbind(-1)
    real_bn = end_bn > 0
    apart_bnn = (end_bn[:, :, None] <= start_bn[:, None]) | (end_bn[:, None] <= start_bn[:, :, None])
    equal_bnn = (spans_bn2[:, :, None] == spans_bn2[:, None]).all(dim=-1)
    repeated_bn = equal_bnn.tril(diagonal=-1).any(dim=-1)
    return apart_bnn & real_bn[:, :, None] & (real_bn & ~repeated_bn)[:, None]


@dataclass(eq=False, repr=False, kw_only=True)
class SpanContrast(Objective):
    """Contrast the mean state of each phrase with those of the phrases of its translation.

    Args:
        temperature: Softmax temperature τ.
        max_words: Maximum words of a phrase, on each side.
        min_words: Minimum words of the longer side of a phrase pair; 1 includes pairs of words, which
            :class:`WordContrast` contrasts.
        max_spans: Maximum phrase pairs per sentence pair; of more, a random sample is used.
        phrase_table: File of a phrase table (see :class:`metaphrase.corpus.phrases.PhraseTable`) to restrict phrase pairs
            to. None uses all phrase pairs that are consistent with the alignment.
        cut: Minimum of ``p(target | source) · p(source | target)`` in the phrase table.
        reduction: ``"anchor_mean"`` or the paper's ``"sum"`` (see :func:`span_contrast`).

    Inputs: the columns ``source``, ``target`` and ``alignment``.

    Relations: :class:`WordContrast` and :class:`SentenceContrast` are the other granularities of MGC.

    Reference: Li et al. 2021 (MGC), section 2.3, equation 6. The paper takes spans from a phrase table; here they are the
    phrase pairs from which such a table is counted.
    """

    name: ClassVar[str] = "span-contrast"
    granularity: ClassVar[Granularity] = "span"
    reads_words: ClassVar[bool] = True
    citation: ClassVar[str] = MGC_CITATION

    temperature: Temperature = 0.1
    max_words: Count = 7
    min_words: Count = 2
    max_spans: Count = 16
    phrase_table: str | None = None
    cut: Share = 0.0
    reduction: Reduction = "anchor_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_words > self.max_words:
            raise UsageError(f"'min_words' must be at most 'max_words', {self.max_words}, but is {self.min_words}.")
        if self.phrase_table is not None and not Path(self.phrase_table).expanduser().is_file():
            raise MissingFileError(f"The phrase table {self.phrase_table} ('phrase_table') does not exist.")
        if self.cut and self.phrase_table is None:
            raise UsageError(
                f"'cut' ({self.cut:g}) filters the phrases of a phrase table. Name one with 'phrase_table'."
            )
        limits = self.max_words, self.min_words, self.max_spans
        self.phrases = PhrasePairs("phrases", self.max_length, *limits, self.phrase_table, self.cut)

    def views(self) -> tuple[View, ...]:
        """Return both sides and their phrases."""
        return *super().views(), self.phrases

    def digests(self) -> dict[str, str]:
        """Digest of the phrase table, if there is one."""
        table = self.phrase_table
        return {} if table is None else {"phrase_table": files_sha256([Path(table).expanduser()])}

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the loss over the phrases of the batch."""
        features = encodings[self.phrases.name].features
        spans = [features["source_spans"], features["target_spans"]]
        states = [
            pooled_spans(encodings[side].tokens_blh, spans_bn2) for side, spans_bn2 in zip(SIDES, spans, strict=True)
        ]
        return span_contrast(*states, *spans, temperature=self.temperature, reduction=self.reduction)
