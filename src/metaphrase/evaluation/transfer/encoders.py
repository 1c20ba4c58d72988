"""Loading an encoder into a transformers model with a task head."""

from __future__ import annotations

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
from metaphrase.io.digests import file_sha256


@dataclass(frozen=True)
class EncoderSource:
    """Location of the transformer of an encoder.

    The subfolder is ``0_Transformer`` in older SentenceTransformers.
    """

    name: str
    subfolder: str = ""

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the weights; None if they are not in a single ``model.safetensors``."""
        weights = cached_file(
            self.name,
            "model.safetensors",
            subfolder=self.subfolder,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if weights is None else file_sha256(weights)


def encoder_source(name_or_path: str | Path) -> EncoderSource:
    """Find the transformer of an encoder."""
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
    """Load the weights of an encoder into a model with a randomly initialized head."""
    settings = AutoConfig.from_pretrained(source.name, subfolder=source.subfolder, **config)
    if dropout is not None:
        settings.hidden_dropout_prob = settings.attention_probs_dropout_prob = dropout
    model = head.from_pretrained(source.name, subfolder=source.subfolder, config=settings, dtype=torch.float32)
    if freeze_word_embeddings:
        model.get_input_embeddings().weight.requires_grad_(False)
    return model


def load_tokenizer(source: EncoderSource) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an encoder."""
    tokenizer = AutoTokenizer.from_pretrained(source.name, subfolder=source.subfolder)
    if not tokenizer.is_fast:
        raise ModelError(f"{source.name} has a tokenizer without character offsets. The tasks need a fast tokenizer.")
    return tokenizer


class FirstToken(nn.Module):
    """State of the first token, as a replacement of a pooler."""

    def forward(self, states_bsh: Tensor) -> Tensor:
        """The first state of each sequence, shape ``(batch, hidden)``."""
        return states_bsh[:, 0]


class LinearClassifier(nn.Module):
    """Dropout and one linear map over the state of the first token."""

    def __init__(self, hidden: int, labels: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(hidden, labels)

    def forward(self, states_bsh: Tensor) -> Tensor:
        """Logits, shape ``(batch, labels)``."""
        return self.out_proj(self.dropout(states_bsh[:, 0]))


def make_linear(model: PreTrainedModel) -> None:
    """Remove the dense layer and its tanh from the head of a sequence classifier: BERT's pooler, or that of XLM-R's head.

    Reference: Li et al. 2021 (MGC), section 3.3: a linear classifier on top of the first token.
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
        raise ModelError(f"{type(model).__name__} has no pooler to remove. Use its own head.")
