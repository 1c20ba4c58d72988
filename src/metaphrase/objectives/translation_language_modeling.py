"""TLM: translation language modelling, the token-level baseline of DAP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from transformers import PreTrainedConfig

from metaphrase.encoding import Encoding
from metaphrase.objectives.base import Granularity, HeadSources, Objective
from metaphrase.objectives.vocabulary import Transform, Vocabulary, VocabularyHead
from metaphrase.views import UNSCORED, View, concatenated


def masked_language_modeling(head: VocabularyHead, tokens_blh: Tensor, labels_bl: Tensor, table_vh: Tensor) -> Tensor:
    """Predict the pieces that were masked, from the states at their places only.

    Args:
        head: Transform and vocabulary projection.
        tokens_blh: States of the masked sequences, shape ``(batch, length, hidden)``.
        labels_bl: The masked pieces, ``UNSCORED`` elsewhere, shape ``(batch, length)``.
        table_vh: The encoder's input embeddings, for tied heads.

    Returns:
        Scalar mean over the masked pieces of the batch; a zero with a graph where none is masked.

    Reference: Devlin et al. 2019 (BERT), section 3.1; Conneau and Lample 2019 (XLM), section 3.3.
    """
    scored_bl = labels_bl != UNSCORED
    return head(tokens_blh[scored_bl], labels_bl[scored_bl], table_vh)


class TranslationLanguageModeling(Objective):
    """Masked language modelling over a sentence and its translation in one sequence.

    Args:
        max_length: Pieces kept of either side.
        mask_rate: Share of the pieces that is predicted (DAP's baseline: 0.2).
        positions: ``"reset"`` numbers the second sentence from 0 (XLM; DAP's baseline), ``"continuous"`` counts on.
        vocabulary: ``"tied"`` or ``"untied"`` (see :class:`VocabularyHead`).
        transform: ``"auto"`` (pretrained, or fresh where the checkpoint has none) or ``"none"``.

    Inputs: the columns ``source`` and ``target``.

    Reference: Conneau and Lample 2019 (XLM), section 3.3; Li et al. 2023 (DAP), section 4, as the baseline TR + TLM.
    """

    name: ClassVar[str] = "tlm"
    granularity: ClassVar[Granularity] = "token"
    citation: ClassVar[str] = """\
@inproceedings{conneau-lample-2019-cross,
    title = "Cross-lingual Language Model Pretraining",
    author = "Conneau, Alexis and Lample, Guillaume",
    booktitle = "Advances in Neural Information Processing Systems",
    volume = "32",
    year = "2019",
}"""

    def __init__(
        self,
        *,
        max_length: int = 32,
        mask_rate: float = 0.2,
        positions: Literal["reset", "continuous"] = "reset",
        vocabulary: Vocabulary = "tied",
        transform: Transform = "auto",
    ) -> None:
        super().__init__(max_length=max_length)
        if vocabulary == "english":
            raise ValueError("TLM predicts pieces of both sides; its vocabulary is 'tied' or 'untied', not 'english'.")
        self.view = concatenated(max_length, mask_rate, positions=positions)
        self.vocabulary: Vocabulary = vocabulary
        self.transform: Transform = transform

    def views(self) -> tuple[View, ...]:
        """The masked concatenation."""
        return (self.view,)

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """Shape of the vocabulary head."""
        return {"vocabulary": VocabularyHead.settings(sources, self.vocabulary, self.transform)}

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module:
        """Transform and vocabulary projection."""
        return VocabularyHead(config, **settings["vocabulary"])

    def fill_head(self, sources: HeadSources) -> None:
        """Copy the checkpoint's masked language modelling head, where it has one."""
        self.head.fill(sources)

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Scalar loss over the masked pieces."""
        pair = encodings[self.view.name]
        return masked_language_modeling(self.head, pair.tokens_blh, pair.features["labels"], pair.table_vh)
