"""Encodings: the encoder's outputs for the views of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from metaphrase.encoders.positions import first_position
from metaphrase.exceptions import UsageError
from metaphrase.modeling.attention import observed
from metaphrase.modeling.languages import LanguageEmbedding

#: Features of a view that the encoder reads; the others are for the objectives.
ENCODER_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "visible")


@dataclass(frozen=True)
class Encoding:
    """An encoded view.

    Attributes:
        features: The tensors of the view, e.g. ``labels`` or ``text``.
        table_vh: The encoder's input embeddings, the output table of tied heads, shape ``(vocabulary, hidden)``.
        sentence_bh: Sentence embeddings as the model pools them, shape ``(batch, hidden)``; None, like the following
            attributes, for views that are not encoded.
        tokens_blh: States of the tokens as the modules leave them, shape ``(batch, length, hidden)``.
        mask_bl: True at tokens, including special tokens, false at padding, shape ``(batch, length)``.
        attention_bell: Attention probabilities of the heads (``e``) of the top layer, shape
            ``(batch, heads, length, length)``; only for views with the feature ``visible``.
    """

    features: Mapping[str, Tensor]
    table_vh: Tensor
    sentence_bh: Any = None
    tokens_blh: Any = None
    mask_bl: Any = None
    attention_bell: Any = None

    @property
    def ids_bl(self) -> Tensor:
        """Piece ids, shape ``(batch, length)``."""
        return self.features["input_ids"]


def unwrap(model: nn.Module) -> SentenceTransformer:
    """Return the SentenceTransformer inside the wrappers of distributed training and compilation."""
    for attribute in ("module", "_orig_mod"):
        model = getattr(model, attribute, model)
    return model


def has_decoder(encoder: PreTrainedModel) -> bool:
    """Whether a decoder follows the encoder. It reads piece ids, so neither language embeddings nor micro-batches work."""
    return bool(encoder.config.is_encoder_decoder) and hasattr(encoder, "decoder")  # T5's encoder alone has none


def encode_views(
    model: Callable[[dict[str, Any]], dict[str, Any]],
    views: Mapping[str, Mapping[str, Tensor]],
    language_embedding: LanguageEmbedding | None = None,
    *,
    micro_batch_size: int | None = None,
) -> dict[str, Encoding]:
    """Encode every view once; views with the same kinds of inputs, such as source and target, share one call.

    Args:
        model: A SentenceTransformer, optionally wrapped for distributed training.
        views: ``{view: {feature: tensor}}``, as built by the collator. Views without ``input_ids`` are not encoded.
        language_embedding: Adds a vector per language to the encoder's input.
        micro_batch_size: Rows to encode at a time. Activations are recomputed per micro-batch in the backward pass, with the
            same dropout: the gradient is the same, the memory is that of one micro-batch, and the cost is one more forward
            pass (GradCache). None encodes all rows at once.

    Returns:
        ``{view: Encoding}``.

    Raises:
        ValueError: A language embedding is given, and a view has no feature ``language``.

    Reference: Gao et al. 2021, Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup.
    """
    transformer: Any = unwrap(model)[0]
    encoder = transformer.auto_model
    embeddings: Any = encoder.get_input_embeddings()
    table_vh = embeddings.weight
    inputs = {name: _inputs(features, encoder) for name, features in views.items()}
    encodings = {name: Encoding(features, table_vh) for name, features in views.items()}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, given in inputs.items():
        if given:
            groups.setdefault(tuple(given), []).append(name)
    for keys, names in groups.items():
        joined = {key: _stack([inputs[name][key] for name in names]) for key in keys}
        rows = len(joined["input_ids"])
        size = rows if micro_batch_size is None or not torch.is_grad_enabled() else micro_batch_size
        if language_embedding is not None or size < rows:  # one gradient of the table instead of one per micro-batch
            joined["inputs_embeds"] = embeddings(joined.pop("input_ids"))
        if language_embedding is not None:
            language_b = torch.cat([_languages(name, views[name]) for name in names])
            joined["inputs_embeds"] = joined["inputs_embeds"] + language_embedding(language_b)[:, None]
        sentence_bh, tokens_blh, attention_bell = _encode(model, encoder, joined, size)
        start = 0
        for name in names:
            batch, length = views[name]["input_ids"].shape
            own = slice(start, start + batch)
            encodings[name] = Encoding(
                views[name],
                table_vh,
                sentence_bh[own],
                tokens_blh[own, :length],
                views[name]["attention_mask"].bool(),
                None if attention_bell is None else attention_bell[own, :, :length, :length],
            )
            start += batch
    return encodings


def _inputs(features: Mapping[str, Tensor], encoder: PreTrainedModel) -> dict[str, Tensor]:
    """Select the encoder's inputs from a view and adapt positions and token types to the encoder."""
    inputs = {key: features[key] for key in ENCODER_INPUTS if key in features} if "input_ids" in features else {}
    if "position_ids" in inputs:
        inputs["position_ids"] = inputs["position_ids"] + first_position(encoder)
    if getattr(encoder.config, "type_vocab_size", 0) < 2:
        inputs.pop("token_type_ids", None)
    return inputs


Output = tuple[Tensor, Tensor, Tensor | None]


def _encode(model: Any, encoder: PreTrainedModel, inputs: dict[str, Tensor], size: int) -> Output:
    """Sentence embeddings, token states and, if ``visible`` is among the inputs, attention of the top layer."""
    rows = len(inputs["attention_mask"])
    if size >= rows:
        return _call(model, encoder, inputs)
    outputs = []
    for start in range(0, rows, size):
        part = {key: value[start : start + size] for key, value in inputs.items()}
        call = _RecomputableCall(model, encoder)
        outputs.append(checkpoint(call, part, use_reentrant=False, early_stop=False))
    sentences, tokens, attentions = zip(*outputs, strict=True)
    return torch.cat(sentences), torch.cat(tokens), None if attentions[0] is None else torch.cat(attentions)


class _RecomputableCall:
    """Encoder call of a micro-batch; its recomputation in the backward pass bypasses the distributed wrapper."""

    def __init__(self, model: Any, encoder: PreTrainedModel) -> None:
        self.model, self.encoder = model, encoder

    def __call__(self, inputs: dict[str, Tensor]) -> Output:
        output = _call(self.model, self.encoder, inputs)
        self.model = unwrap(self.model)
        return output


def _call(model: Any, encoder: PreTrainedModel, inputs: dict[str, Tensor]) -> Output:
    if "visible" not in inputs:
        output = model(dict(inputs))
        return output["sentence_embedding"], output["token_embeddings"], None
    visible_bll = inputs["visible"].bool()
    diagonal_ll = torch.eye(visible_bll.shape[1], dtype=torch.bool, device=visible_bll.device)
    blind_bl1 = ~visible_bll.any(dim=-1, keepdim=True)
    visible_bll = visible_bll | (diagonal_ll & blind_bl1)  # a softmax over nothing is NaN: padding attends to itself
    with observed(encoder) as observer:
        output = model({**inputs, "visible": visible_bll, "observer": observer})
    sentence_bh, tokens_blh = output["sentence_embedding"], output["token_embeddings"]
    # An objective may read the attention alone, which does not depend on the values and outputs of the top layer. DDP waits
    # for a gradient of every parameter of the forward pass, so they get a gradient of zero.
    zero = (sentence_bh * 0.0).sum() + (tokens_blh * 0.0).sum()
    probabilities_bell = observer.probabilities()
    return sentence_bh, tokens_blh, probabilities_bell + zero.to(probabilities_bell.dtype)


def _languages(name: str, features: Mapping[str, Tensor]) -> Tensor:
    if "language" not in features:
        raise UsageError(
            f"An input language embedding requires the language of every text, but view {name!r} does not provide it. "
            "Remove the objective that reads this view, or set language_embedding to false."
        )
    return features["language"]


def _stack(tensors: list[Tensor]) -> Tensor:
    """Concatenate along the batch, padded with zeros to the longest: ``(batch, length)`` or ``(batch, length, length)``."""
    longest = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([F.pad(tensor, (0, longest - tensor.shape[1]) * (tensor.dim() - 1)) for tensor in tensors])
