"""Loading encoders for training and evaluation.

Files of a model are data: weights in safetensors format, and modules of sentence-transformers. Pickles are never read and
code of a repository is never run. A model is loaded completely, or refused: see `folders` for what is read, and `checks` for
what must hold afterwards.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from metaphrase.encoders.checks import (
    check_embeddings,
    check_finite,
    check_keys,
    check_tokenizer,
    without_load_report,
)
from metaphrase.encoders.folders import MODULES_FILE, VECTOR_FILE, WEIGHTS, open_model, read_modules
from metaphrase.encoders.installed import check_files, check_merged, installed_model
from metaphrase.encoders.names import PLUS, find_folder, load_vectors, name_parts, split_vectors, vector_file
from metaphrase.encoders.pooler import is_pooler_optional, remove_pooler
from metaphrase.encoders.positions import set_max_length
from metaphrase.exceptions import MetaphraseError, UsageError
from metaphrase.io.arguments import Length, PoolingMode, checked
from metaphrase.io.digests import weights_digest
from metaphrase.merging import TaskVector, combine
from metaphrase.merging.pooling import replace_pooling

logger = logging.getLogger(__name__)

#: Names of the E5 models that are trained with the temperature 0.01; e5-mistral is trained with 0.02.
_E5 = re.compile(r"(^|/)(multilingual-)?e5-(small|base|large)\b")

# If a repository has pickles only, transformers would request a conversion by a bot on the Hub, and load the result.
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")


@checked
def load_encoder(
    name_or_path: str | Path,
    *,
    pooling: PoolingMode | None = None,
    default_pooling: str = "mean",
    max_length: Length | None = None,
    device: str | None = None,
) -> SentenceTransformer:
    """Load an encoder as a SentenceTransformer, without the transformers pooler that sentence embeddings never use.

    Args:
        name_or_path: ``"starter"``, a folder, the name of an installed model such as ``"metaphrase-e5-small"``, or a Hub id
            with an optional commit, tag or branch: ``organisation/name@revision``; the first of these that exists,
            where a folder without a model does not hide an installed one or one on the Hub.
            ``"starter@wheel"`` and ``"starter@hub"`` name the source of the starter. ``"starter + vector.safetensors"`` adds
            a task vector, or several, each with its own alpha (see :class:`metaphrase.merging.TaskVector`). A folder, package
            or repository that holds a vector alone is the base that it names, with the vector.
        pooling: Pooling mode of sentence-transformers (``"cls"``, ``"mean"``, …) that replaces the encoder's own.
        default_pooling: Pooling mode of an encoder that has none, such as ``xlm-roberta-base``.
        max_length: Maximum number of tokens of a text; None keeps the encoder's own limit.
        device: Device of the model; None lets sentence-transformers choose.

    Returns:
        The model. Saved, it is a stock SentenceTransformer folder.

    Raises:
        ModelError: The model requires code of its own, an adapter or quantised weights, or is not a text encoder; or a task
            vector belongs to another model.
        ModelFileError: A file is missing, damaged, not readable or outside the folder; weights are missing, superfluous or of
            another shape; the tokenizer is missing or knows no words; an installed model differs from its release.
        NonFiniteError: A weight or an embedding is NaN or infinite.
        UsageError: The encoder has fewer positions than `max_length`, or this machine lacks the device.
        MissingFileError: There is no such folder, and no Hub id of this form.
        HubError: The Hub has no such model, denies access to it, or all attempts fail.
    """
    _check_device(device)
    base, files = name_parts(str(name_or_path))
    paths = [vector_file(file) or Path(file) for file in files]
    vectors = list(zip(paths, load_vectors(files), strict=True))
    name, folder = _checked_folder(base)
    model = _load_folder(name, folder, pooling, default_pooling, device)
    if vectors:
        model = _with_vectors(model, vectors, str(name_or_path), embeddings=pooling is None)
        if pooling is not None:  # also if a vector has its own
            replace_pooling(model, pooling)
        check_embeddings(model, str(name_or_path))
    if (installed := installed_model(base)) is not None:
        name = str(installed)
    elif folder != Path(name):
        if Path(base).is_dir():
            logger.warning("The folder %s holds no model. Loaded the model of that name on the Hub.", base)
        model.model_card_data.base_model, model.model_card_data.base_model_revision = name, folder.name
        name = f"{name}@{folder.name}" if vectors else name
    name = PLUS.join([name, *files])
    encoder: Any = model[0].auto_model
    encoder.config.name_or_path = encoder.name_or_path = model.tokenizer.name_or_path = name
    set_max_length(model, max_length)
    return model


@without_load_report()
def _load_folder(
    name: str, folder: Path, pooling: str | None, default_pooling: str, device: str | None
) -> SentenceTransformer:
    """Load and check the model in a folder; see `load_encoder` for the arguments."""
    with open_model(name, folder) as copy:
        kwargs: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}
        if _accepts_pooling_flag(copy):
            kwargs["add_pooling_layer"] = False
        if (copy / MODULES_FILE).exists():
            model = _load_modules(copy, device, kwargs)
            if pooling is not None:
                replace_pooling(model, pooling)
        else:
            transformer = _Transformer(str(copy), model_kwargs=kwargs)
            mode = pooling or default_pooling
            logger.info("%s has no pooling; using %s.", name, mode)
            size = transformer.get_embedding_dimension()
            model = SentenceTransformer(modules=[transformer, Pooling(size, pooling_mode=mode)], device=device)
        _keep_paths(model.tokenizer, copy, folder)
        encoder: Any = remove_pooler(model[0].auto_model)
        check_keys(encoder, model[0].loaded, name)
        model[0].__class__ = Transformer  # the class that a saved model names
        del model[0].loaded
        check_finite(model, name)
        check_tokenizer(model.tokenizer, encoder, name)
        set_max_length(model, None)
        check_embeddings(model, name)
    return model


def _keep_paths(tokenizer: Any, copy: Path, folder: Path) -> None:
    """Replace paths in a temporary copy, from which slow tokenizers copy their vocabulary when they are saved."""
    for name, value in vars(tokenizer).items():
        if isinstance(value, str) and value.startswith(str(copy)):
            setattr(tokenizer, name, str(folder / Path(value).relative_to(copy)))


def _check_device(name: str | None) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"The device {name} cannot be used: {reason}. Pass another, or omit it.") from error


def _with_vectors(
    model: SentenceTransformer, vectors: list[tuple[Path, TaskVector]], name: str, *, embeddings: bool
) -> SentenceTransformer:
    """Add vectors to their base: first the model's, then the result's, and so on.

    A sum that has been released is compared with its digest and, unless its pooling was replaced, with its `embeddings`.
    """
    while vectors:
        digest = weights_digest(model)
        fitting = [one for one in vectors if one[1].base == digest] or vectors
        model = combine([vector for _, vector in fitting]).apply(model)
        if len(fitting) == 1 and fitting[0][0].name == VECTOR_FILE:
            check_merged(model, fitting[0][0].parent, name, embeddings=embeddings)
        vectors = [one for one in vectors if one not in fitting]
    return model


class _Transformer(Transformer):
    """Keeps what transformers reports of the weights that it loads, and explains why a tokenizer cannot be loaded."""

    loaded: dict[str, Any]

    def __init__(self, model_name_or_path: str, **kwargs: Any) -> None:
        try:
            super().__init__(model_name_or_path, **kwargs)
        except ValueError as error:
            if "processing class" not in str(error):
                raise
            try:
                AutoTokenizer.from_pretrained(model_name_or_path, **kwargs.get("processor_kwargs") or {})
            except Exception as reason:
                error.args = (f"the tokenizer: {reason}",)
            raise

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        model, self.loaded = super()._load_model(
            *args, **kwargs, output_loading_info=True, ignore_mismatched_sizes=True
        )
        return model


def _load_modules(folder: Path, device: str | None, kwargs: dict[str, Any]) -> SentenceTransformer:
    return SentenceTransformer._load_with_module_classes(  # noqa: SLF001 - the public way has no other class of a module
        str(folder),
        {f"{Transformer.__module__}.{Transformer.__qualname__}": _Transformer},
        device=device,
        trust_remote_code=False,
        local_files_only=True,
        model_kwargs=kwargs,
    )


def find_model(name_or_path: str | Path) -> tuple[str, Path]:
    """The name of a model without its revision, and the folder of its files, which are downloaded if necessary.

    The name of a local folder or of the starter is the path of its folder. A base with task vectors is written to a temporary
    folder, which is deleted at the end of the process.
    """
    base, files = name_parts(str(name_or_path))
    return (str(name_or_path), _written(str(name_or_path))) if files else _checked_folder(base)


def _checked_folder(base: str) -> tuple[str, Path]:
    """The name and the folder of a model; the files of an installed one are compared with their digests."""
    if (installed := installed_model(base)) is not None:
        check_files(installed.folder, str(installed))
    return find_folder(base)


@cache
def _written(name: str) -> Path:
    model, place = load_encoder(name, device="cpu"), tempfile.mkdtemp(prefix="metaphrase-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    model.save_pretrained(place, create_model_card=False)
    return Path(place)


def _accepts_pooling_flag(folder: Path) -> bool:
    path = folder / (read_modules("", folder)[0][1])
    return is_pooler_optional(MODEL_MAPPING[type(AutoConfig.from_pretrained(path, local_files_only=True))])


def freeze_word_embeddings(model: SentenceTransformer) -> None:
    """Exclude the word embeddings from training: about 80 % of the parameters of a small multilingual encoder."""
    model[0].auto_model.get_input_embeddings().weight.requires_grad_(False)


def origin_of(model: SentenceTransformer) -> str | None:
    """The folder of a model, or its Hub id with the commit (``organisation/name@commit``)."""
    name, card = model[0].auto_model.config.name_or_path, model.model_card_data
    return f"{name}@{card.base_model_revision}" if name and name == card.base_model else name or None


def own_temperature(name: str | None, prompts: Mapping[str, str]) -> float | None:
    """The softmax temperature that an encoder was trained with, or None if it is unknown.

    The models of the E5 family are known: by their name (``multilingual-e5-small``, ``e5-base-v2``), or by their prompts
    ``"query: "`` and ``"passage: "``, which the starter has too. Their model cards state 0.01.

    >>> own_temperature("intfloat/multilingual-e5-small@fd1525a", {}), own_temperature("sentence-transformers/LaBSE", {})
    (0.01, None)
    """
    is_e5 = _E5.search(name or "") is not None or {"query: ", "passage: "} <= set(prompts.values())
    return 0.01 if is_e5 else None


def has_pooling(name: str) -> bool:
    """Whether an encoder has a pooling of its own; others, such as ``xlm-roberta-base``, get one when they are loaded."""
    base, files = name_parts(name)
    if (find_folder(base)[1] / MODULES_FILE).is_file():
        return True
    return any("pooling" in (one.settings or {}) for one in load_vectors(files))


def pooling_of(model: SentenceTransformer) -> str:
    """The pooling mode of a model: several are joined as in ``"cls+mean"``; ``"cls"`` if it has no pooling module."""
    mode: Any = next((module.pooling_mode for module in model if isinstance(module, Pooling)), "cls")
    return mode if isinstance(mode, str) else "+".join(mode)


def pretrained_mlm_head(name: str) -> dict[str, Tensor] | None:
    """Read the masked language modelling head of a checkpoint: ``dense.weight``, ``dense.bias``, ``norm.weight``,
    ``norm.bias`` and ``bias``.

    None if the checkpoint has no such head (E5, LaBSE), no weights in safetensors, or a head that is not laid out as BERT's
    or RoBERTa's.
    """
    try:
        name, folder = find_folder(split_vectors(name)[0])
    except MetaphraseError:  # the folder of a model in memory that no longer exists
        return None
    files = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob("model-*-of-*.safetensors"))
    if not files or read_modules(name, folder)[0][1]:  # the encoder is in a subfolder
        return None
    with ExitStack() as stack:
        parts = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        found = {name: part for part in parts for name in part.keys()}  # noqa: SIM118 - not a dictionary
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
            if found.keys() >= {*names.values()}:
                return {short: found[full].get_tensor(full) for short, full in names.items()}
    return None


def used_piece_ids(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Ids of the pieces that occur in some texts, and of the special tokens: the English subset of a vocabulary, for example.

    Returns sorted ids.
    """
    ids = set(tokenizer.all_special_ids)
    remaining = iter(texts)
    while batch := list(islice(remaining, 10_000)):
        ids.update(i for row in tokenizer(batch, verbose=False)["input_ids"] for i in row)
    return torch.tensor(sorted(ids))
