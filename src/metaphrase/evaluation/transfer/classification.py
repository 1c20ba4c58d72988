"""Classification of sentence pairs: natural language inference (XNLI) and paraphrases (PAWS-X).

References: Conneau et al. 2018, "XNLI: Evaluating Cross-lingual Sentence Representations"; Yang et al. 2019, "PAWS-X: A
Cross-lingual Adversarial Dataset for Paraphrase Identification".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from datasets import Dataset
from torch import Tensor, tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.corpus.code_switching import NLI, PARAPHRASES, PairedTexts
from metaphrase.evaluation.significance import bootstrap_interval
from metaphrase.evaluation.transfer.data import Row, pairs_format
from metaphrase.evaluation.transfer.options import FineTuningArguments, FineTuningOptions
from metaphrase.evaluation.transfer.running import fine_tune
from metaphrase.evaluation.transfer.tasks import Score, Task, make_linear
from metaphrase.io.arguments import checked
from metaphrase.io.configuration import option

#: Columns and classes of a task.
TASKS: dict[str, tuple[PairedTexts, tuple[str, ...]]] = {
    "xnli": (NLI, ("entailment", "neutral", "contradiction")),
    "pawsx": (PARAPHRASES, ("0", "1")),
}


@checked
@dataclass
class ClassificationOptions(FineTuningOptions):
    """Options of fine-tuning and measuring an encoder on pairs of sentences."""

    task: Literal["xnli", "pawsx"] = option("xnli", "Task, which defines the columns and classes.")
    head: Literal["model", "linear"] = option(
        "model",
        "model: the head of transformers, with a dense layer and tanh before the classifier; linear: a linear "
        "classifier on the first token (MGC).",
    )


def collate_pairs(
    tokenizer: PreTrainedTokenizerBase, columns: PairedTexts, max_length: int, rows: Sequence[Row]
) -> dict[str, Tensor]:
    """Inputs of the model, with ``labels``. If a pair is too long, its longer text is truncated."""
    first, second = ([row[column] for row in rows] for column in (columns.first, columns.second))
    batch = tokenizer(first, second, truncation=True, max_length=max_length, padding=True, return_tensors="pt")
    return {**batch, "labels": tensor([row["label"] for row in rows])}


class PairTask(Task):
    """Pairs of sentences, scored by accuracy."""

    head = AutoModelForSequenceClassification

    def __init__(self, options: ClassificationOptions, arguments: FineTuningArguments) -> None:
        super().__init__(options, arguments)
        self.name = options.task
        self.originals, self.classes = TASKS[options.task]
        self.form = pairs_format(self.originals, self.classes)
        self.collate = partial(collate_pairs, self.tokenizer, self.originals, options.max_length)
        self.linear = options.head == "linear"

    def build(self) -> PreTrainedModel:
        """Load the encoder with a new head."""
        model = super().build()
        if self.linear:
            make_linear(model)
        return model

    def score(self, model: PreTrainedModel, data: Dataset, language: str) -> Score:
        """Accuracy, next to the accuracy of predicting a single class."""
        columns = TASKS[self.name][0]
        predicted = self.predict(
            model,
            data.to_list(),
            read=lambda output, rows: output.logits.argmax(-1).tolist(),
            length=lambda row: len(row[columns.first]) + len(row[columns.second]),
        )
        return score_classes(predicted, data["label"])


def score_classes(predicted_n: Sequence[int], label_n: Sequence[int]) -> Score:
    """Accuracy of predicted classes."""
    correct = [int(guess == label) for guess, label in zip(predicted_n, label_n, strict=True)]
    accuracy = {"accuracy": 100 * sum(correct) / len(correct)}
    return Score(accuracy, bootstrap_interval(correct), correct, against_majority(correct, label_n))


def against_majority(correct_n: Sequence[float], label_n: Sequence[int]) -> dict[str, Any]:
    """Whether a classifier does more than predicting a single class.

    ``majority`` is the accuracy in percent of always predicting the largest class. ``learned`` is false if the correct
    items are exactly those of one class, or as many as the largest class has.

    >>> against_majority([1, 1, 0, 1], [0, 0, 1, 0])
    {'majority': 75.0, 'learned': False}
    >>> against_majority([1, 1, 1, 1], [0, 0, 1, 0])
    {'majority': 75.0, 'learned': True}
    """
    right_n, gold_n = np.asarray(correct_n, dtype=bool), np.asarray(label_n)
    classes, count_c = np.unique(gold_n, return_counts=True)
    constant = any(np.array_equal(right_n, gold_n == one) for one in classes) and len(classes) > 1
    return {
        "majority": 100 * int(count_c.max()) / len(gold_n),
        "learned": not constant and int(right_n.sum()) != int(count_c.max()),
    }


def finetune_classification(options: ClassificationOptions, arguments: FineTuningArguments) -> Mapping[str, Any]:
    """Fine-tune an encoder on pairs of sentences and measure its accuracy in each language.

    Returns:
        See :func:`metaphrase.evaluation.transfer.running.fine_tune`; the metric is ``accuracy``.
    """
    return fine_tune(PairTask(options, arguments))
