"""Position ids of encoders, and the length of texts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import PreTrainedModel

from metaphrase.exceptions import UsageError


def first_position(encoder: PreTrainedModel) -> int:
    """The id of the first position: 0 for BERT, ``padding_idx + 1`` for RoBERTa and XLM-R."""
    for module in encoder.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and isinstance(getattr(module, "position_embeddings", None), nn.Embedding):
            return padding + 1
    return 0


def max_positions(encoder: PreTrainedModel) -> int | None:
    """Tokens of the longest sequence; None if the encoder has no limit.

    DeBERTa without ``position_biased_input``, such as mDeBERTa, has no table of positions, and clips long distances.
    """
    held = getattr(encoder.config, "max_position_embeddings", None)
    if held is None or held < 0 or not getattr(encoder.config, "position_biased_input", True):
        return None
    return held - first_position(encoder)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluate a module inside this block. Afterwards, each of its parts is in its mode before the block."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def reads_positions(encoder: PreTrainedModel) -> bool:
    """Whether the states of an encoder depend on its position ids; not if it only has relative positions by distance."""
    if "position_ids" not in inspect.signature(encoder.forward).parameters:
        return False
    id_1l = torch.arange(4, device=encoder.device)[None]
    inputs = {"input_ids": id_1l, "attention_mask": torch.ones_like(id_1l)}
    with evaluating(encoder), torch.no_grad():
        continuous, restarted = (
            encoder(**inputs, position_ids=position_1l + first_position(encoder)).last_hidden_state
            for position_1l in (id_1l, id_1l % 2)
        )
    return not torch.equal(continuous, restarted)


def check_length(encoder: PreTrainedModel, max_length: int) -> None:
    """Check that the encoder has positions for texts of a length."""
    positions = max_positions(encoder)
    if positions is not None and max_length > positions:
        raise UsageError(
            f"A maximum length of {max_length} tokens was requested, but the encoder has {positions} positions. Lower "
            "max_length."
        )


def set_max_length(model: SentenceTransformer, max_length: int | None) -> None:
    """Set the number of tokens at which a text is truncated; None keeps the model's own, up to the encoder's positions."""
    encoder = model[0].auto_model
    positions = max_positions(encoder)
    if max_length is not None:
        check_length(encoder, max_length)
        model.max_seq_length = max_length
    elif positions is not None and not 0 < (model.max_seq_length or 0) <= positions:
        model.max_seq_length = positions
