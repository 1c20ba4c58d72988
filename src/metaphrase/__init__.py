"""Train cross-lingual sentence encoders by aligning the sentences and words of a bitext.

A recipe is a weighted sum of objectives over shared views of a bitext batch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metaphrase.card import AlignmentModelCardData
    from metaphrase.collator import ParallelCollator
    from metaphrase.corpus import Cleaning, load_corpus
    from metaphrase.encoders import load_encoder
    from metaphrase.evaluation.retrieval import RetrievalEvaluator
    from metaphrase.exceptions import MetaphraseError
    from metaphrase.heads import AlignmentHeads
    from metaphrase.hub import push, release
    from metaphrase.loss import AlignmentLoss
    from metaphrase.objectives import OBJECTIVES, Objective
    from metaphrase.packing import packed
    from metaphrase.recipe import Recipe, Term, list_recipes
    from metaphrase.trainer import AlignmentTrainer, AlignmentTrainingArguments
    from metaphrase.views import View

__version__ = "0.1.0"

#: Where each public name is defined. Names are imported when they are first used, so that the command line starts fast.
_HOMES = {
    "AlignmentHeads": "heads",
    "AlignmentLoss": "loss",
    "AlignmentModelCardData": "card",
    "AlignmentTrainer": "trainer",
    "AlignmentTrainingArguments": "trainer",
    "Cleaning": "corpus",
    "MetaphraseError": "exceptions",
    "OBJECTIVES": "objectives",
    "Objective": "objectives",
    "ParallelCollator": "collator",
    "Recipe": "recipe",
    "RetrievalEvaluator": "evaluation.retrieval",
    "Term": "recipe",
    "View": "views",
    "list_recipes": "recipe",
    "load_corpus": "corpus",
    "load_encoder": "encoders",
    "packed": "packing",
    "push": "hub",
    "release": "hub",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"metaphrase.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'metaphrase' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
