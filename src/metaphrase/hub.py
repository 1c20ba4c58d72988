"""Releases: a plain SentenceTransformer folder on disk, and its way to a Hub.

A release holds what `SentenceTransformer(folder)` and `AutoModel.from_pretrained(folder)` need, the recipe, a model
card and reference embeddings, and nothing else: no head, no pooler, no pickle, no class that only this package knows.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import inspect
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from httpx2 import HTTPError
from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model_card import generate_model_card
from sentence_transformers.base.modules import Module

from metaphrase.card import MODEL_ID_PLACEHOLDER, AlignmentModelCardData, redact
from metaphrase.languages import LanguageEmbedding, fold_language

logger = logging.getLogger(__name__)

CARD, RECIPE, REFERENCE = "README.md", "recipe.yaml", "reference.json"
# AutoConfig cannot do without it, so that a folder that lacks it loads nowhere: it goes first and comes last.
SEAL = "config.json"
ROOT_FILES = (
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", SEAL, CARD, RECIPE, REFERENCE),
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model"),
)
MODULE_FILES = ("*.json", "*.safetensors")
CHECKPOINT_FILES = ("optimizer.pt", "optimizer.bin", "scheduler.pt")
TOLERANCE = 1e-5
LANGUAGE_NOTE = (
    "The model embeds texts of one language, {language}, as its training added a vector of each text's language to the "
    "encoder's input. It is one of a set; compare its embeddings with those that the others give to their languages."
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
) -> Path:
    """Write `model` as a plain SentenceTransformer folder, loadable without this package and without remote code.

    The folder is made beside `output_dir`, loaded again, compared with the model, and only then moved into place, file
    by file. What else lies in `output_dir` (checkpoints, logs, run facts) stays; the files of an earlier release go.
    An interrupted release leaves the folder as it was, or one that refuses to load, never a half model that loads.

    Args:
        model: The trained encoder. It keeps its pooler, prompts, mode and device.
        output_dir: Where to put the release.
        recipe: Content of `recipe.yaml`; None writes no such file.
        card: Data of the model card; None takes what the model's own card knows.
        prompts: Prompts to store by name; None stores none.
        texts: Sentences whose embeddings are stored in `reference.json`.
        language: Language of the texts that the release is for, where the model was trained with a language embedding.
        language_embedding: That embedding (``loss.heads.language_embedding``). The release holds it for this one language
            (see :func:`metaphrase.languages.fold_language`); `model` stays as it is.

    Returns:
        `output_dir`.

    Raises:
        ValueError: A module of the model is not one of sentence-transformers' own, or its embeddings are not finite; or
            the model was trained with a language embedding, and not both of `language` and `language_embedding` are
            given.
        RuntimeError: The written folder does not give the model's embeddings.
    """
    _check_modules(model)
    folder = Path(output_dir)
    card = card or AlignmentModelCardData.adopt(model)
    embedded = any((facts or {}).get("language_embedding") for facts in (recipe, card.recipe))
    if (language is None) != (language_embedding is None) or (embedded and language is None):
        raise ValueError(
            "A model that was trained with a language embedding is released for one language at a time: give both "
            "`language` and `language_embedding`, or release all of its languages by `release_languages`."
        )
    if language is not None and language_embedding is not None:
        model, card = fold_language(model, language_embedding, language), copy.copy(card)
        card.language = [language]
        card.limitations = [*card.limitations, LANGUAGE_NOTE.format(language=language)]
    card.recipe = card.recipe or (dict(recipe) if recipe else None)
    card.register_model(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".release", dir=folder.parent))
    try:
        with _release_form(model, card, prompts):
            embeddings_bh = model.encode(list(texts), show_progress_bar=False)
            if not np.isfinite(embeddings_bh).all():
                raise ValueError(
                    f"The model's embeddings are not finite, so it is not released to {folder}. "
                    "Release an earlier checkpoint, or train again with a lower learning rate."
                )
            model.save_pretrained(str(staging), create_model_card=False)
            _load_without_pooler(model, staging)
            (staging / CARD).write_text(generate_model_card(model), encoding="utf-8")
        if recipe:
            text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
            (staging / RECIPE).write_text(text, encoding="utf-8")
        reference = {"texts": list(texts), "tolerance": TOLERANCE, "embeddings": embeddings_bh.tolist()}
        (staging / REFERENCE).write_text(json.dumps(reference, ensure_ascii=False) + "\n", encoding="utf-8")
        _check_release(model, staging)
        _move_into_place(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    logger.info("Released to %s.", folder)
    return folder


def release_languages(
    model: SentenceTransformer,
    folder: str | Path,
    language_embedding: LanguageEmbedding,
    languages: Sequence[str] | None = None,
    **settings: Any,
) -> dict[str, Path]:
    """Release a model that was trained with a language embedding: a plain SentenceTransformer folder for each language.

    Args:
        model: The trained encoder.
        folder: Where the folders go; each is named after its language.
        language_embedding: The embedding (``loss.heads.language_embedding``).
        languages: Languages to release; None releases all that the embedding knows.
        **settings: As for :func:`release`.

    Returns:
        The folder of each language.

    Raises:
        ValueError: The embedding does not know a language.
    """
    return {
        language: release(
            model, Path(folder) / language, language=language, language_embedding=language_embedding, **settings
        )
        for language in languages or language_embedding.languages
    }


def verify(name_or_path: str | Path, *, revision: str | None = None, device: str | None = None) -> float:
    """Load a release, from a folder or a Hub, and compare it with its own reference embeddings.

    Returns:
        The largest absolute difference of a component. It is 0 to 1e-5 in float32 on the hardware family that the
        release was made on, a little more elsewhere.

    Raises:
        RuntimeError: The difference exceeds the tolerance that the release states.
    """
    local = Path(name_or_path) / REFERENCE
    path = local if local.is_file() else Path(hf_hub_download(str(name_or_path), REFERENCE, revision=revision))
    model = SentenceTransformer(str(name_or_path), revision=revision, device=device)
    return _compare(model, json.loads(path.read_text(encoding="utf-8")), str(name_or_path))


def release_files(folder: str | Path) -> list[str]:
    """Paths of the files that belong to the release in `folder`, relative to it and sorted.

    Checkpoints, heads, logs, pickles and whatever else a run leaves beside its release are not among them.
    """
    folder = Path(folder)
    modules = folder / "modules.json"
    listed = json.loads(modules.read_text(encoding="utf-8")) if modules.is_file() else []
    files = [path.name for path in folder.iterdir() if path.is_file() and _matches(path.name, ROOT_FILES)]
    for part in {module["path"] for module in listed} - {""}:
        if Path(part).name != part:
            raise ValueError(f"{modules} names the module folder {part!r}; it must lie directly in {folder}.")
        inside = (folder / part).glob("*")  # a module without settings has no folder on a Hub
        files += [f"{part}/{path.name}" for path in inside if path.is_file() and _matches(path.name, MODULE_FILES)]
    return sorted(files)


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Upload a release to a Hub, in one commit; `HF_ENDPOINT` names a Hub other than huggingface.co.

    Args:
        folder: A folder that :func:`release` wrote. Only its release files are uploaded.
        repo_id: `organisation/name`; the repository is made if it does not exist.
        private: Make a new repository private.
        revision: Branch to commit to; made if it does not exist.
        token: Access token; None takes `HF_TOKEN`, then the one stored by `hf auth login`.
        commit_message: Title of the commit.

    Returns:
        URL of the commit; of the present one where nothing has changed.

    Raises:
        FileNotFoundError: `folder` holds no complete release.
        ValueError: `folder` is a training checkpoint or holds weights that are not finite, or `repo_id` is no name.
        PermissionError: The Hub refuses the token, or there is none.
        ConnectionError: The Hub cannot be reached, or the upload failed on its side.
    """
    folder = Path(folder)
    if repo_id.count("/") != 1 or not all(repo_id.split("/")):
        raise ValueError(f"A repository is named organisation/name; got {repo_id!r}.")
    files = _files_to_push(folder)
    if token is None and not constants.HF_HUB_OFFLINE and get_token() is None:
        raise PermissionError(
            f"Pushing to {repo_id} needs a token with write access: set HF_TOKEN or run `hf auth login`. "
            f"The release is kept in {folder}."
        )
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if private and not api.repo_info(repo_id).private:
            raise ValueError(f"{repo_id} exists and is public. Make it private in its settings, or name another one.")
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.create_commit(
            repo_id,
            [CommitOperationAdd(path, _content(folder / path, repo_id)) for path in files],
            commit_message=commit_message or "Release by metaphrase",
            revision=revision,
        )
    except (HTTPError, OSError, RuntimeError) as error:
        raise _explained(error, folder, repo_id, given=token is not None) from error
    return str(commit.commit_url)


def _check_modules(model: SentenceTransformer) -> None:
    for module in model.modules():
        kind = type(module)
        if isinstance(module, Module) and kind.__module__.split(".")[0] != "sentence_transformers":
            raise ValueError(
                f"Module {kind.__module__}.{kind.__name__} is not part of sentence-transformers, so that the release "
                "could not be loaded without remote code. Take it out of the model before releasing."
            )


@contextlib.contextmanager
def _release_form(
    model: SentenceTransformer, card: AlignmentModelCardData, prompts: Mapping[str, str] | None
) -> Iterator[None]:
    """Gives the model the form that is released, and afterwards the one that it had."""
    encoder: Any = model.transformers_model
    pooler, training = getattr(encoder, "pooler", None), model.training
    kept = {name: getattr(model, name) for name in ("prompts", "default_prompt_name", "model_card_data")}
    try:
        model.eval()
        model.prompts, model.default_prompt_name, model.model_card_data = dict(prompts or {}), None, card
        if pooler is not None:
            encoder.pooler = None
        yield
    finally:
        if pooler is not None:
            encoder.pooler = pooler
        for name, value in kept.items():
            setattr(model, name, value)
        model.train(training)


def _load_without_pooler(model: SentenceTransformer, folder: Path) -> None:
    """Has sentence-transformers build the encoder without a pooler; transformers would make up a random one."""
    path = folder / "sentence_bert_config.json"
    if path.is_file() and "add_pooling_layer" in inspect.signature(type(model.transformers_model).__init__).parameters:
        config = json.loads(path.read_text(encoding="utf-8"))
        config["model_args"] = {"add_pooling_layer": False}
        path.write_text(json.dumps(config, indent=4), encoding="utf-8")


def _check_release(model: SentenceTransformer, folder: Path) -> None:
    loaded = SentenceTransformer(str(folder), device=str(model.device), local_files_only=True)
    _compare(loaded, json.loads((folder / REFERENCE).read_text(encoding="utf-8")), "The written release")
    if loaded.max_seq_length != model.max_seq_length:
        raise RuntimeError(
            f"The release keeps {loaded.max_seq_length} pieces of a text, the model {model.max_seq_length}. "
            "Set `model.max_seq_length` to what its tokenizer and positions allow."
        )


def _compare(model: SentenceTransformer, reference: Mapping[str, Any], name: str) -> float:
    embeddings_bh = model.encode(reference["texts"], prompt="", show_progress_bar=False)
    difference = float(np.abs(embeddings_bh - np.array(reference["embeddings"], dtype=np.float32)).max())
    if not difference <= reference["tolerance"]:
        raise RuntimeError(
            f"{name} does not give its reference embeddings: a component differs by {difference:.1e}, "
            f"more than {reference['tolerance']:.0e}."
        )
    return difference


def _move_into_place(staging: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    old = [SEAL, *(path for path in release_files(folder) if path != SEAL), "training_args.bin"]
    for path in old:
        (folder / path).unlink(missing_ok=True)
    for path in sorted(release_files(staging), key=lambda path: path == SEAL):
        (folder / path).parent.mkdir(exist_ok=True)
        (staging / path).replace(folder / path)


def _files_to_push(folder: Path) -> list[str]:
    for name in CHECKPOINT_FILES:
        if (folder / name).exists():
            raise ValueError(
                f"{folder} holds {name}: it is a training checkpoint, not a release. Push the run's own folder, "
                "or write a release with `metaphrase.hub.release`."
            )
    missing = [name for name in ("modules.json", SEAL) if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} is no release: it lacks {' and '.join(missing)}.")
    files = release_files(folder)
    weights = [path for path in files if path.endswith(".safetensors")]
    if not weights:
        raise FileNotFoundError(f"{folder} is no release: it lacks weights in safetensors form.")
    for path in weights:
        with safe_open(folder / path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    raise ValueError(f"Tensor {name} in {folder / path} is not finite; such a model is not pushed.")
    return files


def _content(path: Path, repo_id: str) -> str | bytes:
    """What to upload for a file: its path, except that the card learns its own address."""
    if path.name != CARD:
        return str(path)
    return path.read_text(encoding="utf-8").replace(MODEL_ID_PLACEHOLDER, repo_id).encode()


def _explained(error: Exception, folder: Path, repo_id: str, given: bool) -> Exception:
    """The one sentence that says what went wrong and what to do; the token itself never stands in it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    stored = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the token of `hf auth login`"
    token = "the given token" if given else stored
    later = f"The release is kept in {folder}; push it later with `metaphrase push {folder} --to {repo_id}`."
    reasons = dict.fromkeys(str(reason) for reason in (error, error.__cause__) if reason is not None)
    told = " ".join(redact(": ".join(reasons)).split()).rstrip(".")
    if "xet-write-token" in told:
        return ConnectionError(
            f"The Hub at {constants.ENDPOINT} has no Xet storage: set HF_HUB_DISABLE_XET=1 and push again. {later}"
        )
    if status == 401:
        return PermissionError(f"The Hub does not accept {token} for {repo_id} (401): renew it and log in. {later}")
    if status == 403:
        return PermissionError(
            f"The Hub does not let {token} write to {repo_id} (403): it needs write access to "
            f"{repo_id.split('/')[0]!r}, or choose another repository. {later}"
        )
    if status == 404:
        return FileNotFoundError(f"The Hub knows no {repo_id}, or does not show it to {token} (404). {later}")
    if status is None and isinstance(error, HTTPError | OfflineModeIsEnabled):
        return ConnectionError(f"The Hub at {constants.ENDPOINT} could not be reached: {told}. {later}")
    return ConnectionError(f"The upload to {repo_id} failed: {told}. {later}")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
