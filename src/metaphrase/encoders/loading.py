"""Loading the encoder that is to be trained or measured.

What a repository holds is data to us: weights in safetensors form, and modules of sentence-transformers' own. Pickles are
not read and code is not run, whatever the repository's files ask for.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from metaphrase.publishing.hub import download

logger = logging.getLogger(__name__)

STARTER = "starter"

# Where a repository has pickles only, transformers would ask a bot on the Hub to convert them and load what it wrote.
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")


def load_encoder(
    name_or_path: str | Path,
    *,
    pooling: str | None = None,
    default_pooling: str = "mean",
    max_length: int | None = None,
    device: str | None = None,
) -> SentenceTransformer:
    """Load an encoder as a SentenceTransformer, without the transformers pooler that sentence embeddings never use.

    Args:
        name_or_path: ``"starter"``, a folder, or a Hub id, also of one commit, tag or branch: ``organisation/name@revision``.
        pooling: ``"cls"``, ``"mean"`` or another of sentence-transformers' modes, in place of the encoder's own.
        default_pooling: Pooling given to an encoder that comes without one, such as ``xlm-roberta-base``.
        max_length: Pieces kept of a text; None keeps the encoder's own limit.
        device: Where to put it; None lets sentence-transformers choose.

    Returns:
        The model. Saved, it is a stock SentenceTransformer folder.

    Raises:
        OSError: There is no such model, it has no weights in safetensors form, or the starter cannot be built.
        HubError: The Hub has no such model, does not show it, or fails for longer than there was patience.
        ValueError: The model has modules that are not sentence-transformers' own.
    """
    name, revision = split_revision(str(name_or_path))
    if name == STARTER:
        from metaphrase.encoders.starter import starter_path

        name = str(starter_path())
    here = Path(name).exists()
    folder = Path(name) if here else _fetched(name, revision)
    kwargs: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}
    if _takes_pooling_flag(folder):
        kwargs["add_pooling_layer"] = False
    with _refusals(name):
        if is_sentence_transformer_model(str(folder)):
            model = SentenceTransformer(
                str(folder), device=device, trust_remote_code=False, local_files_only=True, model_kwargs=kwargs
            )
            if pooling is not None:
                _replace_pooling(model, pooling)
        else:
            transformer = Transformer(str(folder), model_kwargs=kwargs)
            mode = pooling or default_pooling
            logger.info("%s comes without pooling; its sentence embedding is %s.", name, mode)
            size = transformer.get_embedding_dimension()
            model = SentenceTransformer(modules=[transformer, Pooling(size, pooling_mode=mode)], device=device)
    encoder: Any = model[0].auto_model
    remove_pooler(encoder)
    if not here:
        encoder.config._name_or_path = model.tokenizer.name_or_path = name
        model.model_card_data.base_model, model.model_card_data.base_model_revision = name, folder.name
    if max_length is not None:
        model.max_seq_length = max_length
    return model


def split_revision(name: str) -> tuple[str, str | None]:
    """The name and the revision of ``organisation/name@revision``; a folder may have an ``@`` of its own.

    >>> split_revision("intfloat/multilingual-e5-small@fd1525a"), split_revision("starter")
    (('intfloat/multilingual-e5-small', 'fd1525a'), ('starter', None))
    """
    before, at, revision = name.partition("@")
    return (name, None) if not at or Path(name).exists() else (before, revision)


def _fetched(name: str, revision: str | None) -> Path:
    """A folder of the cache, named by its commit, with a model of the Hub; what is out of reach may be there already."""
    nowhere = f"There is no folder {name}{f'@{revision}' if revision else ''}, and no model of that name"
    try:
        return download(name, revision=revision)
    except HFValidationError as error:
        raise MissingFileError(f"{nowhere}: on the Hub they are called organisation/name.") from error
    except HubError as error:
        raise type(error)(f"{nowhere} in the cache. {error}") from error


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Says in one sentence why a model's files are not read, where other libraries advise to read them all the same."""
    try:
        yield
    except OSError as error:
        if "safetensors" in str(error):
            raise ModelFileError(
                f"{name} has no weights in safetensors form. Others are pickles, which can run code when they are read, and "
                "are not loaded: ask its makers to convert it, or choose another encoder."
            ) from error
        raise
    except ValueError as error:
        if "trust_remote_code" in str(error) or "sentence_transformers" in str(error):
            raise ModelError(
                f"{name} needs code of its own, which is not run: only modules of sentence-transformers and models of "
                "transformers are loaded. Choose another encoder."
            ) from error
        raise


def _takes_pooling_flag(folder: Path) -> bool:
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
    raise ModelError("This model has no pooling that could be replaced; leave pooling out.")


def freeze_word_embeddings(model: SentenceTransformer) -> None:
    """Keep the encoder's word embeddings as they are: nine tenths of a small multilingual encoder's parameters."""
    model[0].auto_model.get_input_embeddings().weight.requires_grad_(False)


def origin_of(model: SentenceTransformer) -> str | None:
    """The folder that a model was loaded from, or its Hub id with the commit (``organisation/name@commit``)."""
    name, card = model[0].auto_model.config._name_or_path, model.model_card_data
    return f"{name}@{card.base_model_revision}" if name and name == card.base_model else name or None


def pooling_of(model: SentenceTransformer) -> str:
    """How a model pools its token states; ``"cls"`` where it does in no one way that has a name."""
    pooling = next((module for module in model if isinstance(module, Pooling)), None)
    return str(pooling.pooling_mode) if pooling is not None and isinstance(pooling.pooling_mode, str) else "cls"


def pretrained_mlm_head(name: str) -> dict[str, Tensor] | None:
    """The masked language modelling head of a checkpoint.

    Args:
        name: Folder or Hub id, with or without ``@revision``.

    Returns:
        Weights by ``dense.weight``, ``dense.bias``, ``norm.weight``, ``norm.bias`` and ``bias``; None where the
        checkpoint has no such head (E5, LaBSE), keeps it in a form that is not BERT's or RoBERTa's, or in no
        ``model.safetensors``.
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
    """Ids of the pieces that occur in some texts, and of the special tokens: an English subset vocabulary.

    Args:
        texts: The English side of a training corpus.
        tokenizer: The encoder's tokenizer.

    Returns:
        Sorted ids, shape ``(pieces,)``.
    """
    ids = set(tokenizer.all_special_ids)
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == 10_000:
            ids.update(i for row in tokenizer(batch)["input_ids"] for i in row)
            batch = []
    if batch:
        ids.update(i for row in tokenizer(batch)["input_ids"] for i in row)
    return torch.tensor(sorted(ids))
