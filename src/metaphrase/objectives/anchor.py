"""Anchor: stay where the original encoder was, so that what it knows of other languages is kept."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.frozen import frozen, token_states
from metaphrase.modeling.functional import mean_pooled
from metaphrase.modeling.views import View, source_view, target_view
from metaphrase.objectives.base import Granularity, HeadSources, Objective

Sides = Literal["target", "both"]


def anchor(embedding_bh: Tensor, original_bh: Tensor) -> Tensor:
    """Squared distance between embeddings and what they were, both at length 1: twice one minus their cosine.

    Args:
        embedding_bh: Sentence embeddings, shape ``(batch, hidden)``.
        original_bh: Those of the original encoder, shape ``(batch, hidden)``.

    Returns:
        Scalar between 0 and 4.

    >>> anchor(torch.eye(2), 3 * torch.eye(2)).item()
    0.0
    """
    wide = torch.promote_types(embedding_bh.dtype, torch.float32)
    difference_bh = F.normalize(embedding_bh.to(wide), dim=-1) - F.normalize(original_bh.to(wide), dim=-1)
    return difference_bh.pow(2).sum(dim=-1).mean()


class Anchor(Objective):
    """Keep sentence embeddings near those of the encoder that training started from.

    With English targets held in place, the other languages that were aligned with English stay aligned, and a new one is
    drawn to where English is. A copy of the encoder reads the sentences once more, without gradient; it shares frozen word
    embeddings, and is neither saved nor released.

    Args:
        max_length: Pieces kept of a sentence.
        sides: ``"target"``, or ``"both"`` where the source languages are to stay too.

    Inputs: the columns ``source`` and ``target``.

    Relations: Reimers & Gurevych 2020 hold a student's English to its teacher's by the mean squared error; here the teacher
    is the model's own past, and lengths do not count.

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

    def __init__(self, *, max_length: int = 32, sides: Sides = "target") -> None:
        super().__init__(max_length=max_length)
        if sides not in ("target", "both"):
            raise ValueError(f"'anchor' holds the sides 'target' or 'both', not {sides!r}.")
        self.sides = sides
        self.pooling = "cls"
        self._original: tuple[PreTrainedModel, ...] = ()  # in a tuple, so that it is no module of this one

    def views(self) -> tuple[View, ...]:
        """The sides that are held."""
        target = target_view(self.max_length)
        return (target,) if self.sides == "target" else (source_view(self.max_length), target)

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """None; but the copy must pool as the model does.

        Raises:
            ValueError: The model pools in another way than ``"cls"`` or ``"mean"``.
        """
        if sources.pooling not in ("cls", "mean"):
            raise ValueError(
                f"'anchor' pools by 'cls' or 'mean', but this encoder pools by {sources.pooling!r}. Load it with "
                "pooling='cls' or pooling='mean'."
            )
        return {}

    def fill_head(self, sources: HeadSources) -> None:
        """Copy the encoder; a table of word embeddings that is not trained is shared."""
        encoder, table = sources.encoder, sources.encoder.get_input_embeddings()
        shared = {} if table.weight.requires_grad else {id(table): table}
        self._original = (frozen(copy.deepcopy(encoder, shared)).eval(),)
        self.pooling = sources.pooling

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Scalar loss, averaged over the sides."""
        return torch.stack([self._distance(encodings[view.name]) for view in self.views()]).mean()

    def _distance(self, encoding: Encoding) -> Tensor:
        (original,) = self._original
        original.to(device=encoding.table_vh.device, dtype=encoding.table_vh.dtype)
        states_blh = token_states(original, encoding.ids_bl, encoding.mask_bl)
        pooled_bh = states_blh[:, 0] if self.pooling == "cls" else mean_pooled(states_blh, encoding.mask_bl)
        return anchor(encoding.sentence_bh, pooled_bh)
