"""Train cross-lingual sentence encoders by aligning the sentences and words of a bitext.

A recipe is a weighted sum of objectives over shared views of a bitext batch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metaphrase.corpus.cleaning import Cleaning
    from metaphrase.corpus.loading import load_corpus
    from metaphrase.encoders.loading import load_encoder
    from metaphrase.evaluation.retrieval import RetrievalEvaluator
    from metaphrase.exceptions import MetaphraseError
    from metaphrase.modeling.collator import ParallelCollator
    from metaphrase.modeling.packing import packed
    from metaphrase.modeling.views import View
    from metaphrase.objectives import OBJECTIVES, Objective
    from metaphrase.publishing.card import AlignmentModelCardData
    from metaphrase.publishing.hub import push
    from metaphrase.publishing.release import release
    from metaphrase.training.arguments import AlignmentTrainingArguments
    from metaphrase.training.configuration import RunConfig
    from metaphrase.training.heads import AlignmentHeads
    from metaphrase.training.loss import AlignmentLoss
    from metaphrase.training.recipe import Recipe, Term, list_recipes
    from metaphrase.training.run import TrainingRun
    from metaphrase.training.trainer import AlignmentTrainer

__version__ = "0.1.0"

#: Where each public name is defined. Names are imported when they are first used, so that the command line starts fast.
_HOMES = {
    "AlignmentHeads": "training.heads",
    "AlignmentLoss": "training.loss",
    "AlignmentModelCardData": "publishing.card",
    "AlignmentTrainer": "training.trainer",
    "AlignmentTrainingArguments": "training.arguments",
    "Cleaning": "corpus.cleaning",
    "MetaphraseError": "exceptions",
    "OBJECTIVES": "objectives",
    "Objective": "objectives",
    "ParallelCollator": "modeling.collator",
    "Recipe": "training.recipe",
    "RetrievalEvaluator": "evaluation.retrieval",
    "RunConfig": "training.configuration",
    "Term": "training.recipe",
    "TrainingRun": "training.run",
    "View": "modeling.views",
    "list_recipes": "training.recipe",
    "load_corpus": "corpus.loading",
    "load_encoder": "encoders.loading",
    "packed": "modeling.packing",
    "push": "publishing.hub",
    "release": "publishing.release",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"metaphrase.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'metaphrase' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
