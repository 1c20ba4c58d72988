"""TR: translation ranking, the sentence-level objective of DAP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from metaphrase.io.arguments import Range, Temperature
from metaphrase.modeling import functional
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.functional import Direction, Similarity, gather_with_gradient
from metaphrase.objectives.base import Granularity, Objective


@dataclass(eq=False, repr=False, kw_only=True)
class TranslationRanking(Objective):
    """Each sentence must identify its translation in the batch.

    Args:
        max_length: Maximum pieces per sentence.
        temperature: Softmax temperature τ.
        margin: Additive margin in units of the similarity (LaBSE: 0.3).
        direction: ``"source_to_target"`` (DAP), ``"target_to_source"`` or ``"symmetric"``.
        similarity: ``"cosine"`` (the released code) or ``"dot"`` (the paper's equation).
        mask_duplicates: Exclude pairs that share a side with the ranked one from the denominator: other copies of a
            sentence are not negatives.
        gather: Rank against the sentences of all processes, with gradient.
        projection: ``"none"``, or ``"mlp"``: rank ``tanh(W h + b)`` in training and discard the projection afterwards, as
            in the released code.

    Inputs: the columns ``source`` and ``target``.

    Relations: ``MultipleNegativesRankingLoss`` of sentence-transformers is the same ranking with ``scale = 1 / τ``; LaBSE
    adds the margin; the released DAP code gathers negatives without gradient.

    Reference: Li et al. 2023 (DAP), section 3.2, equation 5.
    """

    name: ClassVar[str] = "tr"
    granularity: ClassVar[Granularity] = "sentence"
    in_batch_negatives: ClassVar[bool] = True
    citation: ClassVar[str] = """\
@inproceedings{li-etal-2023-dual,
    title = "Dual-Alignment Pre-training for Cross-lingual Sentence Embedding",
    author = "Li, Ziheng and Huang, Shaohan and Zhang, Zihan and Deng, Zhi-Hong and Lou, Qiang and Huang, Haizhen
        and Jiao, Jian and Wei, Furu and Deng, Weiwei and Zhang, Qi",
    booktitle = "Proceedings of ACL 2023",
    year = "2023",
}"""

    temperature: Temperature = 0.05
    margin: Annotated[float, Range(0, 1000)] = 0.0
    direction: Direction = "source_to_target"
    similarity: Similarity = "cosine"
    mask_duplicates: bool = False
    gather: bool = True
    projection: Literal["none", "mlp"] = "none"

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module | None:
        """Build the projection, which is not part of a release, or None."""
        if self.projection == "none":
            return None
        return nn.Sequential(nn.Linear(config.hidden_size, config.hidden_size), nn.Tanh())

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the ranking loss."""
        source, target = encodings["source"], encodings["target"]
        source_bh, target_bh = source.sentence_bh, target.sentence_bh
        if self.head is not None:
            source_bh, target_bh = self.head(source_bh), self.head(target_bh)
        gather = gather_with_gradient if self.gather else lambda tensor: tensor
        pools = {"source": gather(source_bh), "target": gather(target_bh)}
        offset = dist.get_rank() * len(source_bh) if len(pools["source"]) > len(source_bh) else 0
        duplicate_bb = self._duplicates(source, target) if self.mask_duplicates else None
        directions = {
            "source_to_target": (source_bh, pools["target"]),
            "target_to_source": (target_bh, pools["source"]),
        }
        selected = directions if self.direction == "symmetric" else [self.direction]
        losses = [
            functional.translation_ranking(
                *directions[direction],
                temperature=self.temperature,
                margin=self.margin,
                similarity=self.similarity,
                duplicate_bb=duplicate_bb,
                offset=offset,
            )
            for direction in selected
        ]
        return torch.stack(losses).mean()

    def _duplicates(self, source: Encoding, target: Encoding) -> Tensor:
        """Mask of the pairs of the pool that share a side with a pair of this batch, shape ``(batch, pool)``."""
        gather = gather_with_gradient if self.gather else lambda tensor: tensor
        same = [side[:, None] == gather(side)[None, :] for side in (source.features["text"], target.features["text"])]
        return same[0] | same[1]
