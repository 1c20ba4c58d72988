"""Checks of a model after it was loaded: all of its weights, a tokenizer that knows words, finite embeddings."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metaphrase.encoders.positions import evaluating
from metaphrase.exceptions import ModelError, ModelFileError, NonFiniteError
from metaphrase.io.counts import first_names
from metaphrase.io.files import read_json
from metaphrase.io.redaction import excerpt

#: File of embeddings that a model must reproduce, with their texts and the largest difference that is tolerated.
REFERENCE = "reference.json"
#: Weights that may be absent: BERT's pooler, which sentence embeddings never use, and a buffer of older versions.
_MAY_BE_MISSING = re.compile(r"(^|\.)(pooler\..+|position_ids)$")
#: Weights that a checkpoint may have in addition: those, and the heads of its pretraining or of another task.
_MAY_BE_UNUSED = re.compile(
    _MAY_BE_MISSING.pattern
    + r"|^(cls|lm_head|classifier|qa_outputs|vocab_transform|vocab_layer_norm|vocab_projector|head|decoder"
    r"|lm_predictions|mask_predictions|discriminator_predictions|generator_predictions|generator_lm_head"
    r"|predictions|sop_classifier|pred_layer|entity_predictions)\.|^final_logits_bias$"
)
#: Sentences of different lengths. A tokenizer with a vocabulary knows some of their words or letters.
_SENTENCES = ("All human beings are born free and equal in dignity and rights.", "1 2 3.")
#: Characters that few vocabularies have. A tokenizer without a piece for unknown ones fails.
_RARE = "☃ 𒀀 \ue000"


@contextmanager
def without_load_report() -> Iterator[None]:
    """Hide the table in which transformers lists weights that a model does not share with its file.

    `check_keys` refuses the model if one of them matters.
    """

    def is_shown(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg)

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


@without_load_report()
def load_complete(
    load: Callable[..., Any], folder: Path, name: str, *, new_head: bool = False, **settings: Any
) -> Any:
    """Load a model of transformers with all of its weights, all of them finite."""
    model, loaded = load(
        folder, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **settings
    )
    check_keys(model, loaded, name, new_head=new_head)
    check_finite(model, name)
    model.config.name_or_path = model.name_or_path = name
    return model


def check_keys(model: PreTrainedModel, loaded: Mapping[str, Any], name: str, *, new_head: bool = False) -> None:
    """Check that no weight was initialised at random or left out, except those of a task head that is new.

    `loaded` is what ``from_pretrained(output_loading_info=True, ignore_mismatched_sizes=True)`` reports.
    """

    def is_checked(key: str) -> bool:
        return not new_head or key.startswith(f"{model.base_model_prefix}.")

    missing = {key for key in loaded["missing_keys"] if is_checked(key) and not _MAY_BE_MISSING.search(key)}
    unused = {key for key in loaded["unexpected_keys"] if not _MAY_BE_UNUSED.search(key)}
    shapes = {
        f"{key}: {list(found)} instead of {list(expected)}"
        for key, found, expected in loaded["mismatched_keys"]
        if is_checked(key)
    }
    problems = [
        f"{len(keys)} {what} ({first_names([excerpt(key) for key in sorted(keys)])})"
        for what, keys in (("missing", missing), ("not part of the model", unused), ("of another shape", shapes))
        if keys
    ]
    if problems:
        raise ModelFileError(
            f"The weights of {name} do not fit its config.json: {'; '.join(problems)}. Use files from the same model."
        )


def check_finite(module: nn.Module, name: str) -> None:
    """Check that all weights are finite, in one pass over them."""
    for key, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_floating_point() and tensor.numel():
            lowest, highest = torch.aminmax(tensor.detach())
            if not (torch.isfinite(lowest) and torch.isfinite(highest)):
                raise NonFiniteError(
                    f"{name} has NaN or infinite weights, in {key}. Use an earlier checkpoint of the model."
                )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, encoder: PreTrainedModel, name: str) -> None:
    """Check that a tokenizer knows words, and that the encoder has an embedding for each piece."""
    rows = encoder.get_input_embeddings().num_embeddings
    pieces = len(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_unigram = backend is not None and type(backend.model).__name__ == "Unigram"  # ids are positions in a list
    if pieces <= rows and not is_unigram:
        pieces = max(tokenizer.get_vocab().values(), default=-1) + 1
    if pieces > rows:
        raise ModelError(
            f"The tokenizer of {name} has ids of pieces up to {pieces - 1}, but the encoder has {rows} embeddings. Use the "
            "tokenizer that belongs to the encoder."
        )
    if tokenizer.pad_token_id is None:
        raise ModelError(f"The tokenizer of {name} has no padding token. Set its pad_token, and save it.")
    if backend is not None and getattr(backend.model, "dropout", None):
        raise ModelError(
            f"The tokenizer of {name} uses BPE dropout, which splits words at random. Set dropout to null in tokenizer.json."
        )
    _knows(tokenizer, _RARE)
    if not any(_knows(tokenizer, text) for text in (*_SENTENCES, *_vocabulary_sample(tokenizer))):
        raise ModelFileError(
            f"The tokenizer of {name} knows no words: its vocabulary is missing or empty, so all sentences of one length "
            "would get the same embedding. Save the tokenizer into the model's folder."
        )


def _knows(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return bool(set(ids) - {tokenizer.unk_token_id, *tokenizer.all_special_ids})


def _vocabulary_sample(tokenizer: PreTrainedTokenizerBase) -> Iterable[str]:
    """Some pieces of the vocabulary as text."""
    step = max(1, len(tokenizer) // 100)
    return (tokenizer.decode([id_]) for id_ in range(0, len(tokenizer), step))


def check_embeddings(model: SentenceTransformer, name: str) -> None:
    """Check that the modules work together: embed two sentences."""
    with evaluating(model):
        embeddings_bh = model.encode(list(_SENTENCES), convert_to_tensor=True, show_progress_bar=False)
    if embeddings_bh.ndim != 2 or len(embeddings_bh) != len(_SENTENCES):
        raise ModelFileError(f"{name} does not compute one embedding for each sentence.")
    if not torch.isfinite(embeddings_bh).all():
        raise NonFiniteError(f"The embeddings of {name} are NaN or infinite. Use another encoder.")


def reference_difference(model: SentenceTransformer, path: Path, name: str) -> tuple[float, float]:
    """The largest difference of a component between a model's embeddings and those in a file, and the one it tolerates."""
    try:
        reference = read_json(path)
        texts, tolerance = [str(text) for text in reference["texts"]], float(reference["tolerance"])
        embeddings_bh = model.encode(texts, prompt="", show_progress_bar=False)
        wanted_bh = np.array(reference["embeddings"], dtype=np.float32).reshape(embeddings_bh.shape)
        difference = float(np.abs(embeddings_bh - wanted_bh).max())
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ModelFileError(f"{path.name} of {name} is damaged ({error}). Release the model again.") from error
    return difference, tolerance
