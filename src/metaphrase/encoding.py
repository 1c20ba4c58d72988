"""Encodings: what the encoder makes of the views of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from metaphrase.packing import first_position

#: What of a view the encoder reads; the rest is for the objectives.
ENCODER_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


@dataclass(frozen=True)
class Encoding:
    """An encoded view.

    Attributes:
        features: What the view built, e.g. ``labels`` or ``text``.
        table_vh: The encoder's input embeddings, shape ``(vocabulary, hidden)``, on which tied heads project.
        sentence_bh: Sentence embeddings as the model pools them, shape ``(batch, hidden)``; None for views that are not
            encoded, as are the next two.
        tokens_blh: States of the last layer, shape ``(batch, length, hidden)``.
        mask_bl: True at real pieces, specials included, shape ``(batch, length)``.
    """

    features: Mapping[str, Tensor]
    table_vh: Tensor
    sentence_bh: Any = None
    tokens_blh: Any = None
    mask_bl: Any = None

    @property
    def ids_bl(self) -> Tensor:
        """Piece ids, shape ``(batch, length)``."""
        return self.features["input_ids"]


def unwrap(model: nn.Module) -> SentenceTransformer:
    """The SentenceTransformer inside the wrappers of distributed training and compilation."""
    for attribute in ("module", "_orig_mod"):
        model = getattr(model, attribute, model)
    return model


def encode_views(
    model: Callable[[dict[str, Any]], dict[str, Any]], views: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Encoding]:
    """Encode every view once; views with the same kinds of inputs (source and target) share one call.

    Args:
        model: A SentenceTransformer, wrapped for distributed training or not.
        views: ``{view: {feature: tensor}}``, as the collator builds them. Views without ``input_ids`` are not encoded.

    Returns:
        ``{view: Encoding}``.
    """
    transformer: Any = unwrap(model)[0]
    encoder = transformer.auto_model
    table_vh = encoder.get_input_embeddings().weight
    encodings = {name: Encoding(features, table_vh) for name, features in views.items()}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, features in views.items():
        if inputs := tuple(key for key in ENCODER_INPUTS if key in features):
            groups.setdefault(inputs, []).append(name)
    for inputs, names in groups.items():
        joined = {key: _stack([views[name][key] for name in names]) for key in inputs}
        if "position_ids" in joined:
            joined["position_ids"] = joined["position_ids"] + first_position(encoder)
        output = model(dict(joined))
        start = 0
        for name in names:
            batch, length = views[name]["input_ids"].shape
            rows = slice(start, start + batch)
            encodings[name] = Encoding(
                views[name],
                table_vh,
                output["sentence_embedding"][rows],
                output["token_embeddings"][rows, :length],
                views[name]["attention_mask"].bool(),
            )
            start += batch
    return encodings


def _stack(tensors: list[Tensor]) -> Tensor:
    """Concatenate ``(batch, length)`` tensors along the batch, padded with zeros to the longest."""
    longest = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([F.pad(tensor, (0, longest - tensor.shape[1])) for tensor in tensors])
