"""Similarity preservation: keep the similarities between sentences of one language, while languages move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from metaphrase.io.arguments import OwnTemperature, check_value
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.functional import cosines
from metaphrase.modeling.views import View
from metaphrase.objectives.base import Granularity, Objective, check_unused

Divergence = Literal["squared", "kl"]


def similarity_preservation(
    embedding_bh: Tensor,
    original_bh: Tensor,
    peer_bb: Tensor,
    *,
    divergence: Divergence = "squared",
    temperature: float = 0.05,
) -> Tensor:
    """Difference between the cosines of some sentences and those of the original encoder.

    ``"squared"`` is the mean of ``(cos_ij − cos⁰_ij)²`` over the pairs of peers. ``"kl"`` is the mean over sentences of
    ``KL(softmax_j(cos⁰_ij / τ) ‖ softmax_j(cos_ij / τ))``, where ``j`` are the peers of ``i``. Both are 0 if the embeddings
    are the original ones in other positions, after a rotation for example.

    Args:
        embedding_bh: Sentence embeddings, shape ``(batch, hidden)``.
        original_bh: Sentence embeddings of the original encoder, shape ``(batch, hidden)``.
        peer_bb: True where two sentences are compared, shape ``(batch, batch)``. A sentence is not its own peer.
        divergence: ``"squared"`` or ``"kl"``.
        temperature: Softmax temperature τ of ``"kl"``.

    Returns:
        Scalar of at least 0; without peers, a zero with a graph.

    >>> peers = ~torch.eye(3, dtype=torch.bool)
    >>> similarity_preservation(torch.eye(3), torch.eye(3)[[2, 0, 1]], peers).item()
    0.0
    """
    check_value(divergence, Divergence, "'divergence' of similarity_preservation")
    if not peer_bb.any():
        return embedding_bh.sum() * 0.0
    new_bb, old_bb = (cosines(one_bh, one_bh) for one_bh in (embedding_bh, original_bh))
    if divergence == "squared":
        return (new_bb - old_bb)[peer_bb].pow(2).mean()
    row_b = peer_bb.any(dim=1)
    new_rb, old_rb = (
        (cosine_bb[row_b] / temperature).masked_fill(~peer_bb[row_b], -torch.inf).log_softmax(dim=1)
        for cosine_bb in (new_bb, old_bb)
    )
    difference_rb = (old_rb - new_rb).masked_fill(~peer_bb[row_b], 0.0)
    return (old_rb.exp() * difference_rb).sum(dim=1).mean()


@dataclass(eq=False, repr=False, kw_only=True)
class SimilarityPreservation(Objective):
    """Keep the similarities between the sentences of each language as they are at the start of training.

    Only sentences of the same language and the same side are compared. Their positions are free, so a language can move
    towards another as a whole. A frozen copy of the model provides the original similarities; :class:`Anchor`, which fixes
    positions, reads the same copy.

    Args:
        sides: ``"source"``, ``"target"`` or ``"both"``.
        divergence: ``"squared"``: squared differences of cosines. ``"kl"``: Kullback–Leibler divergence of their softmax, in
            which the nearest neighbours of a sentence count most.
        temperature: Softmax temperature τ of ``"kl"``, or ``"auto"`` (see :class:`TranslationRanking`).
        gather: Compare the sentences of all processes, with gradient.

    Inputs: the columns ``source`` and ``target``, and their languages in ``source_lang`` and ``target_lang``. Without
    languages, all sentences of a side count as one language.

    Relations: Tung & Mori 2019 divide each row of dot products by its length and compare the results; here cosines are
    compared, within languages. ``"kl"`` is the similarity distribution of SEED (Fang et al. 2021) without its queue.

    Reference: Tung & Mori 2019, Similarity-Preserving Knowledge Distillation, section 3.1, equation 4; relational
    distillation in general: Park et al. 2019, section 3.
    """

    name: ClassVar[str] = "similarity-preservation"
    granularity: ClassVar[Granularity] = "sentence"
    any_tokenizer: ClassVar[bool] = True
    in_batch_negatives: ClassVar[bool] = True
    citation: ClassVar[str] = """\
@inproceedings{tung-mori-2019-similarity,
    title = "Similarity-Preserving Knowledge Distillation",
    author = "Tung, Frederick and Mori, Greg",
    booktitle = "Proceedings of ICCV 2019",
    year = "2019",
}"""
    reads_original = True
    truncatable = True

    sides: Literal["source", "target", "both"] = "both"
    divergence: Divergence = "squared"
    temperature: OwnTemperature = 0.05
    gather: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divergence == "squared":
            check_unused(self, ("temperature",), "divergence: kl")

    def views(self) -> tuple[View, ...]:
        """Return the sides that are read."""
        source, target = super().views()
        return {"source": (source,), "target": (target,)}.get(self.sides, (source, target))

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the loss, averaged over the sides."""
        return torch.stack([self._of_side(encodings[view.name]) for view in self.views()]).mean()

    def _of_side(self, encoding: Encoding) -> Tensor:
        parts = encoding.sentence_bh, self.original(encoding).sentence_bh, encoding.features["language"]
        new_bh, old_bh, language_b = map(self.gathered, parts)
        peer_bb = (language_b[:, None] == language_b).fill_diagonal_(False)
        return similarity_preservation(
            new_bh, old_bh, peer_bb, divergence=self.divergence, temperature=float(self.temperature)
        )
