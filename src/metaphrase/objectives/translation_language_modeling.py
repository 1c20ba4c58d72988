"""TLM: translation language modelling, an objective of PPA, AMBER and MGC and the token-level baseline of DAP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from metaphrase.encoders.positions import reads_positions
from metaphrase.io.arguments import Share
from metaphrase.modeling.views import View, concatenated
from metaphrase.objectives.base import HeadSources, pair_length, warn_unread_positions
from metaphrase.objectives.masked_language_modeling import MaskedPrediction


@dataclass(eq=False, repr=False, kw_only=True)
class TranslationLanguageModeling(MaskedPrediction):
    """Masked language modelling over a sentence and its translation in one sequence.

    Args:
        max_length: Maximum pieces per side.
        mask_rate: Share of the pieces to predict (DAP's baseline: 0.2; PPA, AMBER: 0.15).
        positions: ``"reset"`` restarts the positions of the second sentence at 0 (XLM; DAP's baseline), ``"continuous"``
            does not (PPA, AMBER). Encoders that read no position ids, such as mDeBERTa, ignore ``"reset"`` with a warning.
        layout: ``"sequences"`` concatenates the encoded sentences (DAP's baseline), ``"pair"`` is the pair format of the
            encoder (PPA, AMBER).
        segments: Assign token type 1 to the second sentence, if the encoder has one (PPA, AMBER).
        order: ``"pair"`` is source, target; ``"shuffled"`` swaps the two in half of the pairs (PPA).
        monolingual: Also predict masked pieces of the column ``monolingual``, with the same head and format. The loss is
            the mean over the pieces of both (AMBER's ℓ_MLM over monolingual and parallel text).
        vocabulary: ``"tied"`` or ``"untied"`` (see :class:`VocabularyHead`).
        transform: ``"auto"`` (pretrained, or new if the checkpoint has none) or ``"none"``.

    Inputs: the columns ``source`` and ``target``; with ``monolingual`` also the column ``monolingual``, a list of texts.

    Reference: Conneau and Lample 2019 (XLM), section 3.3; Hu et al. 2021 (AMBER), section 2, equation 1; Pan et al. 2021
    (PPA), section 2.2; Li et al. 2023 (DAP), section 4, as the baseline TR + TLM.
    """

    name: ClassVar[str] = "tlm"
    citation: ClassVar[str] = """\
@inproceedings{conneau-lample-2019-cross,
    title = "Cross-lingual Language Model Pretraining",
    author = "Conneau, Alexis and Lample, Guillaume",
    booktitle = "Advances in Neural Information Processing Systems",
    volume = "32",
    year = "2019",
}"""

    mask_rate: Share = 0.2
    positions: Literal["reset", "continuous"] = "reset"
    layout: Literal["sequences", "pair"] = "sequences"
    segments: bool = False
    order: Literal["pair", "shuffled"] = "pair"
    monolingual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        form: dict[str, Any] = {"positions": self.positions, "layout": self.layout, "segments": self.segments}
        self.view = concatenated(self.max_length, self.mask_rate, **form, order=self.order)
        monolingual = concatenated(self.max_length, self.mask_rate, **form, monolingual=True)
        self.monolingual_view = monolingual if self.monolingual else None

    def attach(self, sources: HeadSources) -> None:
        """Determine whether positions are reset, which the encoder may not support."""
        super().attach(sources)
        self.resets = self.positions == "reset" and reads_positions(sources.encoder)
        if self.positions == "reset" and not self.resets:
            effect = "`positions: reset` of 'tlm' has no effect: positions are continuous."
            warn_unread_positions(type(sources.encoder).__name__, effect)

    def views(self) -> tuple[View, ...]:
        """Return the masked pairs, and the masked monolingual texts if requested."""
        return (self.view,) if self.monolingual_view is None else (self.view, self.monolingual_view)

    def longest_sequence(self, sources: HeadSources) -> int:
        """Return the number of positions of one sentence if they are reset, else of both."""
        both = pair_length(sources, self.max_length) if self.layout == "pair" else 2 * self.max_length
        return self.max_length if self.resets else both
