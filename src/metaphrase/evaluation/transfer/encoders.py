"""Loading an encoder into a transformers model with a task head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.encoders.checks import load_complete
from metaphrase.encoders.folders import WEIGHTS, open_model, read_modules
from metaphrase.encoders.loading import find_model
from metaphrase.exceptions import ModelError
from metaphrase.io.digests import file_sha256


@dataclass(frozen=True)
class EncoderSource:
    """Location of the transformer of an encoder.

    The folder is that of the Hub's cache for a Hub id. The subfolder is ``0_Transformer`` in older SentenceTransformers.
    """

    name: str
    folder: Path
    subfolder: str = ""

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the weights; None if they are not in a single ``model.safetensors``."""
        weights = self.folder / self.subfolder / WEIGHTS
        return file_sha256(weights) if weights.is_file() else None


def encoder_source(name_or_path: str | Path) -> EncoderSource:
    """Find the transformer of an encoder."""
    name, folder = find_model(name_or_path)
    return EncoderSource(name, folder, read_modules(name, folder)[0][1])


def load_with_head(
    source: EncoderSource,
    head: Any,
    *,
    dropout: float | None = None,
    freeze_word_embeddings: bool = False,
    **config: Any,
) -> PreTrainedModel:
    """Load the weights of an encoder into a model with a randomly initialized head."""
    with open_model(source.name, source.folder / source.subfolder) as copy:
        settings = AutoConfig.from_pretrained(copy, **config)
        if dropout is not None:
            settings.hidden_dropout_prob = settings.attention_probs_dropout_prob = dropout
        model = load_complete(
            head.from_pretrained, copy, source.name, new_head=True, config=settings, dtype=torch.float32
        )
    if freeze_word_embeddings:
        model.get_input_embeddings().weight.requires_grad_(False)
    return model


def load_tokenizer(source: EncoderSource) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an encoder."""
    with open_model(source.name, source.folder / source.subfolder) as copy:
        tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.name_or_path = source.name
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
