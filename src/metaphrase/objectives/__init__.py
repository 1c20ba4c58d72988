"""The objectives. To add one: write its file and put a line in the table."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from metaphrase.objectives.registry import Objectives

if TYPE_CHECKING:
    from metaphrase.objectives.base import HeadSources, Objective

_CLASSES = (
    "aligned_word_prediction.AlignedWordPrediction",
    "anchor.Anchor",
    "masked_language_modeling.MaskedLanguageModeling",
    "mexma.CrossUnmasking",
    "momentum_contrast.MomentumContrast",
    "representation_translation.RepresentationTranslation",
    "sentence_alignment.SentenceAlignment",
    "sentence_contrast.SentenceContrast",
    "sentence_to_tokens.SentenceToTokens",
    "span_contrast.SpanContrast",
    "translation_language_modeling.TranslationLanguageModeling",
    "translation_ranking.TranslationRanking",
    "word_alignment.WordAlignment",
    "word_contrast.WordContrast",
    "word_translation_ranking.WordTranslationRanking",
)

#: Every objective by the name that recipes call it; a class is imported when it is first asked for.
OBJECTIVES = Objectives(_CLASSES)

__all__ = ["OBJECTIVES", "HeadSources", "Objective"]


def __getattr__(name: str) -> Any:
    if name in ("HeadSources", "Objective"):  # they import torch
        return getattr(import_module("metaphrase.objectives.base"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
