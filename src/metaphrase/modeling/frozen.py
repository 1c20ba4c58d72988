"""Encoders that are not trained by gradient: momentum encoders, teachers, and copies of the original encoder."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from sentence_transformers.sentence_transformer.modules import CNN, WeightedLayerPooling
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from metaphrase.encoders.pooler import remove_pooler
from metaphrase.exceptions import ModelError, UsageError
from metaphrase.io.digests import module_settings, tensors_digest
from metaphrase.modeling.encoding import Encoding
from metaphrase.modeling.packing import ATTENTION, can_pack, token_states


def frozen(encoder: PreTrainedModel) -> PreTrainedModel:
    """Freeze an encoder in place, remove its pooler, and run it without padding if its architecture supports that."""
    remove_pooler(encoder)
    if can_pack(encoder):
        encoder.set_attn_implementation(ATTENTION)
    return encoder.requires_grad_(False)


class FrozenEncoding(NamedTuple):
    """Outputs of a frozen model for a view.

    Attributes:
        sentence_bh: Sentence embeddings, shape ``(batch, hidden)``.
        tokens_blh: States of the tokens as the modules leave them, shape ``(batch, length, hidden)``.
    """

    sentence_bh: Tensor
    tokens_blh: Tensor


class FrozenEncoder:
    """A frozen model: a copy of the one before training, or a teacher. It is neither saved nor released.

    Objectives share a copy, and a view is encoded once per batch, however many objectives read it.

    Args:
        encoder: The encoder, which is frozen in place.
        modules: The modules of the model after the Transformer, such as the pooling, which are frozen too.

    Attributes:
        digest: Digest of the weights, and of the settings of the modules.

    Raises:
        ModelError: A module reads padding, or other layers than the last one.
        UsageError: When called: the word embeddings that it shares are no longer frozen.
    """

    def __init__(self, encoder: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
        self.encoder = frozen(encoder).eval()
        self.modules = nn.Sequential(*modules).requires_grad_(False).eval()
        for module in self.modules:
            if isinstance(module, CNN | WeightedLayerPooling):
                raise ModelError(
                    "A frozen model, which the encoder is compared with, has no padding and only states of the last layer, "
                    f"but its module {type(module).__name__} reads more. Use a model without it, or an objective that reads "
                    "no original model or teacher, such as 'tr'."
                )
        weights = self.encoder.state_dict(prefix="encoder.") | self.modules.state_dict(prefix="modules.")
        self.digest = tensors_digest(weights, module_settings(self.modules))

    @classmethod
    def copy_of(cls, encoder: PreTrainedModel, modules: Iterable[nn.Module]) -> FrozenEncoder:
        """Copy a model; the copy shares its word embeddings if they are frozen."""
        table: Any = encoder.get_input_embeddings()
        shared = {} if table.weight.requires_grad else {id(table): table}
        return cls(copy.deepcopy(encoder, shared), map(copy.deepcopy, modules))

    @cached_property
    def _encoded(self) -> Any:
        """The encodings of the batch, by the piece ids of the view."""
        return WeakTensorKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_encoded"}

    @torch.no_grad()
    def __call__(self, encoding: Encoding) -> FrozenEncoding:
        """Encode the sentences of a view, without gradient; embeddings are truncated to the size of the view's own."""
        table: Any = self.encoder.get_input_embeddings()
        if table.weight.requires_grad:
            raise UsageError(
                "The word embeddings were frozen when the loss was built, so the original model shares them, but they are "
                "trained now. Set requires_grad before you build the loss."
            )
        if encoding.ids_bl not in self._encoded:
            for part in (self.encoder, self.modules):
                part.to(device=encoding.table_vh.device, dtype=encoding.table_vh.dtype)
            tokens_blh = token_states(self.encoder, encoding.mask_bl, input_ids=encoding.ids_bl)
            features = {"token_embeddings": tokens_blh, "attention_mask": encoding.mask_bl.long()}
            output = self.modules(features)
            self._encoded[encoding.ids_bl] = FrozenEncoding(output["sentence_embedding"], output["token_embeddings"])
        encoded: FrozenEncoding = self._encoded[encoding.ids_bl]
        if encoding.sentence_bh is None:
            return encoded
        return encoded._replace(sentence_bh=encoded.sentence_bh[:, : encoding.sentence_bh.shape[1]])
