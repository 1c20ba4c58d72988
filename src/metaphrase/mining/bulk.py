"""Bulk encoding: a faster ``SentenceTransformer.encode`` for many texts.

Texts are tokenised once, sorted by their number of tokens (not of characters), divided into batches with similar numbers
of tokens, and encoded without padding.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from metaphrase.exceptions import DataMismatchError
from metaphrase.io.digests import texts_digest, weights_digest
from metaphrase.modeling.packing import packed
from metaphrase.modeling.views import pad_rows

logger = logging.getLogger(__name__)

#: Tokens per batch: few on a CPU, to fit its caches, and many on a GPU, to keep it busy.
CPU_TOKENS = 1024
GPU_TOKENS = 32_768
#: Texts that are tokenised and sorted together. A file is updated after each window.
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
    path: str | Path | None = None,
    advance: Callable[[int], None] = lambda n: None,
) -> NDArray[Any] | Tensor:
    """Embed sentences; the result equals that of ``model.encode`` up to rounding.

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
        path: A ``.npy`` file to write, which exists once it is complete. If a call is killed, the same call resumes
            (``<path>.part`` contains the rows, ``<path>.json`` describes them).
        advance: Called with the number of newly embedded sentences.

    Returns:
        Embeddings in the order of the sentences, shape ``(sentences, hidden)``; with ``path``, memory-mapped.

    Raises:
        ValueError: ``sentences`` is a single string, the model does not store the prompt, or both a file and a tensor
            are requested.
        DataMismatchError: The file belongs to other sentences, settings or weights.
    """
    if isinstance(sentences, str):
        raise ValueError("Expected a list of sentences, got a single string.")
    if path is not None and convert_to_tensor:
        raise ValueError("`path` and `convert_to_tensor` exclude each other. Remove one of them.")
    prompt = _prompt(model, prompt, prompt_name)
    settings = {"prompt": prompt, "normalize_embeddings": normalize_embeddings, "truncate_dim": model.truncate_dim}
    budget = tokens or (CPU_TOKENS if model.device.type == "cpu" else GPU_TOKENS)
    model.eval()

    def embed(window: list[str]) -> Tensor:
        if not is_sortable(model):
            return model.encode(
                window,
                prompt=prompt or "",
                normalize_embeddings=normalize_embeddings,
                convert_to_tensor=True,
                show_progress_bar=False,
            )
        with packed(model):
            return _embed(model, window, budget, **settings)

    if not len(sentences):
        nothing = torch.zeros(0, model.get_embedding_dimension(), device=model.device)
        return nothing if convert_to_tensor else nothing.cpu().numpy()
    if path is not None:
        return _embed_into(Path(path), sentences, {**settings, "weights": weights_digest(model)}, embed, advance)
    windows = []
    for first in range(0, len(sentences), WINDOW):
        windows.append(embed(list(sentences[first : first + WINDOW])))
        if not convert_to_tensor:
            windows[-1] = _array(windows[-1])
        advance(len(windows[-1]))
    return torch.cat(windows) if convert_to_tensor else np.concatenate(windows)


def _prompt(model: SentenceTransformer, prompt: str | None, name: str | None) -> str | None:
    if prompt is not None:
        return prompt
    if name is not None and name not in model.prompts:
        raise ValueError(
            f"The model does not store the prompt {name!r}. Its prompts: {', '.join(model.prompts) or 'none'}."
        )
    return model.prompts.get(name or model.default_prompt_name)


def is_sortable(model: SentenceTransformer) -> bool:
    """Whether texts can be tokenised and padded outside of a model: its encoder is one of transformers, padding right."""
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

    Args:
        length_n: Tokens of each text.
        budget: Maximum number of tokens per batch; a longer text forms a batch alone.

    Yields:
        The indices of the texts of a batch.

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
    model: SentenceTransformer,
    texts: list[str],
    budget: int,
    *,
    prompt: str | None,
    normalize_embeddings: bool,
    truncate_dim: int | None,
) -> Tensor:
    features = dict(model.preprocess(texts, prompt=prompt, processing_kwargs=_RAGGED))
    ragged = {name: features.pop(name) for name in _OF_TOKENS if name in features}
    features.pop("attention_mask", None)
    embeddings_nh: Any = None
    for batch in token_batches([len(ids) for ids in ragged["input_ids"]], budget):
        rows = pad_rows(model.tokenizer, **{name: [values[i] for i in batch] for name, values in ragged.items()})
        output = model({**{name: value.to(model.device) for name, value in rows.items()}, **features})
        embeddings_bh = output["sentence_embedding"][:, :truncate_dim]
        if normalize_embeddings:
            embeddings_bh = F.normalize(embeddings_bh, dim=1)
        if embeddings_nh is None:
            embeddings_nh = embeddings_bh.new_empty(len(texts), embeddings_bh.shape[1])
        embeddings_nh[batch] = embeddings_bh
    return embeddings_nh


def _array(embeddings_nh: Tensor) -> NDArray[Any]:
    if embeddings_nh.dtype == torch.bfloat16:  # not available in NumPy
        embeddings_nh = embeddings_nh.float()
    return embeddings_nh.cpu().numpy()


# ----------------------------------------------------------------------------------------------------------------- file


def _embed_into(
    path: Path,
    sentences: Sequence[str],
    settings: Mapping[str, Any],
    embed: Callable[[list[str]], Tensor],
    advance: Callable[[int], None],
) -> NDArray[Any]:
    """Embed into a file, one window at a time."""
    part, facts_path = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.json")
    facts = {**settings, "sentences": len(sentences), "texts": texts_digest(sentences)}
    done = 0
    if facts_path.exists():
        left = json.loads(facts_path.read_text(encoding="utf-8"))
        done = left.pop("done")
        if left != facts:
            keys = sorted(key for key in facts if left.get(key) != facts[key])
            raise DataMismatchError(
                f"{path} belongs to other embeddings, which differ in: {', '.join(keys)}. Delete {facts_path} to start over."
            )
    elif path.exists():
        raise DataMismatchError(f"{path} exists, but {facts_path.name}, which describes it, does not. Move it.")
    advance(done)
    for first in range(done, len(sentences), WINDOW):
        rows_nh = _array(embed(list(sentences[first : first + WINDOW])))
        mode = "r+" if first else "w+"
        file_nh = np.lib.format.open_memmap(part, mode, rows_nh.dtype, (len(sentences), rows_nh.shape[1]))
        file_nh[first : first + len(rows_nh)] = rows_nh
        file_nh.flush()
        note = facts_path.with_suffix(".tmp")
        note.write_text(json.dumps({**facts, "done": first + len(rows_nh)}, indent=1) + "\n", encoding="utf-8")
        note.replace(facts_path)
        advance(len(rows_nh))
    if part.exists():
        part.replace(path)
    return np.load(path, mmap_mode="r")
