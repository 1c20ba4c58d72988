"""Classification of sentence pairs: natural language inference (XNLI) and paraphrases (PAWS-X).

References: Conneau et al. 2018, "XNLI: Evaluating Cross-lingual Sentence Representations"; Yang et al. 2019, "PAWS-X: A
Cross-lingual Adversarial Dataset for Paraphrase Identification".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from datasets import Dataset
from torch import Tensor, tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.corpus.code_switching import NLI, PARAPHRASES, PairedTexts
from metaphrase.evaluation.significance import bootstrap_interval
from metaphrase.evaluation.transfer.data import Row, pairs_format
from metaphrase.evaluation.transfer.encoders import encoder_source, load_tokenizer, load_with_head, make_linear
from metaphrase.evaluation.transfer.options import FineTuningArguments, FineTuningOptions
from metaphrase.evaluation.transfer.planning import load_benchmark
from metaphrase.evaluation.transfer.running import fine_tune
from metaphrase.evaluation.transfer.tasks import Score, Task, predict

#: Columns and classes of a task.
TASKS: dict[str, tuple[PairedTexts, tuple[str, ...]]] = {
    "xnli": (NLI, ("entailment", "neutral", "contradiction")),
    "pawsx": (PARAPHRASES, ("0", "1")),
}


@dataclass
class ClassificationOptions(FineTuningOptions):
    """Options of fine-tuning and measuring an encoder on pairs of sentences."""

    task: Literal["xnli", "pawsx"] = field(
        default="xnli", metadata={"help": "Task, which defines the columns and classes."}
    )
    head: Literal["model", "linear"] = field(
        default="model",
        metadata={
            "help": "model: the head of transformers, with a dense layer and tanh before the classifier; linear: a linear "
            "classifier on the first token (MGC)."
        },
    )


@dataclass(frozen=True)
class PairCollator:
    """Turns pairs of texts into a batch. If a pair is too long, its longer text is truncated.

    Attributes:
        tokenizer: Tokenizer of the encoder.
        columns: Names of the two texts.
        max_length: Maximum number of pieces of a pair, including special tokens.
    """

    tokenizer: PreTrainedTokenizerBase
    columns: PairedTexts
    max_length: int

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Inputs of the model, with ``labels``."""
        first, second = ([row[column] for row in rows] for column in (self.columns.first, self.columns.second))
        batch = self.tokenizer(
            first, second, truncation=True, max_length=self.max_length, padding=True, return_tensors="pt"
        )
        return {**batch, "labels": tensor([row["label"] for row in rows])}


def classify(model: PreTrainedModel, data: Dataset, collate: PairCollator, *, batch_size: int = 32) -> list[int]:
    """Class that a model predicts for each pair."""
    columns = collate.columns
    return predict(
        model,
        data.to_list(),
        collate=collate,
        read=lambda output, rows: output.logits.argmax(-1).tolist(),
        length=lambda row: len(row[columns.first]) + len(row[columns.second]),
        batch_size=batch_size,
    )


def finetune_classification(options: ClassificationOptions, arguments: FineTuningArguments) -> Mapping[str, Any]:
    """Fine-tune an encoder on pairs of sentences and measure its accuracy in each language.

    Returns:
        See :func:`metaphrase.evaluation.transfer.running.fine_tune`; the metric is ``accuracy``.
    """
    columns, labels = TASKS[options.task]
    source = encoder_source(options.model)
    collate = PairCollator(load_tokenizer(source), columns, options.max_length)

    def build() -> PreTrainedModel:
        model = load_with_head(
            source,
            AutoModelForSequenceClassification,
            dropout=options.dropout,
            freeze_word_embeddings=options.freeze_word_embeddings,
            id2label=dict(enumerate(labels)),
            label2id={label: number for number, label in enumerate(labels)},
        )
        if options.head == "linear":
            make_linear(model)
        return model

    def score(model: PreTrainedModel, data: Dataset, language: str) -> Score:
        predicted = classify(model, data, collate, batch_size=arguments.per_device_eval_batch_size)
        correct = [int(guess == label) for guess, label in zip(predicted, data["label"], strict=True)]
        return Score({"accuracy": 100 * sum(correct) / len(correct)}, bootstrap_interval(correct), correct)

    form = pairs_format(columns, labels)
    task = Task(options.task, form, build, lambda rows: rows, collate, score, originals=columns)
    benchmark = load_benchmark(options, form, seed=arguments.seed)
    return fine_tune(task, source, benchmark, options, arguments)
