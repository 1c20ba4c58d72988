"""WA: bidirectional word alignment, the word-level half of AMBER."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from metaphrase.modeling.attention import can_observe
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.views import Example, Side, View, pad_rows, paired
from metaphrase.objectives.base import Granularity, HeadSources, Objective, check_positions, pair_length


def word_alignment(
    target_to_source_bell: Tensor, source_to_target_bell: Tensor, source_bl: Tensor, target_bl: Tensor
) -> Tensor:
    """How far the attention of the two directions is from one alignment.

    ``1 − 1/H Σ_h tr(A_yx A_xy) / min(|x|, |y|)``, averaged over the pairs. It lies in [0, 1]; 0 means that both directions
    put all of their attention on the same one-to-one links.

    Args:
        target_to_source_bell: Attention probabilities of the heads (``e``) in the pass y→x over the concatenated pair:
            row ``i`` says what position ``i`` attends to. Shape ``(batch, heads, length, length)``.
        source_to_target_bell: Those of the pass x→y over the same positions.
        source_bl: True at the pieces of ``x``, shape ``(batch, length)``.
        target_bl: True at the pieces of ``y``, shape ``(batch, length)``.

    Returns:
        Scalar mean over the pairs that have pieces on both sides; a zero with a graph where there are none.

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
    """A pair in the encoder's own form, unmasked; one sentence sees itself alone, the other all that it has read so far.

    Positions count on, the second sentence is segment 1 where the encoder has one. The first special token belongs to the
    source, a separator to the sentence that it ends (XLM-R's second separator in the middle: to the target). Beside the
    encoder's inputs it gives ``piece``, 1 at the pieces of a sentence and 0 at specials and padding, ``(batch, length)``.

    Attributes:
        max_length: Pieces kept of either side, its special tokens included.
        reader: The side that reads: its tokens see the whole other sentence and those of their own before them.
        strict: They do not see themselves.
    """

    max_length: int
    reader: Side
    strict: bool

    def build(
        self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, rngs: Sequence[np.random.Generator]
    ) -> dict[str, Tensor]:
        """Ids, positions, segments, and what each position sees."""
        sources, targets = (
            tokenizer([example[side] for example in examples], truncation=True, max_length=self.max_length)[
                "input_ids"
            ]
            for side in ("source", "target")
        )
        pairs = [(source, paired(target, tokenizer)) for source, target in zip(sources, targets, strict=True)]
        ids = [source + target for source, target in pairs]
        specials = (tokenizer.cls_token_id, tokenizer.sep_token_id)
        features = pad_rows(
            tokenizer,
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
    """Where source and target of a pair stand, specials included, each of shape ``(batch, length)``."""
    real_bl, second_bl = features["attention_mask"].bool(), features["token_type_ids"].bool()
    return real_bl & ~second_bl, second_bl


class WordAlignment(Objective):
    """The attention of a sentence to its translation and that of the translation to the sentence must agree.

    The pair is encoded twice by the same encoder. In the pass y→x the source sees itself alone, and each target token sees
    the source and the target tokens before it, as a decoder does; in the pass x→y the two change places. What is compared
    is the attention probability of each head of the top layer, before dropout: equation 7 as printed, a dot product of
    states without a head, is neither normalised nor what equation 8 averages.

    Args:
        max_length: Pieces kept of either side.
        strict: A token sees those before it, as printed (``y_<i``); false lets it see itself too.
        exclude_specials: Trace and lengths count the pieces of the sentences alone. Otherwise special tokens that attend
            to each other are paid like words. They can be attended to either way.

    Inputs: the columns ``source`` and ``target``.

    Relations: awesome-align's consistency loss takes both matrices from dot products of separately encoded states.

    Reference: Hu et al. 2021 (AMBER), section 2, equations 4 to 8, and appendix A.2.
    """

    name: ClassVar[str] = "wa"
    granularity: ClassVar[Granularity] = "word"
    citation: ClassVar[str] = """\
@inproceedings{hu-etal-2021-explicit,
    title = "Explicit Alignment Objectives for Multilingual Bidirectional Encoders",
    author = "Hu, Junjie and Johnson, Melvin and Firat, Orhan and Siddhant, Aditya and Neubig, Graham",
    booktitle = "Proceedings of NAACL 2021",
    year = "2021",
}"""

    def __init__(self, *, max_length: int = 32, strict: bool = True, exclude_specials: bool = True) -> None:
        super().__init__(max_length=max_length)
        self.exclude_specials = exclude_specials
        kind = "strict" if strict else "inclusive"
        self.target_to_source = PrefixedPair(f"target-to-source-{kind}", max_length, "target", strict)
        self.source_to_target = PrefixedPair(f"source-to-target-{kind}", max_length, "source", strict)

    def views(self) -> tuple[View, ...]:
        """The passes y→x and x→y."""
        return self.target_to_source, self.source_to_target

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """None; it refuses encoders that cannot run the passes.

        Raises:
            ValueError: The encoder's attention cannot be masked and read, or the pairs are longer than its positions.
        """
        if not can_observe(sources.encoder):
            raise ValueError(
                f"'wa' reads what the encoder attends to, but {type(sources.encoder).__name__} does not attend through "
                "transformers' attention interface. Use an encoder of the BERT or XLM-R family, or leave 'wa' out."
            )
        check_positions(sources, pair_length(sources, self.max_length), self.name)
        return {}

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Scalar loss."""
        backward, forward = (encodings[view.name] for view in self.views())
        source_bl, target_bl = sides(backward.features)
        if self.exclude_specials:
            piece_bl = backward.features["piece"].bool()
            source_bl, target_bl = source_bl & piece_bl, target_bl & piece_bl
        return word_alignment(backward.attention_bell, forward.attention_bell, source_bl, target_bl)
