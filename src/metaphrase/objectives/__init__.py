"""The objectives. To add one: write its file, import its class here and put it in the table."""

from metaphrase.objectives.base import HeadSources, Objective
from metaphrase.objectives.representation_translation import RepresentationTranslation
from metaphrase.objectives.translation_language_modeling import TranslationLanguageModeling
from metaphrase.objectives.translation_ranking import TranslationRanking

#: Every objective by the name that recipes call it.
OBJECTIVES: dict[str, type[Objective]] = {
    cls.name: cls
    for cls in (
        TranslationRanking,
        RepresentationTranslation,
        TranslationLanguageModeling,
    )
}

__all__ = [
    "OBJECTIVES",
    "HeadSources",
    "Objective",
    "RepresentationTranslation",
    "TranslationLanguageModeling",
    "TranslationRanking",
]
