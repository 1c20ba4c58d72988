"""Encoding under a mask of one's own, with the attention probabilities of the top layer.

``observed(encoder)`` is for passes that say which position may attend to which and read what the last layer attended to.
Only that layer's probabilities are made, and before dropout; all layers compute with SDPA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

ATTENTION = "metaphrase_observed"


@dataclass
class Observer:
    """Queries and keys of the attention layer that ran last."""

    query: Any = None
    key: Any = None
    scaling: Any = None
    visible: Any = None

    def probabilities(self) -> Tensor:
        """Attention probabilities of the top layer, in float32 or wider, shape ``(batch, heads, length, length)``.

        Row ``i`` says what position ``i`` attended to. Rows of padding are undefined.
        """
        wide = torch.promote_types(self.query.dtype, torch.float32)
        with torch.autocast(self.query.device.type, enabled=False):
            scores_bhll = self.query.to(wide) @ self.key.to(wide).transpose(-1, -2) * self.scaling
        return scores_bhll.masked_fill(~self.visible, -torch.inf).softmax(dim=-1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    visible: Tensor,
    observer: Observer,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' ``AttentionInterface``: ``visible`` alone is the mask."""
    observer.query, observer.key = query, key
    observer.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    observer.visible = visible[:, None]
    out = F.scaled_dot_product_attention(query, key, value, visible[:, None], dropout_p=dropout, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


@contextmanager
def observed(encoder: PreTrainedModel) -> Iterator[Observer]:
    """Let an encoder attend under the masks that come with its inputs, inside this block.

    Its forward then takes ``visible``, boolean, shape ``(batch, length, length)``, and ``observer``, what this yields.

    Args:
        encoder: A model that attends through transformers' interface (see :func:`can_observe`).

    Yields:
        Where the top layer's queries and keys are found after a pass.

    Raises:
        ValueError: The encoder checkpoints its layers: they would be made again outside of this block, without the masks.
    """
    if encoder.is_activation_checkpointing and encoder.training:
        raise ValueError(
            "An objective that reads attention cannot be trained with gradient checkpointing. Leave --gradient_checkpointing "
            "out; --micro_batch_size saves more memory, with the same gradient."
        )
    before = encoder.config._attn_implementation
    encoder.set_attn_implementation(ATTENTION)
    try:
        yield Observer()
    finally:
        encoder.set_attn_implementation(before)


def can_observe(encoder: PreTrainedModel) -> bool:
    """Whether an encoder attends through transformers' interface."""
    return bool(getattr(encoder, "_supports_attention_backend", False))
