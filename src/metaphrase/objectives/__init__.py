"""The objectives. Each is one module and one line of the table below; `base`, `registry` and `vocabulary` are shared.

Objectives of other packages are registered by an entry point of the group ``metaphrase.objectives``, as
``package.module:Class``, or by ``OBJECTIVES["name"] = Class``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from metaphrase.objectives.registry import Objectives

if TYPE_CHECKING:
    from metaphrase.objectives.base import HeadSources, Objective

#: Every objective by the name that recipes use, with its granularity and its class. Classes are imported on first use,
#: because that imports torch.
OBJECTIVES = Objectives(
    {
        "anchor": ("sentence", "metaphrase.objectives.anchor:Anchor"),
        "awp": ("word", "metaphrase.objectives.aligned_word_prediction:AlignedWordPrediction"),
        "mexma": ("token", "metaphrase.objectives.mexma:CrossUnmasking"),
        "mlm": ("token", "metaphrase.objectives.masked_language_modeling:MaskedLanguageModeling"),
        "moco": ("sentence", "metaphrase.objectives.momentum_contrast:MomentumContrast"),
        "rtl": ("token", "metaphrase.objectives.representation_translation:RepresentationTranslation"),
        "sa": ("sentence", "metaphrase.objectives.sentence_alignment:SentenceAlignment"),
        "sentence-contrast": ("sentence", "metaphrase.objectives.sentence_contrast:SentenceContrast"),
        "similarity-preservation": (
            "sentence",
            "metaphrase.objectives.similarity_preservation:SimilarityPreservation",
        ),
        "span-contrast": ("span", "metaphrase.objectives.span_contrast:SpanContrast"),
        "tlm": ("token", "metaphrase.objectives.translation_language_modeling:TranslationLanguageModeling"),
        "tr": ("sentence", "metaphrase.objectives.translation_ranking:TranslationRanking"),
        "wa": ("word", "metaphrase.objectives.word_alignment:WordAlignment"),
        "word-contrast": ("word", "metaphrase.objectives.word_contrast:WordContrast"),
        "wtr": ("word", "metaphrase.objectives.word_translation_ranking:WordTranslationRanking"),
        "xtr": ("token", "metaphrase.objectives.sentence_to_tokens:SentenceToTokens"),
    }
)

__all__ = ["OBJECTIVES", "HeadSources", "Objective"]


def __getattr__(name: str) -> Any:
    if name in ("HeadSources", "Objective"):  # they import torch
        return getattr(import_module("metaphrase.objectives.base"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
