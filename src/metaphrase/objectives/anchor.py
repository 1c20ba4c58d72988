"""Anchor: keep sentence embeddings close to those of the original encoder, to retain other languages."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.frozen import frozen, token_states
from metaphrase.modeling.functional import pooled
from metaphrase.modeling.views import View
from metaphrase.objectives.base import Granularity, HeadSources, Objective, check_pooling

Sides = Literal["target", "both"]


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
    wide = torch.promote_types(embedding_bh.dtype, torch.float32)
    difference_bh = F.normalize(embedding_bh.to(wide), dim=-1) - F.normalize(original_bh.to(wide), dim=-1)
    return difference_bh.pow(2).sum(dim=-1).mean()


@dataclass(eq=False, repr=False, kw_only=True)
class Anchor(Objective):
    """Keep sentence embeddings close to those of the encoder at the start of training.

    If English targets stay in place, languages aligned with English stay aligned, and a new language moves towards English.
    A copy of the encoder encodes the sentences a second time, without gradient. It shares frozen word embeddings and is
    neither saved nor released.

    Args:
        max_length: Maximum pieces per sentence.
        sides: ``"target"``, or ``"both"`` to keep the source languages in place too.

    Inputs: the columns ``source`` and ``target``.

    Relations: Reimers & Gurevych 2020 minimise the mean squared error between the English embeddings of student and teacher.
    Here the teacher is the initial model, and the length of embeddings is ignored.

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

    sides: Sides = "target"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pooling = "cls"
        self._original: tuple[PreTrainedModel, ...] = ()  # a tuple, so that it is not registered as a submodule

    def views(self) -> tuple[View, ...]:
        """Return the sides to keep in place."""
        return super().views()[1:] if self.sides == "target" else super().views()

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """Check the pooling of the model, which the copy must reproduce.

        Raises:
            ModelError: The pooling mode is not ``"cls"`` or ``"mean"``.
        """
        check_pooling(sources, self.name)
        return {}

    def fill_head(self, sources: HeadSources) -> None:
        """Copy the encoder and share its word embeddings if they are frozen."""
        encoder, table = sources.encoder, sources.encoder.get_input_embeddings()
        shared = {} if table.weight.requires_grad else {id(table): table}
        self._original = (frozen(copy.deepcopy(encoder, shared)).eval(),)
        self.pooling = sources.pooling

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the loss, averaged over the sides."""
        return torch.stack([self._distance(encodings[view.name]) for view in self.views()]).mean()

    def _distance(self, encoding: Encoding) -> Tensor:
        (original,) = self._original
        original.to(device=encoding.table_vh.device, dtype=encoding.table_vh.dtype)
        states_blh = token_states(original, encoding.ids_bl, encoding.mask_bl)
        return anchor(encoding.sentence_bh, pooled(states_blh, encoding.mask_bl, self.pooling))
