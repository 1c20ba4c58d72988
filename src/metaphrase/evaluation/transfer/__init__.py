"""The fine-tuned benchmarks: an encoder under one of transformers' own heads, trained on English, measured in every language.

The programs are ``trainers/finetune_*.py``; each task has a module here. Translation needs ``metaphrase[finetuning]``.
"""

from pathlib import Path

from metaphrase.evaluation.transfer.classification import ClassificationOptions, finetune_classification
from metaphrase.evaluation.transfer.question_answering import QuestionAnsweringOptions, finetune_question_answering
from metaphrase.evaluation.transfer.running import FineTuningArguments, FineTuningOptions, results_table
from metaphrase.evaluation.transfer.tagging import TaggingOptions, finetune_tagging

#: Folder of the hyperparameters at a small scale.
SMALL_SCALE_CONFIGS = Path(__file__).parent / "small"

__all__ = [
    "SMALL_SCALE_CONFIGS",
    "ClassificationOptions",
    "FineTuningArguments",
    "FineTuningOptions",
    "QuestionAnsweringOptions",
    "TaggingOptions",
    "finetune_classification",
    "finetune_question_answering",
    "finetune_tagging",
    "results_table",
]
