"""Position ids of encoders."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def first_position(encoder: PreTrainedModel) -> int:
    """The id of the first position: 0 for BERT, ``padding_idx + 1`` for RoBERTa and XLM-R."""
    for module in encoder.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and isinstance(getattr(module, "position_embeddings", None), nn.Embedding):
            return padding + 1
    return 0
