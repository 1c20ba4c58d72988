"""WA: bidirectional word alignment, the word-level objective of AMBER."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from metaphrase.exceptions import ModelError
from metaphrase.io.arguments import Length
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.views import SIDES, Batch, Generators, Side, View, pad_rows, paired
from metaphrase.objectives.base import Granularity, HeadSources, Objective, check_positions, pair_length
from metaphrase.objectives.sentence_alignment import SentenceAlignment


def word_alignment(
    target_to_source_bell: Tensor, source_to_target_bell: Tensor, source_bl: Tensor, target_bl: Tensor
) -> Tensor:
    """Disagreement of the attention of the two directions.

    ``1 − 1/H Σ_h tr(A_yx A_xy) / min(|x|, |y|)``, averaged over the pairs, between 0 and 1. It is 0 if both directions attend
    only along the same one-to-one links, which cover the shorter sentence.

    Args:
        target_to_source_bell: Attention probabilities of the heads (``e``) in the pass y→x over the concatenated pair, shape
            ``(batch, heads, length, length)``. Row ``i`` is the attention of position ``i``.
        source_to_target_bell: The same for the pass x→y.
        source_bl: True at the pieces of ``x``, shape ``(batch, length)``.
        target_bl: True at the pieces of ``y``, shape ``(batch, length)``.

    Returns:
        Scalar mean over the pairs with pieces on both sides; a zero with a graph if there are none.

    Reference: Hu et al. 2021 (AMBER), section 2, equation 8.
    """
    agreement_bll = (target_to_source_bell * source_to_target_bell.transpose(-1, -2)).mean(dim=1)
    links_bll = target_bl[:, :, None] & source_bl[:, None, :]
    trace_b = agreement_bll.masked_fill(~links_bll, 0.0).sum(dim=(1, 2))
    shorter_b = torch.minimum(source_bl.sum(dim=1), target_bl.sum(dim=1))
    counts_b = shorter_b > 0
    loss_b = (1 - trace_b / shorter_b.clamp(min=1)) * counts_b
    return loss_b.sum() / counts_b.sum().clamp(min=1)


@dataclass(frozen=True)
class PrefixedPair(View):
    """An unmasked pair in the encoder's pair format with a prefix mask.

    The tokens of one sentence, the prefix, attend to this sentence only. Those of the other, the reader, attend to the prefix
    and to the preceding tokens of their own sentence. Positions are continuous, and the second sentence has token type 1 if
    the encoder has one. The first special token belongs to the source, a separator to the sentence that it ends (the second
    of XLM-R's separators in the middle belongs to the target). Also provides ``piece``, 1 at the pieces of sentences and 0 at
    special tokens and padding, ``(batch, length)``.

    If ``strict``, the tokens of the reader do not attend to themselves.
    """

    max_length: Length
    reader: Side
    strict: bool

    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Build ids, positions, token types and the attention mask."""
        sources, targets = (batch.pieces(side, self.max_length) for side in SIDES)
        pairs = [(source, paired(target, batch.tokenizer)) for source, target in zip(sources, targets, strict=True)]
        ids = [source + target for source, target in pairs]
        specials = (batch.tokenizer.cls_token_id, batch.tokenizer.sep_token_id)
        features = pad_rows(
            batch.tokenizer,
            input_ids=ids,
            position_ids=[range(len(row)) for row in ids],
            token_type_ids=[[0] * len(source) + [1] * len(target) for source, target in pairs],
            piece=[~np.isin(row, specials) for row in ids],
        )
        source_bl, target_bl = sides(features)
        reader_bl, read_bl = (target_bl, source_bl) if self.reader == "target" else (source_bl, target_bl)
        before_ll = torch.ones(source_bl.shape[1], source_bl.shape[1], dtype=torch.bool).tril(-1 if self.strict else 0)
        seen_bll = read_bl[:, None, :] | (reader_bl[:, :, None] & reader_bl[:, None, :] & before_ll)
        return {**features, "visible": seen_bll & (source_bl | target_bl)[:, :, None]}


def sides(features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Masks of source and target of a pair, including special tokens, each of shape ``(batch, length)``."""
    real_bl, second_bl = features["attention_mask"].bool(), features["token_type_ids"].bool()
    return real_bl & ~second_bl, second_bl


@dataclass(eq=False, repr=False, kw_only=True)
class WordAlignment(Objective):
    """The attention of a sentence to its translation must agree with that of the translation to the sentence.

    The same encoder encodes the pair twice. In the pass y→x, the source sees itself only, and each target token sees the
    source and the preceding target tokens, as in a decoder; in the pass x→y, the roles are swapped. The matrices are the
    attention probabilities of each head of the top layer, before dropout. Equation 7 as printed, a dot product of states
    without a head index, is neither normalised nor the quantity that equation 8 averages.

    Args:
        max_length: Maximum pieces per side.
        strict: Whether a token sees preceding tokens only, as printed (``y_<i``), or also itself.
        exclude_specials: Whether trace and lengths ignore special tokens. Otherwise, special tokens that attend to each
            other are rewarded like words. They can be attended to in both cases.

    Inputs: the columns ``source`` and ``target``.

    Relations: The consistency loss of awesome-align computes both matrices from dot products of separately encoded states.

    Reference: Hu et al. 2021 (AMBER), section 2, equations 4 to 8, and appendix A.2.
    """

    name: ClassVar[str] = "wa"
    granularity: ClassVar[Granularity] = "word"
    citation: ClassVar[str] = SentenceAlignment.citation

    strict: bool = True
    exclude_specials: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = "strict" if self.strict else "inclusive"
        self.target_to_source = PrefixedPair(f"target-to-source-{kind}", self.max_length, "target", self.strict)
        self.source_to_target = PrefixedPair(f"source-to-target-{kind}", self.max_length, "source", self.strict)

    def views(self) -> tuple[View, ...]:
        """Return the passes y→x and x→y."""
        return self.target_to_source, self.source_to_target

    def attach(self, sources: HeadSources) -> None:
        """Check that the encoder supports the passes.

        Raises:
            ModelError: The attention of the encoder cannot be masked and read, or is causal, or the encoder has too few
                positions or too small a window for the pairs.
        """
        super().attach(sources)
        if not sources.encoder.is_backend_compatible():
            raise ModelError(
                f"'wa' reads the attention of the encoder, but {type(sources.encoder).__name__} does not support "
                "the attention interface of transformers. Use an encoder of the BERT or XLM-R family, or remove 'wa'."
            )
        if any(getattr(module, "is_causal", False) for module in sources.encoder.modules()):
            raise ModelError(
                "'wa' trains the attention of each sentence to all of its translation, but tokens of "
                f"{type(sources.encoder).__name__} only attend to preceding ones. Use an encoder of the BERT or XLM-R "
                "family, or remove 'wa'."
            )
        longest = pair_length(sources, self.max_length)
        check_positions(sources, longest, self.name)
        if (window := getattr(sources.encoder.config, "sliding_window", None)) and longest > window:
            raise ModelError(
                f"'wa' needs attention between all tokens of a pair of {longest} pieces, but layers of "
                f"{type(sources.encoder).__name__} only attend to {window} pieces on each side. Lower max_length "
                f"({self.max_length}), or use an encoder of the BERT or XLM-R family."
            )

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the loss."""
        backward, forward = (encodings[view.name] for view in self.views())
        source_bl, target_bl = sides(backward.features)
        if self.exclude_specials:
            piece_bl = backward.features["piece"].bool()
            source_bl, target_bl = source_bl & piece_bl, target_bl & piece_bl
        return word_alignment(backward.attention_bell, forward.attention_bell, source_bl, target_bl)
