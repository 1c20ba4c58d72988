"""The interface of fine-tuning tasks: encoders with a task head, prediction, and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.corpus.code_switching import PairedTexts
from metaphrase.encoders.checks import load_complete
from metaphrase.encoders.folders import open_model, read_modules
from metaphrase.encoders.loading import find_model
from metaphrase.encoders.positions import check_length
from metaphrase.evaluation.transfer.data import Format, Row
from metaphrase.evaluation.transfer.options import FineTuningArguments, FineTuningOptions
from metaphrase.exceptions import ModelError
from metaphrase.io.digests import files_sha256
from metaphrase.modeling.functional import check_finite_rows

#: Files of a transformer that determine its results.
_FILES = ("*.safetensors", "*.bin", "config.json", "*token*.json", "vocab*", "merges.txt", "*.model")


@dataclass(frozen=True)
class EncoderSource:
    """Name of an encoder, and the folder of its transformer; for a Hub id, a folder of the Hub's cache."""

    name: str
    folder: Path

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the files of weights, configuration and tokenizer; None if there are no weights."""
        files = [path for pattern in _FILES for path in sorted(self.folder.glob(pattern))]
        return files_sha256(files) if any(path.suffix in (".safetensors", ".bin") for path in files) else None


def encoder_source(name_or_path: str | Path) -> EncoderSource:
    """Find the transformer of an encoder."""
    name, folder = find_model(name_or_path)
    return EncoderSource(name, folder / read_modules(name, folder)[0][1])


def load_with_head(
    source: EncoderSource,
    head: Any,
    *,
    dropout: float | None = None,
    freeze_word_embeddings: bool = False,
    **config: Any,
) -> PreTrainedModel:
    """Load the weights of an encoder into a model with a randomly initialised head."""
    with open_model(source.name, source.folder) as copy:
        settings = AutoConfig.from_pretrained(copy, **config)
        if dropout is not None:
            _set_dropout(settings, dropout, source.name)
        model = load_complete(
            head.from_pretrained, copy, source.name, new_head=True, config=settings, dtype=torch.float32
        )
    if freeze_word_embeddings:
        model.get_input_embeddings().weight.requires_grad_(False)
    return model


def _set_dropout(settings: PreTrainedConfig, dropout: float, name: str) -> None:
    """Set every dropout of a configuration. One that is None, such as ``classifier_dropout`` of BERT, follows another."""
    found = [
        key
        for key, value in settings.to_dict().items()
        if ("dropout" in key or key.endswith("pdrop")) and type(value) in (int, float)
    ]
    if not found:
        raise ModelError(f"{name} has no dropout to set. Omit --dropout.")
    for key in found:
        setattr(settings, key, dropout)


def load_tokenizer(source: EncoderSource) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an encoder. It pads and truncates on the right, as the positions of labels require."""
    with open_model(source.name, source.folder) as copy:
        tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.name_or_path = source.name
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    if not tokenizer.is_fast:
        raise ModelError(f"{source.name} has a tokenizer without character offsets. The tasks need a fast tokenizer.")
    return tokenizer


class FirstToken(nn.Module):
    """State of the first token, as a replacement of a pooler."""

    def forward(self, states_bsh: Tensor) -> Tensor:
        """The first state of each sequence, shape ``(batch, hidden)``."""
        return states_bsh[:, 0]


def make_linear(model: PreTrainedModel) -> None:
    """Remove the dense layer and its tanh from the head of a sequence classifier: BERT's pooler, or XLM-R's layer.

    Reference: Li et al. 2021 (MGC), section 3.3: a linear classifier on top of the first token.
    """
    config = model.config
    if getattr(model.base_model, "pooler", None) is not None:
        model.base_model.pooler = FirstToken()
    elif hasattr(model.classifier, "out_proj"):
        linear = nn.Linear(config.hidden_size, config.num_labels)
        nn.init.normal_(linear.weight, std=config.initializer_range)
        nn.init.zeros_(linear.bias)
        dropout = nn.Dropout(config.hidden_dropout_prob)
        head = nn.Sequential(OrderedDict(first=FirstToken(), dropout=dropout, out_proj=linear))
        model.classifier = head.train(model.training)
    else:
        raise ModelError(f"{type(model).__name__} has no pooler to remove. Use its own head.")


@dataclass(frozen=True)
class Score:
    """Scores of a model on the test items of one language.

    Attributes:
        metrics: Scores in percent; the first one selects the checkpoint.
        interval: 95 % bootstrap interval of the first metric.
        items: Score of each item in [0, 1], or its counts, for paired tests between models.
        facts: Further results.
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
        names = dict(enumerate(self.classes))
        config = {"id2label": names, "label2id": {label: number for number, label in names.items()}} if names else {}
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
        """Predictions of a model for some units; see `predict` for the settings."""
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
