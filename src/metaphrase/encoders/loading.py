"""Loading encoders for training and evaluation.

Files of a repository are data: weights in safetensors format, and modules of sentence-transformers. Pickles are never
read and code of a repository is never run.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.util import is_sentence_transformer_model
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils import cached_file

from metaphrase.encoders.pooler import remove_pooler
from metaphrase.exceptions import HubError, MissingFileError, ModelError, ModelFileError
from metaphrase.io.arguments import Length, checked
from metaphrase.io.hub import download

logger = logging.getLogger(__name__)

STARTER = "starter"

# If a repository has pickles only, transformers would request a conversion by a bot on the Hub, and load the result.
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")


@checked
def load_encoder(
    name_or_path: str | Path,
    *,
    pooling: str | None = None,
    default_pooling: str = "mean",
    max_length: Length | None = None,
    device: str | None = None,
) -> SentenceTransformer:
    """Load an encoder as a SentenceTransformer, without the transformers pooler that sentence embeddings never use.

    Args:
        name_or_path: ``"starter"``, a folder, or a Hub id with an optional commit, tag or branch:
            ``organisation/name@revision``.
        pooling: Pooling mode of sentence-transformers (``"cls"``, ``"mean"``, …) that replaces the encoder's own.
        default_pooling: Pooling mode of an encoder that has none, such as ``xlm-roberta-base``.
        max_length: Maximum number of tokens of a text; None keeps the encoder's own limit.
        device: Device of the model; None lets sentence-transformers choose.

    Returns:
        The model. Saved, it is a stock SentenceTransformer folder.

    Raises:
        OSError: The model does not exist or has no weights in safetensors format, or the starter cannot be built.
        HubError: The Hub has no such model, denies access to it, or all attempts fail.
        ValueError: The model has modules that are not part of sentence-transformers.
    """
    name, revision = split_revision(str(name_or_path))
    if name == STARTER:
        from metaphrase.encoders.starter import starter_path

        name = str(starter_path())
    local = Path(name).exists()
    folder = Path(name) if local else _download_model(name, revision)
    kwargs: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}
    if _accepts_pooling_flag(folder):
        kwargs["add_pooling_layer"] = False
    with _loading_errors(name):
        if is_sentence_transformer_model(str(folder)):
            model = SentenceTransformer(
                str(folder), device=device, trust_remote_code=False, local_files_only=True, model_kwargs=kwargs
            )
            if pooling is not None:
                _replace_pooling(model, pooling)
        else:
            transformer = Transformer(str(folder), model_kwargs=kwargs)
            mode = pooling or default_pooling
            logger.info("%s has no pooling; using %s.", name, mode)
            size = transformer.get_embedding_dimension()
            model = SentenceTransformer(modules=[transformer, Pooling(size, pooling_mode=mode)], device=device)
    encoder: Any = model[0].auto_model
    remove_pooler(encoder)
    if not local:
        encoder.config.name_or_path = model.tokenizer.name_or_path = name
        model.model_card_data.base_model, model.model_card_data.base_model_revision = name, folder.name
    if max_length is not None:
        model.max_seq_length = max_length
    return model


def split_revision(name: str) -> tuple[str, str | None]:
    """Split ``organisation/name@revision`` into name and revision; an ``@`` in the name of a folder is part of the name.

    >>> split_revision("intfloat/multilingual-e5-small@fd1525a"), split_revision("starter")
    (('intfloat/multilingual-e5-small', 'fd1525a'), ('starter', None))
    """
    before, at, revision = name.partition("@")
    return (name, None) if not at or Path(name).exists() else (before, revision)


def _download_model(name: str, revision: str | None) -> Path:
    """The folder of a Hub's model in the cache, named after its commit; without a network, the cached one."""
    missing = f"There is no folder {name}{f'@{revision}' if revision else ''}, and no model of that name"
    try:
        return download(name, revision=revision)
    except HFValidationError as error:
        raise MissingFileError(f"{missing}: on the Hub they are called organisation/name.") from error
    except HubError as error:
        raise type(error)(f"{missing} in the cache. {error}") from error


@contextmanager
def _loading_errors(name: str) -> Iterator[None]:
    """Replace errors that suggest trusting a repository's files by one sentence that explains why a model is not loaded."""
    try:
        yield
    except OSError as error:
        if "safetensors" in str(error):
            raise ModelFileError(
                f"{name} has no weights in safetensors format. Other formats are pickles, which can execute code when "
                "they are read, and are not loaded: ask its authors to convert it, or choose another encoder."
            ) from error
        raise
    except ValueError as error:
        if "trust_remote_code" in str(error) or "sentence_transformers" in str(error):
            raise ModelError(
                f"{name} requires its own code, which is not run: only modules of sentence-transformers and models of "
                "transformers are loaded. Choose another encoder."
            ) from error
        raise


def _accepts_pooling_flag(folder: Path) -> bool:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError):
        return False
    known = type(config) in MODEL_MAPPING
    return known and "add_pooling_layer" in inspect.signature(MODEL_MAPPING[type(config)].__init__).parameters


def _replace_pooling(model: SentenceTransformer, mode: str) -> None:
    for at, module in enumerate(model):
        if isinstance(module, Pooling):
            size = model[0].get_embedding_dimension()
            model[at] = Pooling(size, pooling_mode=mode)
            return
    raise ModelError("This model has no pooling module to replace. Omit `pooling`.")


def freeze_word_embeddings(model: SentenceTransformer) -> None:
    """Exclude the word embeddings from training: 90 % of the parameters of a small multilingual encoder."""
    model[0].auto_model.get_input_embeddings().weight.requires_grad_(False)


def origin_of(model: SentenceTransformer) -> str | None:
    """The folder of a model, or its Hub id with the commit (``organisation/name@commit``)."""
    name, card = model[0].auto_model.config.name_or_path, model.model_card_data
    return f"{name}@{card.base_model_revision}" if name and name == card.base_model else name or None


def pooling_of(model: SentenceTransformer) -> str:
    """The pooling mode of a model; ``"cls"`` if it combines several modes or has none."""
    pooling = next((module for module in model if isinstance(module, Pooling)), None)
    return str(pooling.pooling_mode) if pooling is not None and isinstance(pooling.pooling_mode, str) else "cls"


def pretrained_mlm_head(name: str) -> dict[str, Tensor] | None:
    """Read the masked language modelling head of a checkpoint.

    Args:
        name: Folder or Hub id, with or without ``@revision``.

    Returns:
        Weights by ``dense.weight``, ``dense.bias``, ``norm.weight``, ``norm.bias`` and ``bias``; None if the checkpoint has
        no such head (E5, LaBSE), no ``model.safetensors``, or a head that is not laid out as BERT's or RoBERTa's.
    """
    name, revision = split_revision(name)
    weights = cached_file(
        name,
        "model.safetensors",
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if weights is None:
        return None
    with safe_open(weights, framework="pt") as tensors:
        found = set(tensors.keys())
        for prefix, dense, norm in (
            ("cls.predictions.", "transform.dense", "transform.LayerNorm"),
            ("lm_head.", "dense", "layer_norm"),
        ):
            old = f"{prefix}{norm}.gamma" in found
            weight, bias = ("gamma", "beta") if old else ("weight", "bias")
            names = {
                "dense.weight": f"{prefix}{dense}.weight",
                "dense.bias": f"{prefix}{dense}.bias",
                "norm.weight": f"{prefix}{norm}.{weight}",
                "norm.bias": f"{prefix}{norm}.{bias}",
                "bias": f"{prefix}bias",
            }
            if found.issuperset(names.values()):
                return {short: tensors.get_tensor(full) for short, full in names.items()}
    return None


def english_piece_ids(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Ids of the pieces that occur in some texts, and of the special tokens: an English subset of the vocabulary.

    Args:
        texts: The English side of a training corpus.
        tokenizer: The encoder's tokenizer.

    Returns:
        Sorted ids, shape ``(pieces,)``.
    """
    ids = set(tokenizer.all_special_ids)
    remaining = iter(texts)
    while batch := list(islice(remaining, 10_000)):
        ids.update(i for row in tokenizer(batch)["input_ids"] for i in row)
    return torch.tensor(sorted(ids))
