"""MLM: masked language modelling of the sentences of a pair or of monolingual text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from metaphrase.io.arguments import Share
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.views import SIDES, UNSCORED, View, concatenated, masked_sentence
from metaphrase.objectives.base import Granularity, HeadSources, Objective, check_positions, pair_length
from metaphrase.objectives.vocabulary import FullVocabulary, Transform, VocabularyHead


def masked_language_modeling(
    head: VocabularyHead, tokens: Sequence[Tensor], labels: Sequence[Tensor], table_vh: Tensor
) -> Tensor:
    """Predict masked pieces; only the states at masked positions are projected.

    Args:
        head: Transform and vocabulary projection.
        tokens: States of the masked sequences of each view, shape ``(batch, length, hidden)``.
        labels: Masked pieces of each view, ``UNSCORED`` elsewhere, shape ``(batch, length)``.
        table_vh: The encoder's input embeddings, for tied heads.

    Returns:
        Scalar mean over the masked pieces of all views; a zero with a graph if no piece is masked.

    Reference: Devlin et al. 2019 (BERT), section 3.1; Conneau and Lample 2019 (XLM), section 3.3; Hu et al. 2021
    (AMBER), section 2, equation 1.
    """
    scored = [labels_bl != UNSCORED for labels_bl in labels]
    states_nh = torch.cat([tokens_blh[scored_bl] for tokens_blh, scored_bl in zip(tokens, scored, strict=True)])
    labels_n = torch.cat([labels_bl[scored_bl] for labels_bl, scored_bl in zip(labels, scored, strict=True)])
    return head(states_nh, labels_n, table_vh)


@dataclass(eq=False, repr=False, kw_only=True)
class MaskedPrediction(Objective):
    """Base class of objectives that predict masked pieces of their views with one head."""

    granularity: ClassVar[Granularity] = "token"

    vocabulary: FullVocabulary = "tied"
    transform: Transform = "auto"

    def longest_sequence(self, sources: HeadSources) -> int:
        """Return the number of positions of the longest sequence."""
        return self.max_length

    def head_settings(self, sources: HeadSources) -> dict[str, Any]:
        """Return the shape of the vocabulary head."""
        check_positions(sources, self.longest_sequence(sources), self.name)
        return {"vocabulary": VocabularyHead.settings(sources, self.vocabulary, self.transform)}

    def make_head(self, config: PreTrainedConfig, **settings: Any) -> nn.Module:
        """Build transform and vocabulary projection."""
        return VocabularyHead(config, **settings["vocabulary"])

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the loss over the masked pieces of all views."""
        read = [encodings[view.name] for view in self.views()]
        labels = [encoding.features["labels"] for encoding in read]
        return masked_language_modeling(self.head, [e.tokens_blh for e in read], labels, read[0].table_vh)


@dataclass(eq=False, repr=False, kw_only=True)
class MaskedLanguageModeling(MaskedPrediction):
    """Masked language modelling of sentences without their translations.

    Args:
        text: ``"pair"`` masks each sentence of the pair separately (PPA's ablation of TLM); ``"monolingual"`` masks the
            texts of the column ``monolingual``, two contiguous sentences in one sequence (AMBER, MGC).
        mask_rate: Share of the pieces to predict.
        vocabulary: ``"tied"`` or ``"untied"`` (see :class:`VocabularyHead`).
        transform: ``"auto"`` (pretrained, or new if the checkpoint has none) or ``"none"``.

    Inputs: the columns ``source`` and ``target``; for monolingual text the column ``monolingual``, a list of texts.

    Relations: :class:`TranslationLanguageModeling` masks a sentence and its translation in one sequence, and can predict
    monolingual text with the same head.

    Reference: Devlin et al. 2019 (BERT), section 3.1; Pan et al. 2021 (PPA), Table 5, "repl TLM w/ MLM"; Hu et al. 2021
    (AMBER), section 2, equation 1.
    """

    name: ClassVar[str] = "mlm"
    citation: ClassVar[str] = """\
@inproceedings{devlin-etal-2019-bert,
    title = "{BERT}: Pre-training of Deep Bidirectional Transformers for Language Understanding",
    author = "Devlin, Jacob and Chang, Ming-Wei and Lee, Kenton and Toutanova, Kristina",
    booktitle = "Proceedings of NAACL-HLT 2019",
    year = "2019",
}"""

    text: Literal["pair", "monolingual"] = "pair"
    mask_rate: Share = 0.15

    def views(self) -> tuple[View, ...]:
        """Return the masked sides or the masked monolingual texts."""
        if self.text == "pair":
            return tuple(masked_sentence(side, self.max_length, self.mask_rate) for side in SIDES)
        return (monolingual_view(self.max_length, self.mask_rate),)

    def longest_sequence(self, sources: HeadSources) -> int:
        """Return the number of positions of one sentence, or of two."""
        return self.max_length if self.text == "pair" else pair_length(sources, self.max_length)


def monolingual_view(max_length: int, mask_rate: float) -> View:
    """View of masked monolingual texts in the encoder's pair format, with continuous positions and two segments."""
    return concatenated(max_length, mask_rate, positions="continuous", layout="pair", segments=True, monolingual=True)
