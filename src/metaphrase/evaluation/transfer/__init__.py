"""Fine-tuned benchmarks: an encoder with a task head is trained on English and measured in every language.

The programs are ``trainers/finetune_*.py``; each task is a module of this package. Translation requires the extra
``metaphrase[finetuning]``.
"""

from pathlib import Path

from metaphrase.evaluation.transfer.classification import ClassificationOptions, finetune_classification
from metaphrase.evaluation.transfer.options import FineTuningArguments, FineTuningOptions
from metaphrase.evaluation.transfer.question_answering import QuestionAnsweringOptions, finetune_question_answering
from metaphrase.evaluation.transfer.running import results_table
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
