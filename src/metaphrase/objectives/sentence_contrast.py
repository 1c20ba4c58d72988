"""Sentence-level contrast, the coarsest of the three granularities of MGC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Literal

import torch
from torch import Tensor

from metaphrase.corpus.rows import SEPARATOR
from metaphrase.io.arguments import Length, OwnTemperature, Share
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.functional import mean_pooled, translation_ranking
from metaphrase.modeling.languages import language_id
from metaphrase.modeling.views import SIDES, Batch, Generators, View, pad_rows, piece_ids
from metaphrase.objectives.base import Granularity, Objective
from metaphrase.objectives.word_contrast import MGC_CITATION

BackTranslation = Literal["auto", "sample", "all", "none"]


@dataclass(frozen=True)
class BackTranslations(View):
    """Back-translations of both sides, sampled from the alternatives of each sentence.

    The rows of the encoder's inputs are the sampled back-translations only. Also provides their ``language``, and
    ``source_row`` and ``target_row``, ``(batch,)``: the row of each sentence's back-translation, or -1 if the original is
    used. A batch without back-translations has one row of special tokens.

    ``share`` is the probability of a back-translation, independent for each side. A sentence without alternatives has none;
    if ``optional``, so has a corpus without these columns.
    """

    max_length: Length
    share: Share
    optional: bool = False

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """The columns of both sides, unless they are optional."""
        return () if self.optional else ("source_bt", "target_bt")

    def build(self, batch: Batch, rngs: Generators) -> dict[str, Tensor]:
        """Build ids, mask and language of the sampled back-translations, and their rows."""
        draws = [rng.random((2, 2)) for rng in rngs]
        texts: list[str] = []
        codes: list[int] = []
        rows: dict[str, list[int]] = {"source": [], "target": []}
        for i, side in enumerate(SIDES):
            for example, draw_22 in zip(batch.examples, draws, strict=True):
                chance, choice = draw_22[i]
                alternatives = [text for text in (example.get(f"{side}_bt") or "").split(SEPARATOR) if text.strip()]
                drawn = bool(alternatives) and chance < self.share
                rows[side].append(len(texts) if drawn else -1)
                if drawn:
                    texts.append(alternatives[int(choice * len(alternatives))])
                    codes.append(language_id(example.get(f"{side}_lang") or ""))
        return {
            **pad_rows(batch.tokenizer, input_ids=piece_ids(batch.tokenizer, texts or [""], self.max_length)),
            "language": torch.tensor(codes or [language_id(batch.examples[0].get("source_lang") or "")]),
            "source_row": torch.tensor(rows["source"]),
            "target_row": torch.tensor(rows["target"]),
        }


@dataclass(eq=False, repr=False, kw_only=True)
class SentenceContrast(Objective):
    """Each sentence must identify its translation in the batch, by mean-pooled states and with noisy positives.

    Args:
        temperature: Softmax temperature τ, or ``"auto"`` (see :class:`TranslationRanking`).
        back_translation: ``"sample"`` contrasts one pair (x′, y′) per example, sampled from {x, x̂} × {y, ŷ}; ``"all"`` sums
            the losses of the four combinations; ``"none"`` contrasts the originals (the ablation BIPAIR); ``"auto"``
            samples if the corpus has back-translations.
        gather: Contrast with the sentences of all processes, with gradient. The paper's negatives are those of the batch of
            one process; gradient accumulation adds none.

    Inputs: the columns ``source`` and ``target``; for ``"sample"`` and ``"all"`` also ``source_bt``, translations of the
    target, and ``target_bt``, translations of the source (see ``scripts/back_translate.py``). Alternatives are separated by
    ``" ||| "``. A sentence without back-translations is used unchanged.

    Relations: :class:`TranslationRanking` ranks the embeddings as the model pools them; :class:`WordContrast` and
    :class:`SpanContrast` are the finer granularities of MGC.

    Reference: Li et al. 2021 (MGC), section 2.4, equations 7 and 8. The loss is the mean of both directions.
    """

    name: ClassVar[str] = "sentence-contrast"
    granularity: ClassVar[Granularity] = "sentence"
    in_batch_negatives: ClassVar[bool] = True
    citation: ClassVar[str] = MGC_CITATION

    temperature: OwnTemperature = 0.1
    back_translation: BackTranslation = "sample"
    gather: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        share = 1.0 if self.back_translation == "all" else 0.5
        kind = self.back_translation
        self.noisy = BackTranslations(f"back-translations-{kind}", self.max_length, share, optional=kind == "auto")

    def views(self) -> tuple[View, ...]:
        """Return both sides and their back-translations."""
        return super().views() + (() if self.back_translation == "none" else (self.noisy,))

    def forward(self, encodings: Mapping[str, Encoding]) -> Tensor:
        """Compute the loss of the pairs, with back-translations where they are sampled."""
        sides = {side: [mean_pooled(encodings[side].tokens_blh, encodings[side].mask_bl)] for side in SIDES}
        if self.back_translation != "none":
            noisy = encodings[self.noisy.name]
            noisy_nh = mean_pooled(noisy.tokens_blh, noisy.mask_bl)
            for side, embeddings in sides.items():
                row_b = noisy.features[f"{side}_row"]
                embeddings.append(torch.where((row_b >= 0)[:, None], noisy_nh[row_b.clamp(min=0)], embeddings[0]))
        if self.back_translation in ("auto", "sample"):
            sides = {side: embeddings[1:] for side, embeddings in sides.items()}
        sources, targets = (map(self.gathered, sides[side]) for side in SIDES)  # of all processes
        losses = [
            translation_ranking(*pair, temperature=float(self.temperature), direction="symmetric")
            for pair in product(sources, targets)
        ]
        return torch.stack(losses).sum()
