"""Padding-free encoding: all sentences of a batch in one packed sequence of tokens, attention inside each sentence.

Half of a padded batch of 64 Tatoeba sentences is padding. Inside ``packed(model)`` a batch is flattened before the encoder
and padded again after it, so all other code (pooling, ``encode``, evaluators, objectives) is unaffected. Linear layers, norms
and activations run on real tokens only. Attention runs on groups of sentences of equal length, which are adjacent in the
packed sequence, or, on a CUDA device in half precision, in one kernel for sequences of any length. The result equals that of
a padded batch; it is not an approximation.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import CNN
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from metaphrase.encoders.positions import first_position
from metaphrase.modeling.attention import using_attention

logger = logging.getLogger(__name__)

ATTENTION = "metaphrase_packed"

HALVES = (torch.float16, torch.bfloat16)

#: The operator that `varlen_attn` calls; unlike `varlen_attn` it supports dropout. It is differentiable.
flash_attention: Any = getattr(torch.ops.aten, "_flash_attention_forward", None)

#: Architectures that support packing and have the layout of BERT: ``encoder.layer`` and no module after it.
PACKABLE = frozenset(
    {"bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "xlm-roberta"}
)
#: Architectures that support packing and have another layout.
PACKABLE_OTHERS = frozenset(
    {"albert", "distilbert", "jina_embeddings_v3", "nomic_bert", "roberta-prelayernorm", "xlm-roberta-xl"}
)


@dataclass(frozen=True)
class Packing:
    """Layout of the sentences of a padded batch in the packed sequence.

    Attributes:
        token_n: Index of each token of the sequence in the flattened padded batch, shape ``(tokens,)``.
        position_n: Position of each token in its sentence, from 0, shape ``(tokens,)``.
        groups: ``(sentences, length)`` of each run of sentences of equal length, shortest first.
        shape: ``(batch, length)`` of the padded batch.
    """

    token_n: Tensor
    position_n: Tensor
    groups: tuple[tuple[int, int], ...]
    shape: tuple[int, int]

    @cached_property
    def starts_n(self) -> Tensor:
        """Start of each sentence in the packed sequence, and the end of the last one; int32, shape ``(sentences + 1,)``."""
        lengths = [length for sentences, length in self.groups for _ in range(sentences)]
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.token_n.device)

    @cached_property
    def visible_bl(self) -> Tensor:
        """The mask of the padded batch; one token of a sentence without any is visible, so that its attention is defined."""
        mask_bl = self.pad(torch.ones_like(self.token_n, dtype=torch.bool))
        mask_bl[:, 0] |= ~mask_bl.any(dim=1)
        return mask_bl

    @classmethod
    def of(cls, mask_bl: Tensor) -> Packing:
        """Compute the layout of a padded batch.

        The tokens of a sentence need not be contiguous.
        """
        mask_bl = mask_bl.bool()
        length_b = mask_bl.sum(dim=1)
        order_b = length_b.argsort(stable=True)
        place_bl = torch.arange(mask_bl.numel(), device=mask_bl.device).view_as(mask_bl)
        position_bl = mask_bl.cumsum(dim=1) - 1
        sorted_mask_bl = mask_bl[order_b]
        lengths, counts = torch.unique_consecutive(length_b[order_b], return_counts=True)
        return cls(
            token_n=place_bl[order_b][sorted_mask_bl],
            position_n=position_bl[order_b][sorted_mask_bl],
            groups=tuple((n, length) for n, length in zip(counts.tolist(), lengths.tolist(), strict=True) if length),
            shape=(mask_bl.shape[0], mask_bl.shape[1]),
        )

    def flatten(self, tensor_bl: Tensor) -> Tensor:
        """``(batch, length, …)`` → ``(tokens, …)``."""
        return tensor_bl.flatten(0, 1)[self.token_n]

    def pad(self, tensor_n: Tensor) -> Tensor:
        """``(tokens, …)`` → ``(batch, length, …)``, zeros at padding."""
        flat = tensor_n.new_zeros(self.shape[0] * self.shape[1], *tensor_n.shape[1:])
        return flat.index_copy(0, self.token_n, tensor_n).view(*self.shape, *tensor_n.shape[1:])


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' ``AttentionInterface``: each sentence of the packed sequence attends to itself.

    On a CUDA device in half precision, this is one kernel for all lengths (see `one_kernel`): `varlen_attn`, or the operator
    that it calls if there is dropout, which `varlen_attn` does not support. Where that is not available, as in
    float32, it is SDPA of the padded batch: launching a kernel for each length takes longer than the padding. On other
    devices it is SDPA per group of sentences of equal length.

    Queries, keys and values have shape ``(1, heads, tokens, head)``, the output ``(1, tokens, heads, head)``. Without a
    packing, the batch is padded, and the mask is passed to SDPA.
    """
    if packing is None:
        out = F.scaled_dot_product_attention(query, key, value, attention_mask, dropout_p=dropout, scale=scaling)
        return out.transpose(1, 2), None
    if one_kernel(query, dropout):
        return _varlen(query, key, value, packing, scaling, dropout), None
    if query.is_cuda:
        return padded_attention(query, key, value, packing, scaling, dropout), None
    heads, width = query.shape[1], query.shape[3]
    outputs = []
    tokens = [sentences * length for sentences, length in packing.groups]
    parts = (x[0].split(tokens, dim=1) for x in (query, key, value))  # the gradient of slices would be a sum of zeros
    slow_backward = query.device.type == "cpu" and query.dtype in HALVES and query.requires_grad  # of the fused kernel
    with sdpa_kernel(SDPBackend.MATH) if slow_backward else nullcontext():
        for (sentences, length), *group in zip(packing.groups, *parts, strict=True):
            query_nl, key_nl, value_nl = (x.unflatten(1, (sentences, length)).transpose(0, 1) for x in group)
            out = F.scaled_dot_product_attention(query_nl, key_nl, value_nl, dropout_p=dropout, scale=scaling)
            outputs.append(out.transpose(1, 2).reshape(sentences * length, heads, width))
    return torch.cat(outputs).unsqueeze(0), None


def one_kernel(query: Tensor, dropout: float) -> bool:
    """Whether sentences of all lengths can attend in one kernel: FlashAttention, on NVIDIA Ampere or later.

    The kernel supports head sizes up to 256 in steps of 8.
    """
    fits = query.is_cuda and query.dtype in HALVES and query.shape[3] % 8 == 0 and query.shape[3] <= 256
    if not fits or (dropout and flash_attention is None):
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """Attention of the packed sequence in one kernel; shapes as in `grouped_attention`."""
    query_nah, key_nah, value_nah = (x[0].transpose(0, 1) for x in (query, key, value))
    where = packing.starts_n, packing.starts_n, packing.groups[-1][1], packing.groups[-1][1]
    if dropout:
        out_nah, *_ = flash_attention(query_nah, key_nah, value_nah, *where, dropout, False, False, scale=scaling)
    else:
        out_nah = varlen_attn(query_nah, key_nah, value_nah, *where, scale=scaling)
    return out_nah.unsqueeze(0)


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """Attention of the padded batch; shapes as in `grouped_attention`."""
    query_balh, key_balh, value_balh = (packing.pad(x[0].transpose(0, 1)).transpose(1, 2) for x in (query, key, value))
    mask_b11l = packing.visible_bl[:, None, None]
    out = F.scaled_dot_product_attention(query_balh, key_balh, value_balh, mask_b11l, dropout_p=dropout, scale=scaling)
    return packing.flatten(out.transpose(1, 2)).unsqueeze(0)


def _mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """No mask for a packed sequence; the mask of SDPA for a padded batch."""
    if attention_mask is None:
        return None
    return AttentionMaskInterface()["sdpa"](*args, attention_mask=attention_mask, **kwargs)


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, _mask)


def can_pack(encoder: PreTrainedModel) -> bool:
    """Whether an encoder can run without padding.

    All tokens of a sentence must attend to each other in every layer, through the attention interface of transformers.
    Architectures with other masks (causal, sliding windows) or with keys shared between heads are not packed. Tested
    architectures are listed in ``PACKABLE`` and ``PACKABLE_OTHERS``.
    """
    known = PACKABLE | PACKABLE_OTHERS
    if encoder.config.model_type not in known or getattr(encoder.config, "is_decoder", False):
        return False
    parameters = inspect.signature(type(encoder).forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return bool(encoder.is_backend_compatible()) and "position_ids" in parameters and takes_any


@cache
def notice(encoder: str, reason: str) -> None:
    """Log once per process and reason that encoders of a class run padded."""
    logger.warning("Sentences are padded for %s: %s.", encoder, reason)


def _flatten_features(features: dict[str, Any], packing: Packing, offset: int) -> dict[str, Any]:
    """Replace the encoder's padded inputs by those of the packed sequence; positions start at ``offset``."""
    flat = {name: value for name, value in features.items() if name != "attention_mask"}
    for name in ("input_ids", "token_type_ids", "position_ids", "inputs_embeds"):
        if name in flat:
            flat[name] = packing.flatten(flat[name]).unsqueeze(0)
    flat.setdefault("position_ids", (packing.position_n + offset).unsqueeze(0))
    return flat


def token_states(encoder: PreTrainedModel, mask_bl: Tensor, **inputs: Tensor) -> Tensor:
    """Compute the last layer's states of an encoder whose attention is ``ATTENTION``, without padding if that is possible.

    Returns shape ``(batch, length, hidden)``, undefined at padding.
    """
    if not can_pack(encoder):
        return encoder(**inputs, attention_mask=mask_bl.long()).last_hidden_state
    packing = Packing.of(mask_bl)
    flat = _flatten_features(inputs, packing, first_position(encoder))
    return packing.pad(encoder(**flat, packing=packing).last_hidden_state[0])


def why_padded(model: SentenceTransformer) -> str | None:
    """Why a model runs padded, or None. Convolutions read padding; padding on the left shifts positions."""
    if not can_pack(model[0].auto_model):
        return "it cannot run without padding"
    if model.tokenizer.padding_side == "left":
        return "its tokenizer pads on the left"
    return "its module CNN reads padding" if any(isinstance(module, CNN) for module in model) else None


@contextmanager
def packed(model: SentenceTransformer, *, enabled: bool = True) -> Iterator[bool]:
    """Run a SentenceTransformer without padding inside this block.

    All uses of the model (training, ``encode``, evaluators) produce the same results as outside of the block, and are
    faster if sentences differ in length. A model that cannot be packed, or whose results depend on padding, runs padded,
    with one log message per process and class of encoder.

    Args:
        model: The model; its first module must be a Transformer.
        enabled: False makes this a no-op.

    Yields:
        Whether the model runs packed.
    """
    transformer: Any = model[0]
    encoder = transformer.auto_model
    reason = why_padded(model)
    if reason or not enabled:
        if reason and enabled:
            notice(type(encoder).__name__, reason)
        yield False
        return
    offset = first_position(encoder)

    pending: list[tuple[dict[str, Any], Packing]] = []

    def flatten(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        features = args[0] if args else kwargs.pop("features")
        mask_bl = features.get("attention_mask")
        if mask_bl is None or mask_bl.dim() != 2 or "visible" in features:
            return (features,), kwargs
        packing = Packing.of(mask_bl)
        pending[:] = [(features, packing)]  # replaces that of a forward pass that failed
        return ({**_flatten_features(features, packing, offset), "packing": packing},), kwargs

    def pad(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: dict[str, Any]
    ) -> dict[str, Any]:
        if "packing" not in output:
            return output
        padded, packing = pending.pop()
        padded["token_embeddings"] = packing.pad(output["token_embeddings"][0])
        if "all_layer_embeddings" in output:
            padded["all_layer_embeddings"] = tuple(packing.pad(h[0]) for h in output["all_layer_embeddings"])
        return padded

    hooks = [
        transformer.register_forward_pre_hook(flatten, with_kwargs=True),
        transformer.register_forward_hook(pad, with_kwargs=True),
    ]
    try:
        with using_attention(encoder, ATTENTION):
            yield True
    finally:
        for hook in hooks:
            hook.remove()
