"""Bulk encoding: a faster ``SentenceTransformer.encode`` for many texts.

Texts are tokenised once, sorted by their number of tokens (not of characters), divided into batches with similar numbers
of tokens, and encoded without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from metaphrase.exceptions import UsageError
from metaphrase.modeling.packing import packed
from metaphrase.modeling.precision import bfloat16
from metaphrase.modeling.views import pad_rows

#: Tokens per batch: few on a CPU, to fit its caches, and many on a GPU, to keep it busy.
CPU_TOKENS = 1024
GPU_TOKENS = 32_768
#: Texts that are tokenised and sorted together.
WINDOW = 1 << 15

#: Disables padding and tensors in sentence-transformers' preprocessing.
_RAGGED = {"text": {"padding": False}, "common": {"return_tensors": None}}
#: Features with one value per token.
_OF_TOKENS = ("input_ids", "token_type_ids")


@torch.inference_mode()
def encode(
    model: SentenceTransformer,
    sentences: Sequence[str],
    *,
    prompt: str | None = None,
    prompt_name: str | None = None,
    normalize_embeddings: bool = False,
    convert_to_tensor: bool = False,
    tokens: int | None = None,
    bf16: bool = False,
    advance: Callable[[int], None] = lambda n: None,
) -> NDArray[Any] | Tensor:
    """Embed sentences; the result equals ``model.encode`` up to rounding.

    Models that do not start with a text encoder of transformers (static embeddings, routers, images), that pad on the
    left, or that already run without padding (FlashAttention) fall back to ``model.encode``.

    Args:
        model: The model, with any modules after its encoder.
        sentences: Texts; a sequence on disk is read ``WINDOW`` texts at a time.
        prompt: Text before each sentence. None uses ``prompt_name``, or the model's default prompt.
        prompt_name: Name of a prompt that the model stores.
        normalize_embeddings: Normalise every embedding to length 1.
        convert_to_tensor: Return a tensor on the model's device instead of an array.
        tokens: Tokens per batch, including padding if the encoder requires it. None uses ``CPU_TOKENS`` or
            ``GPU_TOKENS``.
        bf16: Compute in bfloat16, which is faster on GPUs and on CPUs with bfloat16 instructions. The embeddings are float32,
            with cosines above 0.99 to those without this option.
        advance: Called with the number of newly embedded sentences.

    Returns:
        Embeddings in the order of the sentences, shape ``(sentences, hidden)``.

    Raises:
        UsageError: ``sentences`` is a single string or an iterator, or the model does not store the prompt.
    """
    if isinstance(sentences, str) or not hasattr(sentences, "__getitem__"):
        raise UsageError(
            f"encode() requires a list of sentences, but got a {type(sentences).__name__}. Pass [text] or list(texts)."
        )
    prompt = _prompt(model, prompt, prompt_name)
    budget = tokens or (CPU_TOKENS if model.device.type == "cpu" else GPU_TOKENS)
    model.eval()
    if not len(sentences):
        nothing = torch.zeros(0, model.get_embedding_dimension(), device=model.device)
        return nothing if convert_to_tensor else nothing.cpu().numpy()
    windows = []
    for first in range(0, len(sentences), WINDOW):
        window = list(sentences[first : first + WINDOW])
        if is_text_transformer(model):
            with packed(model), bfloat16(model, enabled=bf16):
                embeddings_nh = _embed(model, window, budget, prompt, normalize_embeddings)
        else:
            how = {"prompt": prompt or "", "show_progress_bar": False}
            with bfloat16(model, enabled=bf16):
                with model.truncate_embeddings(None):
                    embeddings_nh = model.encode(window, convert_to_tensor=True, **how)
                embeddings_nh = _finished(model, embeddings_nh, normalize_embeddings)
        windows.append(embeddings_nh if convert_to_tensor else _array(embeddings_nh))
        advance(len(window))
    return torch.cat(windows) if convert_to_tensor else np.concatenate(windows)


def _prompt(model: SentenceTransformer, prompt: str | None, name: str | None) -> str | None:
    if prompt is not None:
        return prompt
    if name is not None and name not in model.prompts:
        raise UsageError(
            f"The model does not store the prompt {name!r}. Its prompts: {', '.join(model.prompts) or 'none'}."
        )
    return model.prompts.get(name or model.default_prompt_name)


def distinct_texts(sides: Iterable[Iterable[str]]) -> tuple[list[str], list[NDArray[np.intp]]]:
    """Distinct texts of several sides, in the order of their first occurrence, and their numbers for each side.

    >>> texts, (first, second) = distinct_texts([["a", "b"], ["b", "a", "c"]])
    >>> texts, second.tolist()
    (['a', 'b', 'c'], [1, 0, 2])
    """
    numbers: dict[str, int] = {}
    rows = [np.array([numbers.setdefault(text, len(numbers)) for text in side], dtype=np.intp) for side in sides]
    return list(numbers), rows


def is_text_transformer(model: SentenceTransformer) -> bool:
    """Whether the first module is a text encoder that pads on the right, so that texts can be tokenised outside of it."""
    first = model[0]
    return (
        isinstance(first, Transformer)
        and list(first.modalities) == ["text"]
        and isinstance(first.processor, PreTrainedTokenizerBase)
        and first.processor.padding_side == "right"
        and not first.can_flatten_inputs
    )


def token_batches(length_n: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Divide texts into batches by their number of tokens, including padding, the longest texts first.

    A text longer than the budget forms a batch alone. Yields the indices of the texts of a batch.

    >>> list(token_batches([2, 9, 3, 3, 2], 6))
    [[1], [2, 3], [0, 4]]
    """
    batch: list[int] = []
    for at in sorted(range(len(length_n)), key=lambda i: -length_n[i]):
        if batch and (len(batch) + 1) * length_n[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(at)
    if batch:
        yield batch


def _embed(
    model: SentenceTransformer, texts: list[str], budget: int, prompt: str | None, normalize_embeddings: bool
) -> Tensor:
    features = dict(model.preprocess(texts, prompt=prompt, processing_kwargs=_RAGGED))
    ragged = {name: features.pop(name) for name in _OF_TOKENS if name in features}
    features.pop("attention_mask", None)
    embeddings_nh: Any = None
    for batch in token_batches([len(ids) for ids in ragged["input_ids"]], budget):
        rows = pad_rows(model.tokenizer, **{name: [values[i] for i in batch] for name, values in ragged.items()})
        output = model({**{name: value.to(model.device) for name, value in rows.items()}, **features})
        embeddings_bh = _finished(model, output["sentence_embedding"], normalize_embeddings)
        if embeddings_nh is None:
            embeddings_nh = embeddings_bh.new_empty(len(texts), embeddings_bh.shape[1])
        embeddings_nh[batch] = embeddings_bh
    return embeddings_nh


def _finished(model: SentenceTransformer, embeddings_bh: Tensor, normalize: bool) -> Tensor:
    """Embeddings as ``encode`` returns them: truncated and normalised; float32 under autocast."""
    if torch.is_autocast_enabled(model.device.type):
        embeddings_bh = embeddings_bh.float()
        if isinstance(model[-1], Normalize):  # after a Dense module, it rounds the lengths to bfloat16
            embeddings_bh = F.normalize(embeddings_bh, dim=1)
    embeddings_bh = embeddings_bh[:, : model.truncate_dim]
    return F.normalize(embeddings_bh, dim=1) if normalize else embeddings_bh


def _array(embeddings_nh: Tensor) -> NDArray[Any]:
    if embeddings_nh.dtype == torch.bfloat16:  # not available in NumPy
        embeddings_nh = embeddings_nh.float()
    return embeddings_nh.cpu().numpy()
