"""Replacement of a model's pooling."""

from __future__ import annotations

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from metaphrase.exceptions import ModelError


def replace_pooling(model: SentenceTransformer, mode: str) -> None:
    """Replace the pooling of a model in place.

    Raises:
        ModelError: The model has no pooling module.
    """
    for at, module in enumerate(model):
        if isinstance(module, Pooling):
            model[at] = Pooling(module.embedding_dimension, mode, include_prompt=module.include_prompt)
            return
    raise ModelError(
        f"Pooling {mode!r} was requested, but the model has no pooling module to replace. Omit `pooling`."
    )
