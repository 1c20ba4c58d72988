"""Releases: a plain SentenceTransformer folder that loads without this package and without remote code.

A release contains the files that `SentenceTransformer(folder)` and `AutoModel.from_pretrained(folder)` need, the recipe,
the training arguments, a model card and reference embeddings. It contains no head, no pooler, no pickle and no class of
this package.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from huggingface_hub import eval_result_entries_to_yaml
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model_card import generate_model_card
from sentence_transformers.base.modules import Module

from metaphrase.checkpoints.folders import PARTIAL, TRAINING_ARGS
from metaphrase.encoders.adapters import ADAPTER, has_adapter, save_adapter, shared_copy
from metaphrase.encoders.checks import reference_difference
from metaphrase.encoders.loading import find_model, load_encoder, origin_of
from metaphrase.encoders.names import model_folder
from metaphrase.encoders.pooler import CONFIG_FILE, disable_pooler, is_pooler_optional, remove_pooler
from metaphrase.encoders.saving import save_encoder
from metaphrase.exceptions import (
    HubError,
    MetaphraseError,
    MissingFileError,
    ModelError,
    NonFiniteError,
    UsageError,
)
from metaphrase.io.files import as_os_errors, explain_full_disk, follow_umask
from metaphrase.io.locks import exclusive
from metaphrase.io.outputs import FAILED_RELEASE, check_folder
from metaphrase.io.redaction import redact
from metaphrase.merging.projection import find_projection
from metaphrase.modeling.languages import LanguageEmbedding, fold_language
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.contents import (
    CARD,
    EVAL_RESULTS,
    MANIFEST,
    PICKLED_ARGS,
    RECIPE,
    REFERENCE,
    SEAL,
    release_files,
    weights_digests,
    write_manifest,
)
from metaphrase.publishing.examples import MODEL_ID_PLACEHOLDER

logger = logging.getLogger(__name__)

#: Largest difference between the components of two embeddings that count as equal.
TOLERANCE = 1e-5
LANGUAGE_NOTE = (
    "The model embeds texts in one language, {language}, because a vector for the language of each text was added to the "
    "encoder's input during training. It is one model of a set: its embeddings are comparable with those of the models for "
    "the other languages."
)
REFERENCE_TEXTS = (
    "All human beings are born free and equal in dignity and rights.",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
)


def release(
    model: SentenceTransformer,
    output_dir: str | Path,
    *,
    recipe: Mapping[str, Any] | None,
    card: AlignmentModelCardData | None = None,
    prompts: Mapping[str, str] | None = None,
    texts: Sequence[str] = REFERENCE_TEXTS,
    language: str | None = None,
    language_embedding: LanguageEmbedding | None = None,
    folded: bool = False,
    keep_adapter: bool = False,
) -> Path:
    """Write `model` as a plain SentenceTransformer folder, loadable without this package and without remote code.

    A PEFT adapter is merged into the weights. The release is written to a folder inside `output_dir`, loaded again,
    compared with the model, and then moved into place file by file. Files of an earlier release are deleted; other files in
    `output_dir` (checkpoints, logs, run facts) are kept. An interrupted release leaves the folder unchanged, or a folder that
    does not load; the next release removes the temporary files.

    Args:
        model: The trained encoder. Its pooler, prompts, mode and device do not change.
        output_dir: Destination folder.
        recipe: Content of `recipe.yaml`; None writes no such file.
        card: Data of the model card; None adopts the model's own card.
        prompts: Prompts to store by name; None stores none.
        texts: Sentences whose embeddings are stored in `reference.json`.
        language: Language of the release, for a model that was trained with a language embedding.
        language_embedding: The language embedding (``loss.heads.language_embedding``). The release contains the vector of
            `language` only (see :func:`metaphrase.modeling.languages.fold_language`); `model` does not change.
        folded: Whether the model contains the vector of its language already, as the copy of such a release does.
        keep_adapter: Also write the adapter of `model`, in PEFT's format, to the folder ``adapter`` of the release. Loading
            the release does not read it.

    Returns:
        `output_dir`.

    Raises:
        ValueError: A module of the model is not part of sentence-transformers, its embeddings are not finite, or the model
            was trained with a language embedding and `language` or `language_embedding` is missing.
        UsageError: The folder is the model's, or holds files that this library did not write; the recipe is not a mapping;
            or an adapter is to be kept, but the model has none, or one that does not reproduce the release.
        CheckpointError: Another process uses the folder, it is a file, or it is not writable.
        StorageError: The disk is full.
        RuntimeError: The written folder does not reproduce the model's embeddings. Its files are kept in a folder that the
            message names.
    """
    _check(model, texts, recipe)
    folder = Path(output_dir)
    check_folder(folder, model=model_folder(origin_of(model)), around=False)
    card = card or AlignmentModelCardData.adopt(model)
    if keep_adapter:
        _check_adapter(model)
    embedded = not folded and any((facts or {}).get("language_embedding") for facts in (recipe, card.recipe))
    if (language is None) != (language_embedding is None) or (embedded and language is None):
        raise UsageError(
            "A model that was trained with a language embedding is released for one language at a time: pass both "
            "`language` and `language_embedding`, or release all languages with `release_languages`."
        )
    if language is not None and language_embedding is not None:
        model, card = fold_language(model, language_embedding, language), copy.copy(card)
        card.language = [language]
        card.limitations = [*card.limitations, LANGUAGE_NOTE.format(language=language)]
    card.recipe = card.recipe or (dict(recipe) if recipe else None)
    released = _release_form(model, card, prompts)
    with explain_full_disk(folder), _staging(folder) as staging, torch.autocast(model.device.type, enabled=False):
        if not np.isfinite(released.encode(list(texts), show_progress_bar=False)).all():
            raise NonFiniteError(
                f"The model's embeddings are NaN or infinite, so it is not released to {folder}. "
                "Release an earlier checkpoint, or train again with a lower learning rate."
            )
        save_encoder(released, staging, what="release", destination=folder)
        _remove_other_files(staging)
        if is_pooler_optional(type(model.transformers_model)) and (staging / CONFIG_FILE).is_file():
            disable_pooler(staging)
        if keep_adapter:
            with as_os_errors():
                save_adapter(model, staging / ADAPTER)
        card.weights = weights_digests(staging)
        card.debias = _all_directions(released, card.debias)
        name = json.dumps(str(folder), ensure_ascii=False)[1:-1]
        text = generate_model_card(released).replace(MODEL_ID_PLACEHOLDER, name)
        (staging / CARD).write_text(text, encoding="utf-8")
        if recipe:
            _write_yaml(staging / RECIPE, dict(recipe))
        if card.all_hyperparameters:
            text = json.dumps(card.all_hyperparameters, indent=2, default=str, ensure_ascii=False)
            (staging / TRAINING_ARGS).write_text(redact(text) + "\n", encoding="utf-8")
        if entries := card.eval_result_entries():
            (staging / EVAL_RESULTS).parent.mkdir()
            _write_yaml(staging / EVAL_RESULTS, eval_result_entries_to_yaml(entries))
        with _kept_on_failure(staging, folder / FAILED_RELEASE):
            embeddings_bh = _reloaded_embeddings(released, staging, list(texts))
        reference = {"texts": list(texts), "tolerance": TOLERANCE, "embeddings": embeddings_bh.tolist()}
        (staging / REFERENCE).write_text(json.dumps(reference, ensure_ascii=False) + "\n", encoding="utf-8")
        write_manifest(staging)
        follow_umask(staging)
        _move_into_place(staging, folder)
    return folder


def _all_directions(model: SentenceTransformer, debias: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a card states about removed directions, with the number of those that the base model projected out."""
    found = find_projection(model, len(model))
    own = 0 if debias is None else debias["directions"]
    earlier = (0 if found is None else len(found[1])) - own
    if earlier <= 0:
        return debias
    return {"directions": earlier} if debias is None else {**debias, "earlier": earlier}


def release_languages(
    model: SentenceTransformer,
    folder: str | Path,
    language_embedding: LanguageEmbedding,
    languages: Sequence[str] | None = None,
    **settings: Any,
) -> dict[str, Path]:
    """Release a model that was trained with a language embedding: a plain SentenceTransformer folder per language.

    Args:
        model: The trained encoder.
        folder: Parent of the folders; each is named after its language.
        language_embedding: The language embedding (``loss.heads.language_embedding``).
        languages: Languages to release; None releases all languages of the embedding.
        **settings: Arguments of :func:`release`.

    Returns:
        The folder of each language.

    Raises:
        ValueError: The embedding has no vector for a language.
    """
    return {
        language: release(
            model, Path(folder) / language, language=language, language_embedding=language_embedding, **settings
        )
        for language in languages or language_embedding.languages
    }


def verify(name_or_path: str | Path, *, name: str | None = None, device: str | None = None) -> float:
    """Load a release from a folder or a Hub and compare it with its reference embeddings.

    ``name`` is its name in messages. Returns the largest absolute difference between two components: 0 to 1e-5 in float32 on
    the hardware family of the release, slightly more elsewhere.
    """
    name = name or str(name_or_path)
    folder = find_model(name_or_path)[1]
    if not (folder / REFERENCE).is_file():
        raise MissingFileError(
            f"A release is verified with its reference embeddings, but {name} has no {REFERENCE}. Name a "
            "release, or release the model again."
        )
    model = load_encoder(folder, device=device).float()
    difference, tolerance = reference_difference(model, folder / REFERENCE, name)
    if not difference <= tolerance:
        raise HubError(
            f"{name} does not reproduce its reference embeddings: a component differs by {difference:.1e}, more than "
            f"{tolerance:.0e}. If its files were altered, download or release it again; if only the hardware differs, push "
            "it with --no_check."
        )
    return difference


def _write_yaml(path: Path, content: Any) -> None:
    path.write_text(redact(yaml.safe_dump(content, sort_keys=False, allow_unicode=True)), encoding="utf-8")


def _check(model: SentenceTransformer, texts: Sequence[str], recipe: Any) -> None:
    if not texts:
        raise UsageError("A release needs reference texts. Pass at least one sentence as `texts`, or omit it.")
    if not isinstance(recipe, Mapping | None):
        raise UsageError(f"`recipe` must be a dictionary, but is a {type(recipe).__name__}. Pass `recipe.to_dict()`.")
    for module in model.modules():
        kind = type(module)
        if isinstance(module, Module) and kind.__module__.split(".")[0] != "sentence_transformers":
            raise ModelError(
                f"Module {kind.__module__}.{kind.__name__} is not part of sentence-transformers, so the release "
                "could not be loaded without remote code. Remove it from the model before the release."
            )


def _check_adapter(model: SentenceTransformer) -> None:
    """Refuse to keep an adapter that does not exist, or that lacks weights which were trained with it."""
    if not has_adapter(model):
        raise UsageError("The model has no adapter to keep. Omit keep_adapter.")
    for at, module in enumerate(list(model)[1:], start=1):
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise UsageError(
                f"The adapter does not contain the weights of module {at}, {type(module).__name__}, which are trainable, so "
                "the original model with the adapter would differ from the release. Train again after "
                f"`model[{at}].requires_grad_(False)`, or omit keep_adapter."
            )


def _release_form(
    model: SentenceTransformer, card: AlignmentModelCardData, prompts: Mapping[str, str] | None
) -> SentenceTransformer:
    """A copy of the model in its release form, which shares the weights."""
    model = shared_copy(model)
    remove_pooler(model.transformers_model)
    card.register_model(model)
    model.prompts, model.default_prompt_name, model.model_card_data = dict(prompts or {}), None, card
    return model.eval()


def _reloaded_embeddings(model: SentenceTransformer, folder: Path, texts: list[str]) -> NDArray[np.float32]:
    """Load a written release, compare it with the model, and embed texts with it in float32."""
    loaded = load_encoder(folder, device=str(model.device))
    theirs_bh, ours_bh = (encoder.encode(texts, prompt="", show_progress_bar=False) for encoder in (loaded, model))
    difference = float(np.abs(theirs_bh - ours_bh).max())
    if not difference <= TOLERANCE:
        raise HubError(
            f"The written release does not reproduce the embeddings of the model: a component differs by {difference:.1e}, "
            f"more than {TOLERANCE:.0e}."
        )
    if loaded.max_seq_length != model.max_seq_length:
        raise HubError(
            f"The maximum sequence length of the release is {loaded.max_seq_length}, that of the model "
            f"{model.max_seq_length}. Set `model.max_seq_length` to a value that its tokenizer and positions allow."
        )
    return np.asarray(loaded.float().encode(texts, prompt="", show_progress_bar=False))


@contextlib.contextmanager
def _kept_on_failure(staging: Path, kept: Path) -> Iterator[None]:
    """Keep the files of a release that fails its check."""
    try:
        yield
    except MetaphraseError as error:
        staging.rename(kept)
        raise type(error)(f"{error} Nothing was released; the files that were written are kept in {kept}.") from error


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A new folder inside of `folder`, on the same file system, while no other process writes to `folder`."""
    staging = folder / PARTIAL / "release"
    with exclusive(folder):
        for left in (staging, folder / FAILED_RELEASE):
            shutil.rmtree(left, ignore_errors=True)
        try:
            staging.mkdir(parents=True)
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            with contextlib.suppress(OSError):  # it holds a checkpoint that a killed run has not moved into place
                staging.parent.rmdir()


def _remove_other_files(staging: Path) -> None:
    """Delete what no release contains; the release is compared with the model without it."""
    kept = release_files(staging)
    for path in staging.rglob("*"):
        if path.is_file() and path.relative_to(staging).as_posix() not in kept:
            path.unlink()


def remove_release(folder: Path) -> None:
    """Delete the files of a release, except the reference, which shows that this library wrote the folder."""
    for path in (SEAL, MANIFEST, *release_files(folder), PICKLED_ARGS):
        if path != REFERENCE:
            (folder / path).unlink(missing_ok=True)
        if "/" in path:
            with contextlib.suppress(OSError):  # it has other files
                (folder / path).parent.rmdir()


def _move_into_place(staging: Path, folder: Path) -> None:
    remove_release(folder)
    for path in sorted([MANIFEST, *release_files(staging)], key=lambda path: (path == SEAL, path != REFERENCE)):
        (folder / path).parent.mkdir(exist_ok=True)
        (staging / path).replace(folder / path)
