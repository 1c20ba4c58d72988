"""The objectives. To add one: write its file and put a line in the table."""

from importlib import import_module

from metaphrase.objectives.base import HeadSources, Objective

_CLASSES = (
    "aligned_word_prediction.AlignedWordPrediction",
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


def _load(place: str) -> type[Objective]:
    module, _, name = place.partition(".")
    return getattr(import_module(f"{__name__}.{module}"), name)


#: Every objective by the name that recipes call it.
OBJECTIVES: dict[str, type[Objective]] = {cls.name: cls for cls in map(_load, _CLASSES)}

__all__ = ["OBJECTIVES", "HeadSources", "Objective"]
