"""Anchor: keep embeddings or token states close to those of the original encoder, to retain what it knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from metaphrase.exceptions import UsageError
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.functional import at_least_float32
from metaphrase.modeling.views import View
from metaphrase.objectives.base import Granularity, Objective

Sides = Literal["source", "target", "both", "interpolated"]


def anchor(embedding_bh: Tensor, original_bh: Tensor) -> Tensor:
    """Squared distance between normalised embeddings and the original ones: ``2 (1 − cosine)``.

    Args:
        embedding_bh: Sentence embeddings, shape ``(batch, hidden)``.
        original_bh: Sentence embeddings of the original encoder, shape ``(batch, hidden)``.

    Returns:
        Scalar between 0 and 4.

    >>> anchor(torch.eye(2), 3 * torch.eye(2)).item()
    0.0
    """
    return (_unit(embedding_bh) - _unit(original_bh)).pow(2).sum(dim=-1).mean()


def token_anchor(tokens_blh: Tensor, original_blh: Tensor, mask_bl: Tensor) -> Tensor:
    """:func:`anchor` of token states: the mean over the tokens of a sentence, then over sentences.

    Args:
        tokens_blh: Token states, shape ``(batch, length, hidden)``.
        original_blh: Token states of the original encoder, shape ``(batch, length, hidden)``.
        mask_bl: True at tokens, shape ``(batch, length)``.

    Returns:
        Scalar between 0 and 4.
    """
    distance_bl = (_unit(tokens_blh) - _unit(original_blh)).pow(2).sum(dim=-1).masked_fill(~mask_bl, 0.0)
    return (distance_bl.sum(dim=1) / mask_bl.sum(dim=1).clamp(min=1)).mean()


def interpolated_anchor(source_bh: Tensor, target_bh: Tensor, originals: tuple[Tensor, Tensor]) -> Tensor:
    """:func:`anchor` of the mean of the two normalised embeddings of a pair: the pair stays, its sides may meet.

    Args:
        source_bh: Embeddings of the source sentences, shape ``(batch, hidden)``.
        target_bh: Embeddings of the target sentences, shape ``(batch, hidden)``.
        originals: The same of the original encoder.

    Returns:
        Scalar between 0 and 4.
    """
    return anchor(_unit(source_bh) + _unit(target_bh), _unit(originals[0]) + _unit(originals[1]))


def _unit(tensor: Tensor) -> Tensor:
    return F.normalize(at_least_float32(tensor), dim=-1)


@dataclass(eq=False, repr=False, kw_only=True)
class Anchor(Objective):
    """Keep embeddings close to those of the encoder at the start of training.

    If English targets stay in place, languages aligned with English stay aligned, and a new language moves towards English.
    A frozen copy of the model encodes the sentences a second time. It shares frozen word embeddings and is neither saved nor
    released.

    Args:
        max_length: Maximum pieces per sentence.
        sides: ``"source"``, ``"target"`` or ``"both"``: the sentences that keep their places. ``"interpolated"``: the mean of
            the two embeddings of a pair keeps its place, so its sentences may approach each other.
        level: ``"sentence"``: sentence embeddings. ``"tokens"``: the states of all tokens, which taggers and question
            answering read.

    Inputs: the columns ``source`` and ``target``.

    Relations: Reimers & Gurevych 2020 minimise the mean squared error between the English embeddings of student and teacher.
    Here the teacher is the initial model, and the length of embeddings is ignored. ``"interpolated"`` is the frozen
    interpolation anchor of SALT.

    Raises:
        UsageError: Token states are to be interpolated; the tokens of two sentences do not correspond.

    Reference: Reimers & Gurevych 2020, Making Monolingual Sentence Embeddings Multilingual using Knowledge Distillation,
    section 2, equation 1, first term.
    """

    name: ClassVar[str] = "anchor"
    granularity: ClassVar[Granularity] = "sentence"
    citation: ClassVar[str] = """\
@inproceedings{reimers-gurevych-2020-making,
    title = "Making Monolingual Sentence Embeddings Multilingual using Knowledge Distillation",
    author = "Reimers, Nils and Gurevych, Iryna",
    booktitle = "Proceedings of EMNLP 2020",
    year = "2020",
}"""
    reads_original = True

    sides: Sides = "target"
    level: Literal["sentence", "tokens"] = "sentence"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.sides, self.level) == ("interpolated", "tokens"):
            raise UsageError(
                "'sides: interpolated' of 'anchor' averages the two embeddings of a pair, which 'level: tokens' does not "
                "have. Use 'level: sentence', or 'sides: both'."
            )

    def views(self) -> tuple[View, ...]:
        """Return the sides that are read."""
        source, target = super().views()
        return {"source": (source,), "target": (target,)}.get(self.sides, (source, target))

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the loss, averaged over the sides."""
        read = [encodings[view.name] for view in self.views()]
        pairs = [(encoding, self.original(encoding)) for encoding in read]
        if self.sides == "interpolated":
            (source, then_source), (target, then_target) = pairs
            originals = then_source.sentence_bh, then_target.sentence_bh
            return interpolated_anchor(source.sentence_bh, target.sentence_bh, originals)
        if self.level == "tokens":
            return torch.stack(
                [token_anchor(now.tokens_blh, then.tokens_blh, now.mask_bl) for now, then in pairs]
            ).mean()
        return torch.stack([anchor(now.sentence_bh, then.sentence_bh) for now, then in pairs]).mean()
