"""SA: sentence alignment, the sentence-level objective of AMBER."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.functional import mean_pooled, translation_ranking
from metaphrase.modeling.views import SIDES
from metaphrase.objectives.base import Granularity, HeadSources, Objective

logger = logging.getLogger(__name__)

Candidates = Literal["targets", "both"]


def sentence_alignment(
    source_bh: Tensor, target_bh: Tensor, *, candidates_ph: Tensor | None = None, offset: int = 0
) -> Tensor:
    """Each source must identify its translation by an unnormalised dot product.

    ``-log exp(c_x · c_y) / Σ_y' exp(c_x · c_y')``, averaged over the batch. Computed in float32 or wider, because the
    products grow with the squared length of the embeddings.

    Args:
        source_bh: Embeddings ``c_x``, shape ``(batch, hidden)``.
        target_bh: Embeddings of the targets, shape ``(pool, hidden)``; row ``offset + i`` translates source row ``i``.
        candidates_ph: All sources, in the order of the targets, as additional candidates, shape ``(pool, hidden)``. Row
            ``offset + i`` is source ``i`` itself and excluded from its own candidates. None ranks the targets only.
        offset: Position in the pool of the translation of the first source.

    Returns:
        Scalar loss.

    Reference: Hu et al. 2021 (AMBER), section 2, equations 2 and 3.

    >>> sentence_alignment(torch.eye(2) * 10, torch.eye(2) * 10).item() < 1e-6
    True
    """
    itself_bp = None
    if candidates_ph is not None:
        place_p = torch.arange(len(target_bh) + len(candidates_ph), device=target_bh.device)
        itself_b = torch.arange(len(source_bh), device=target_bh.device) + offset + len(target_bh)
        itself_bp = place_p == itself_b[:, None]
        target_bh = torch.cat([target_bh, candidates_ph])
    return translation_ranking(
        source_bh, target_bh, temperature=1.0, similarity="dot", duplicate_bp=itself_bp, offset=offset
    )


@dataclass(eq=False, repr=False, kw_only=True)
class SentenceAlignment(Objective):
    """Each source sentence must identify its translation in the batch by the mean of its token states.

    The embedding is this mean, regardless of the pooling of the model, so the model should use mean pooling.

    Args:
        exclude_specials: Exclude special tokens from the mean, which mean pooling includes.
        candidates: ``"targets"``: the targets of the batch. ``"both"``: also its sources, except the query (the paper allows
            "any sentence in any language").
        gather: Rank against the sentences of all processes, with gradient.

    Inputs: the columns ``source`` and ``target``.

    Relations: :class:`TranslationRanking` with ``similarity="dot"`` and ``temperature=1`` is the same ranking of the model's
    sentence embeddings.

    Reference: Hu et al. 2021 (AMBER), section 2, equations 2 and 3.
    """

    name: ClassVar[str] = "sa"
    granularity: ClassVar[Granularity] = "sentence"
    in_batch_negatives: ClassVar[bool] = True
    citation: ClassVar[str] = """\
@inproceedings{hu-etal-2021-explicit,
    title = "Explicit Alignment Objectives for Multilingual Bidirectional Encoders",
    author = "Hu, Junjie and Johnson, Melvin and Firat, Orhan and Siddhant, Aditya and Neubig, Graham",
    booktitle = "Proceedings of NAACL 2021",
    year = "2021",
}"""

    exclude_specials: bool = False
    candidates: Candidates = "targets"
    gather: bool = True

    def attach(self, sources: HeadSources) -> None:
        """Warn if the pooling of the model is not the mean that the objective trains."""
        super().attach(sources)
        if sources.pooling != "mean":
            logger.warning(
                "'sa' trains the mean of the token states, but this model uses %r pooling. Use mean pooling "
                "(`--pooling mean`).",
                sources.pooling,
            )

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the ranking loss."""
        source_bh, target_bh = (self._embed(encodings[side]) for side in SIDES)
        pool_ph = self.gathered(target_bh)
        offset = self.offset(len(source_bh), len(pool_ph))
        candidates_ph = self.gathered(source_bh) if self.candidates == "both" else None
        return sentence_alignment(source_bh, pool_ph, candidates_ph=candidates_ph, offset=offset)

    def _embed(self, sentence: Encoding) -> Tensor:
        mask_bl = sentence.mask_bl
        if self.exclude_specials:  # the first and the last token are special
            mask_bl = F.pad(mask_bl[:, 2:], (1, 1))
        return mean_pooled(sentence.tokens_blh, mask_bl)
