"""Putting an encoder under one of transformers' own heads."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from metaphrase.encoders.loading import STARTER
from metaphrase.exceptions import ModelError


@dataclass(frozen=True)
class EncoderSource:
    """Where the transformer of an encoder lies.

    Attributes:
        name: Folder or Hub id.
        subfolder: Folder in it; older SentenceTransformers have ``0_Transformer``.
    """

    name: str
    subfolder: str = ""

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the encoder's weights; None where they are not in one ``model.safetensors``."""
        weights = cached_file(
            self.name,
            "model.safetensors",
            subfolder=self.subfolder,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if weights is None:
            return None
        with Path(weights).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def encoder_source(name_or_path: str | Path) -> EncoderSource:
    """Find the transformer of an encoder.

    Args:
        name_or_path: ``"starter"``, a Hub id or a folder, of a SentenceTransformer or of a bare transformer.

    Raises:
        ValueError: It is a SentenceTransformer whose first module is no transformer.
        OSError: There is no such encoder.
    """
    name = str(name_or_path)
    if name == STARTER:
        from metaphrase.encoders.starter import starter_path

        name = str(starter_path())
    modules = cached_file(
        name,
        "modules.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if modules is None:
        return EncoderSource(name)
    first = json.loads(Path(modules).read_text(encoding="utf-8"))[0]
    if not first["type"].endswith(".Transformer"):
        raise ModelError(f"{name} starts with a {first['type']}, which has no transformer to fine-tune.")
    return EncoderSource(name, first["path"])


def load_with_head(
    source: EncoderSource,
    head: Any,
    *,
    dropout: float | None = None,
    freeze_word_embeddings: bool = False,
    **config: Any,
) -> PreTrainedModel:
    """Load an encoder's weights into a model with a head of its own, which is initialised at random.

    Args:
        source: The encoder.
        head: ``AutoModelForSequenceClassification`` or another of transformers' classes.
        dropout: Dropout of hidden states and attention, in place of the encoder's own.
        freeze_word_embeddings: Keep the word embeddings as they are.
        config: Settings of the head, such as ``num_labels``.
    """
    settings = AutoConfig.from_pretrained(source.name, subfolder=source.subfolder, **config)
    if dropout is not None:
        settings.hidden_dropout_prob = settings.attention_probs_dropout_prob = dropout
    model = head.from_pretrained(source.name, subfolder=source.subfolder, config=settings, dtype=torch.float32)
    if freeze_word_embeddings:
        model.get_input_embeddings().weight.requires_grad_(False)
    return model


def load_tokenizer(source: EncoderSource) -> PreTrainedTokenizerBase:
    """The encoder's tokenizer.

    Raises:
        ValueError: It cannot say which characters a piece covers.
    """
    tokenizer = AutoTokenizer.from_pretrained(source.name, subfolder=source.subfolder)
    if not tokenizer.is_fast:
        raise ModelError(f"{source.name} has a tokenizer without offsets; the tasks need a fast one.")
    return tokenizer


class FirstToken(nn.Module):
    """The state of the first token, in place of a pooler."""

    def forward(self, states_bsh: Tensor) -> Tensor:
        """The first state of each sequence, shape ``(batch, hidden)``."""
        return states_bsh[:, 0]


class LinearClassifier(nn.Module):
    """Dropout and one linear map over the state of the first token.

    Args:
        hidden: Width of the encoder.
        labels: Number of classes.
        dropout: Share of the state that is dropped in training.
    """

    def __init__(self, hidden: int, labels: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(hidden, labels)

    def forward(self, states_bsh: Tensor) -> Tensor:
        """Logits, shape ``(batch, labels)``."""
        return self.out_proj(self.dropout(states_bsh[:, 0]))


def make_linear(model: PreTrainedModel) -> None:
    """Take the dense layer and its tanh out of a sequence classifier's head: BERT's pooler, or the one in XLM-R's head.

    Reference: Li et al. 2021 (MGC), section 3.3: a linear classifier on top of the first token.

    Raises:
        ValueError: The model has neither.
    """
    config = model.config
    if getattr(model.base_model, "pooler", None) is not None:
        model.base_model.pooler = FirstToken()
    elif hasattr(model.classifier, "out_proj"):
        model.classifier = LinearClassifier(config.hidden_size, config.num_labels, config.hidden_dropout_prob)
        nn.init.normal_(model.classifier.out_proj.weight, std=config.initializer_range)
        nn.init.zeros_(model.classifier.out_proj.bias)
        model.classifier.train(model.training)
    else:
        raise ModelError(f"{type(model).__name__} has no pooler to take out; use its own head.")
