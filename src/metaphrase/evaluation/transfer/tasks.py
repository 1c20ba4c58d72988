"""The interface of fine-tuning tasks, prediction, and scoring of predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from metaphrase.corpus.code_switching import PairedTexts
from metaphrase.encoders.positions import check_length
from metaphrase.evaluation.transfer.data import Format, Row
from metaphrase.evaluation.transfer.encoders import encoder_source, load_tokenizer, load_with_head
from metaphrase.evaluation.transfer.options import FineTuningArguments, FineTuningOptions
from metaphrase.modeling.functional import check_finite_rows


@dataclass(frozen=True)
class Score:
    """Scores of a model on the test items of one language.

    Attributes:
        metrics: Scores in percent; the first one selects the checkpoint.
        interval: 95 % bootstrap interval of the first metric.
        items: Score of each item in [0, 1], or its counts, for paired tests between models.
        facts: Further facts of the language.
    """

    metrics: dict[str, float]
    interval: tuple[float, float]
    items: Sequence[float] | Sequence[tuple[int, ...]]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def primary(self) -> float:
        """The first metric."""
        return next(iter(self.metrics.values()))


class Task(ABC):
    """A fine-tuning task.

    Attributes:
        name: Name in the results, such as ``"xnli"``.
        form: Format of its data.
        head: Auto class of transformers that loads an encoder with a new head.
        classes: Names of the classes of the head; empty if it has none.
        collate: Turns units into a training batch.
        originals: Columns that have an English original, for code-switching; None if the task has none.
    """

    name: str
    form: Format
    head: ClassVar[Any]
    classes: tuple[str, ...] = ()
    collate: Callable[[list[Any]], Any]
    originals: PairedTexts | None = None

    def __init__(self, options: FineTuningOptions, arguments: FineTuningArguments) -> None:
        self.options, self.arguments = options, arguments
        self.source = encoder_source(options.model)
        self.tokenizer = load_tokenizer(self.source)

    def build(self) -> PreTrainedModel:
        """Load the encoder with a new head."""
        config: dict[str, Any] = {}
        if self.classes:
            config["id2label"] = dict(enumerate(self.classes))
            config["label2id"] = {label: number for number, label in config["id2label"].items()}
        model = load_with_head(
            self.source,
            self.head,
            dropout=self.options.dropout,
            freeze_word_embeddings=self.options.freeze_word_embeddings,
            **config,
        )
        check_length(model, self.options.max_length)
        return model

    def units(self, rows: Sequence[Row]) -> Sequence[Any]:
        """Turn items into the units of batches: the items themselves, or their windows."""
        return rows

    @abstractmethod
    def score(self, model: PreTrainedModel, data: Dataset, language: str) -> Score:
        """Measure a model on the data of one language."""

    def predict(self, model: PreTrainedModel, units: Sequence[Any], **settings: Any) -> list[Any]:
        """Predictions of a model for some units; the settings are those of `predict`."""
        batch_size = self.arguments.per_device_eval_batch_size
        return predict(model, units, collate=self.collate, batch_size=batch_size, **settings)


@torch.no_grad()
def predict(
    model: PreTrainedModel,
    rows: Sequence[Any],
    *,
    collate: Callable[[list[Any]], Mapping[str, Tensor]],
    read: Callable[[Any, list[Any]], Sequence[Any]],
    length: Callable[[Any], int],
    batch_size: int,
    forward: Callable[..., Any] | None = None,
) -> list[Any]:
    """Predictions of a model for some rows, in their order. Rows of similar length share a batch.

    ``read`` turns the output of the model, and the rows, into a result for each row; ``forward`` replaces the forward pass.
    """
    model.eval()
    order = sorted(range(len(rows)), key=lambda at: -length(rows[at]))
    results: list[Any] = [None] * len(rows)
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        batch = [rows[at] for at in places]
        output = (forward or model)(**{key: value.to(model.device) for key, value in collate(batch).items()})
        for name, value in output.items() if isinstance(output, Mapping) else ():
            if name.endswith("logits"):
                check_finite_rows(value)
        for at, result in zip(places, read(output, batch), strict=True):
            results[at] = result
    return results
