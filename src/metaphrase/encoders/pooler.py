"""BERT's pooler: sentence embeddings never use it, and a checkpoint without one gets a random one from transformers."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, TypeVar

from metaphrase.io.files import read_json

Encoder = TypeVar("Encoder", bound=Any)

#: File of a SentenceTransformer folder that holds the arguments of the encoder.
CONFIG_FILE = "sentence_bert_config.json"


def is_pooler_optional(kind: type) -> bool:
    """Whether a class of transformers has a pooler that it omits on request; sentence embeddings need none."""
    return "add_pooling_layer" in inspect.signature(kind.__init__).parameters  # type: ignore[misc]


def remove_pooler(encoder: Encoder) -> Encoder:
    """Remove the pooler of a transformers model in place, if it has one that it can work without."""
    if getattr(encoder, "pooler", None) is not None and is_pooler_optional(type(encoder)):
        encoder.pooler = None
    return encoder


def disable_pooler(folder: str | Path) -> None:
    """Make ``SentenceTransformer(folder)`` build its encoder without a pooler.

    The encoder's class must accept ``add_pooling_layer``.
    """
    path = Path(folder) / CONFIG_FILE
    config = read_json(path) | {"model_args": {"add_pooling_layer": False}}
    path.write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
