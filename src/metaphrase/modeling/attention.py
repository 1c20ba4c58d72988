"""Encoding with an arbitrary attention mask, and access to the attention probabilities of the top layer.

``observed(encoder)`` is for passes that specify which position may attend to which and that read the attention of the last
layer. All layers run SDPA; the probabilities are computed for the last layer only, and returned as they are before dropout.
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

from metaphrase.exceptions import UsageError

ATTENTION = "metaphrase_observed"


@dataclass
class Observer:
    """Queries and keys of the most recent attention layer.

    Attributes:
        query: Queries, shape ``(batch, heads, length, size of a head)``.
        key: Keys, of the same shape.
        scaling: Factor of their products.
        visible: True where a position attends to another one, shape ``(batch, 1, length, length)``.
    """

    query: Any = None
    key: Any = None
    scaling: Any = None
    visible: Any = None

    def probabilities(self) -> Tensor:
        """Compute the attention probabilities of the top layer.

        Shape ``(batch, heads, length, length)``, float32 or wider. Row ``i`` holds the attention of position ``i``; rows of
        padding are undefined.
        """
        wide = torch.promote_types(self.query.dtype, torch.float32)
        with torch.autocast(self.query.device.type, enabled=False):
            scores_bell = self.query.to(wide) @ self.key.to(wide).transpose(-1, -2) * self.scaling
        return scores_bell.masked_fill(~self.visible, -torch.inf).softmax(dim=-1)


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
    """Attention function for the ``AttentionInterface`` of transformers, with ``visible`` as the only mask."""
    if (groups := query.shape[1] // key.shape[1]) > 1:  # several heads share keys and values (EuroBERT, Gemma)
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    observer.query, observer.key = query, key
    observer.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    observer.visible = visible[:, None]
    out = F.scaled_dot_product_attention(query, key, value, visible[:, None], dropout_p=dropout, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


@contextmanager
def observed(encoder: PreTrainedModel) -> Iterator[Observer]:
    """Make an encoder use the attention masks among its inputs inside this block.

    Inside the block, its forward accepts ``visible``, a boolean mask of shape ``(batch, length, length)``, and ``observer``,
    the object that this context manager yields.

    Gradient checkpointing is refused: it would recompute the layers outside of this block, without the masks.
    """
    if encoder.is_activation_checkpointing and encoder.training:
        raise UsageError(
            "Gradient checkpointing is not supported for objectives that read attention. Remove --activation_checkpointing; "
            "--micro_batch_size saves more memory and yields the same gradient."
        )
    with using_attention(encoder, ATTENTION):
        yield Observer()


@contextmanager
def using_attention(encoder: PreTrainedModel, name: str) -> Iterator[None]:
    """Compute attention with a registered function inside this block."""
    before = encoder.config._attn_implementation  # noqa: SLF001 - transformers has no public reader
    encoder.set_attn_implementation(name)
    try:
        yield
    finally:
        encoder.set_attn_implementation(before)
