"""Encoders that are not trained by gradient: momentum encoders and copies of the original encoder."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metaphrase.encoders.pooler import remove_pooler
from metaphrase.modeling.packing import ATTENTION, Packing, can_pack, first_position


def frozen(encoder: PreTrainedModel) -> PreTrainedModel:
    """Freeze an encoder in place: no pooler, no gradient, and no padding if its architecture supports that."""
    remove_pooler(encoder)
    if can_pack(encoder):
        encoder.set_attn_implementation(ATTENTION)
    return encoder.requires_grad_(False)


@torch.no_grad()
def token_states(encoder: PreTrainedModel, ids_bl: Tensor, mask_bl: Tensor) -> Tensor:
    """Compute the last layer's states of a frozen encoder.

    Returns shape ``(batch, length, hidden)``.
    """
    if not can_pack(encoder):
        states_blh: Tensor = encoder(input_ids=ids_bl, attention_mask=mask_bl.long()).last_hidden_state
        return states_blh
    packing = Packing.of(mask_bl)
    flat = {"input_ids": packing.flatten(ids_bl), "position_ids": packing.position_n + first_position(encoder)}
    states_1nh = encoder(**{k: v.unsqueeze(0) for k, v in flat.items()}, packing=packing).last_hidden_state
    return packing.pad(states_1nh[0])
