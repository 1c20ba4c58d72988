"""Releases: a plain SentenceTransformer folder on disk, and its way to a Hub and back.

A release holds what `SentenceTransformer(folder)` and `AutoModel.from_pretrained(folder)` need, the recipe, the training
arguments, a model card and reference embeddings, and nothing else: no head, no pooler, no pickle, no class that only this
package knows.

A push is one commit on top of the head that it was planned for, never forced. It bears a name of its own, so that one whose
answer was lost is found again instead of being made twice. Files go up before the commit: a push that dies between the two
leaves the repository as it was, and the next one uploads the rest.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import hashlib
import inspect
import json
import logging
import os
import re
import shlex
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import yaml
from httpx2 import HTTPError, Request, Timeout, TransportError
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    eval_result_entries_to_yaml,
    get_session,
    get_token,
    snapshot_download,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model_card import generate_model_card
from sentence_transformers.base.modules import Module

from metaphrase.checkpoints.folders import HEADS, PARTIAL, TRAINING_ARGS, checkpoints
from metaphrase.encoders.pooler import CONFIG_FILE, disable_pooler
from metaphrase.exceptions import (
    HubAccessError,
    HubConnectionError,
    HubError,
    HubMissingError,
    MissingFileError,
    ModelError,
    NonFiniteError,
    UsageError,
)
from metaphrase.io.locks import exclusive
from metaphrase.io.redaction import redact
from metaphrase.modeling.languages import LanguageEmbedding, fold_language
from metaphrase.publishing.card import MODEL_ID_PLACEHOLDER, AlignmentModelCardData, corpus_card

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CARD, RECIPE, REFERENCE = "README.md", "recipe.yaml", "reference.json"
#: What a Hub shows on the pages of benchmarks.
EVAL_RESULTS = ".eval_results/metaphrase.yaml"
# AutoConfig cannot do without it, so that a folder that lacks it loads nowhere: it goes first and comes last.
SEAL = "config.json"
ROOT_FILES = (
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", SEAL, CARD, RECIPE, REFERENCE),
    TRAINING_ARGS,
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model"),
)
MODULE_FILES = ("*.json", "*.safetensors")
CHECKPOINT_FILES = ("optimizer.pt", "optimizer.bin", "scheduler.pt")
#: Files that can run code when they are read, or that no release needs. They are not even downloaded.
UNWANTED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.h5", "*.msgpack", "*.py", "*.onnx", "*.ot")
#: Seconds between attempts at what the client itself tries only once: a commit, a new repository, a download.
PAUSES = (1.0, 4.0, 15.0)
#: Seconds without a sign of the Hub after which a request is given up, where the client itself would wait for ever.
SILENCE = 300.0
#: Where the rows of a pushed corpus lie in its repository.
CORPUS_FILE = "data/train.parquet"
TOLERANCE = 1e-5
A_RELEASE = "Push the output folder of a training run, or what `metaphrase.publishing.hub.release` wrote."
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

    The release is written to a folder inside `output_dir`, loaded again, compared with the model, and only then moved into
    place, file by file. What else lies in `output_dir` (checkpoints, logs, run facts) stays; the files of an earlier
    release go. An interrupted release leaves the folder as it was, or one that refuses to load, never a half model that
    loads; what a killed one wrote aside goes with the next.

    Args:
        model: The trained encoder. It keeps its pooler, prompts, mode and device.
        output_dir: Where to put the release.
        recipe: Content of `recipe.yaml`; None writes no such file.
        card: Data of the model card; None takes what the model's own card knows.
        prompts: Prompts to store by name; None stores none.
        texts: Sentences whose embeddings are stored in `reference.json`.
        language: Language of the texts that the release is for, where the model was trained with a language embedding.
        language_embedding: That embedding (``loss.heads.language_embedding``). The release holds it for this one language
            (see :func:`metaphrase.modeling.languages.fold_language`); `model` stays as it is.

    Returns:
        `output_dir`.

    Raises:
        ValueError: A module of the model is not one of sentence-transformers' own, or its embeddings are not finite; or
            the model was trained with a language embedding, and not both of `language` and `language_embedding` are
            given.
        CheckpointError: Another process uses the folder, it is a file, or nothing can be written there.
        RuntimeError: The written folder does not give the model's embeddings.
    """
    _check_modules(model)
    folder = Path(output_dir)
    card = card or AlignmentModelCardData.adopt(model)
    embedded = any((facts or {}).get("language_embedding") for facts in (recipe, card.recipe))
    if (language is None) != (language_embedding is None) or (embedded and language is None):
        raise UsageError(
            "A model that was trained with a language embedding is released for one language at a time: give both "
            "`language` and `language_embedding`, or release all of its languages by `release_languages`."
        )
    if language is not None and language_embedding is not None:
        model, card = fold_language(model, language_embedding, language), copy.copy(card)
        card.language = [language]
        card.limitations = [*card.limitations, LANGUAGE_NOTE.format(language=language)]
    card.recipe = card.recipe or (dict(recipe) if recipe else None)
    card.register_model(model)
    with _staging(folder) as staging:
        with _release_form(model, card, prompts):
            embeddings_bh = model.encode(list(texts), show_progress_bar=False)
            if not np.isfinite(embeddings_bh).all():
                raise NonFiniteError(
                    f"The model's embeddings are not finite, so it is not released to {folder}. "
                    "Release an earlier checkpoint, or train again with a lower learning rate."
                )
            model.save_pretrained(str(staging), create_model_card=False)
            _load_without_pooler(model, staging)
            card.weights = {path: _sha256(staging / path) for path in release_files(staging) if _is_weights(path)}
            (staging / CARD).write_text(generate_model_card(model), encoding="utf-8")
        if recipe:
            text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
            (staging / RECIPE).write_text(text, encoding="utf-8")
        if card.all_hyperparameters:
            text = json.dumps(card.all_hyperparameters, indent=2, default=str, ensure_ascii=False)
            (staging / TRAINING_ARGS).write_text(redact(text) + "\n", encoding="utf-8")
        if entries := card.eval_result_entries():
            (staging / EVAL_RESULTS).parent.mkdir()
            text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
            (staging / EVAL_RESULTS).write_text(text, encoding="utf-8")
        reference = {"texts": list(texts), "tolerance": TOLERANCE, "embeddings": embeddings_bh.tolist()}
        (staging / REFERENCE).write_text(json.dumps(reference, ensure_ascii=False) + "\n", encoding="utf-8")
        _check_release(model, staging)
        _move_into_place(staging, folder)
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


def load(folder: str | Path, *, device: str | None = None) -> SentenceTransformer:
    """Load a model from a folder without running code or unpickling anything that comes with it.

    Raises:
        OSError: The folder holds no weights in safetensors form.
        ValueError: The folder names a module that is not one of sentence-transformers' own.
    """
    return SentenceTransformer(
        str(folder),
        device=device,
        trust_remote_code=False,
        local_files_only=True,
        model_kwargs={"use_safetensors": True},
    )


def verify(name_or_path: str | Path, *, revision: str | None = None, device: str | None = None) -> float:
    """Load a release, from a folder or a Hub, and compare it with its own reference embeddings.

    Returns:
        The largest absolute difference of a component. It is 0 to 1e-5 in float32 on the hardware family that the
        release was made on, a little more elsewhere.

    Raises:
        FileNotFoundError: There are no reference embeddings.
        RuntimeError: The difference exceeds the tolerance that the release states.
        OSError: The Hub cannot be reached or refuses.
    """
    folder = Path(name_or_path)
    if not folder.is_dir():
        folder = download(str(name_or_path), revision=revision)
    if not (folder / REFERENCE).is_file():
        raise MissingFileError(
            f"A release is verified by its own reference embeddings, but {name_or_path} has no {REFERENCE}. Name a "
            "release, or release the model again."
        )
    reference = json.loads((folder / REFERENCE).read_text(encoding="utf-8"))
    return _compare(load(folder, device=device), reference, str(name_or_path))


def download(
    repo_id: str,
    *,
    revision: str | None = None,
    repo_type: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """Download a repository, trying again where a server fails or cuts a file; what is there already stays.

    Args:
        repo_id: `organisation/name`.
        revision: Branch, tag or commit; None takes `main`.
        repo_type: None or "dataset".
        token: Access token; None takes `HF_TOKEN`, then the one stored by `hf auth login`.
        cache_dir: Where to keep it; None takes the client's cache.

    Returns:
        A folder with its files, but for pickles and code.

    Raises:
        PermissionError: The Hub refuses the token, or there is none and one is needed.
        FileNotFoundError: There is no such repository or revision.
        ConnectionError: The Hub cannot be reached, or fails for longer than there was patience.
    """
    later = f"What has come is kept; run it again to download the rest of {repo_id}."
    with _explained(repo_id, "read", later, given=token is not None):
        folder = _patiently(
            lambda: snapshot_download(
                repo_id,
                repo_type=repo_type,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                ignore_patterns=list(UNWANTED),
            )
        )
    return Path(folder)


def release_files(folder: str | Path) -> list[str]:
    """Paths of the files that belong to the release in `folder`, relative to it and sorted.

    Checkpoints, heads, logs, pickles and whatever else a run leaves beside its release are not among them.
    """
    folder = Path(folder)
    modules = folder / "modules.json"
    listed = json.loads(modules.read_text(encoding="utf-8")) if modules.is_file() else []
    files = [path.name for path in folder.iterdir() if path.is_file() and _matches(path.name, ROOT_FILES)]
    files += [EVAL_RESULTS] if (folder / EVAL_RESULTS).is_file() else []
    for part in {module["path"] for module in listed} - {""}:
        if Path(part).name != part:
            raise ModelError(f"{modules} names the module folder {part!r}; it must lie directly in {folder}.")
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
    with_heads: bool = False,
    check: bool = True,
) -> str:
    """Upload a release to a Hub, in one commit; `HF_ENDPOINT` names a Hub other than huggingface.co.

    Files of an earlier release that this one lacks are deleted by the same commit; what else lies in the repository stays.

    Args:
        folder: A folder that :func:`release` wrote. Only its release files are uploaded.
        repo_id: `organisation/name`; the repository is made if it does not exist.
        private: Make a new repository private.
        revision: Branch to commit to; made if it does not exist.
        token: Access token; None takes `HF_TOKEN`, then the one stored by `hf auth login`.
        commit_message: Title of the commit.
        with_heads: Upload the objectives' heads too, to the folder `heads` of the repository, where
            ``AlignmentHeads.from_pretrained(repo_id, subfolder="heads")`` finds them. They are taken from `folder`/heads
            where that is there, else from the last checkpoint in `folder` whose encoder is the released one.
        check: Compare the release with its reference embeddings before, and once more as it comes back from the Hub.

    Returns:
        URL of the commit; of the present one where nothing has changed.

    Raises:
        FileNotFoundError: `folder` holds no complete release, or no heads that belong to it.
        ValueError: `folder` is a training checkpoint or holds weights that are not finite, or `repo_id` is no name.
        PermissionError: The Hub refuses the token, or there is none.
        ConnectionError: The Hub cannot be reached, or the upload failed on its side.
        RuntimeError: The release does not give its reference embeddings, here or as it comes back.
    """
    folder = Path(folder)
    files = {name: _content(path, repo_id) for name, path in _files_to_push(folder, with_heads=with_heads).items()}
    check = check and REFERENCE in files
    if check:
        verify(folder)
    again = push_command(folder, repo_id, private=private, revision=revision, with_heads=with_heads)
    pushed = _Push(repo_id, None, private, revision, token, again=again)
    sha = pushed.upload(files, commit_message or "Release by metaphrase", replaces=_is_release_file)
    if check:
        with tempfile.TemporaryDirectory(prefix="metaphrase-") as cache:
            verify(download(repo_id, revision=sha, token=token, cache_dir=cache))
        logger.info("%s at %s gives its reference embeddings.", repo_id, sha)
    return pushed.url(sha)


def push_corpus(
    path: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    commit_message: str | None = None,
    license: str | None = None,
) -> str:
    """Upload a bitext, with its word links if it has some, as a data set that ``load_corpus("hf:organisation/name")`` reads.

    Args:
        path: A Parquet file that ``metaphrase align`` or ``metaphrase filter`` wrote.
        repo_id: `organisation/name` of the data set; it is made if it does not exist.
        private: Make a new data set private.
        revision: Branch to commit to; made if it does not exist.
        token: Access token; None takes `HF_TOKEN`, then the one stored by `hf auth login`.
        commit_message: Title of the commit.
        license: Licence of the text, as the Hub spells it, e.g. ``cc-by-4.0``.

    Returns:
        URL of the commit; of the present one where nothing has changed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no Parquet of pairs, or `repo_id` is no name.
        PermissionError: The Hub refuses the token, or there is none.
        ConnectionError: The Hub cannot be reached, or the upload failed on its side.
        RuntimeError: Other bytes come back from the Hub than were sent.
    """
    path = Path(path)
    facts = _corpus_facts(path)
    card = corpus_card(repo_id, license=license, **facts).encode()
    again = push_command(path, repo_id, private=private, revision=revision, license=license)
    pushed = _Push(repo_id, "dataset", private, revision, token, again=again)
    sha = pushed.upload({CARD: card, CORPUS_FILE: str(path)}, commit_message or "Corpus by metaphrase")
    with tempfile.TemporaryDirectory(prefix="metaphrase-") as cache:
        folder = download(repo_id, revision=sha, repo_type="dataset", token=token, cache_dir=cache)
        if _sha256(folder / CORPUS_FILE) != _sha256(path):
            raise HubError(f"{pushed.url(sha)} does not hold what {path} holds; push it again.")
    return pushed.url(sha)


def push_command(
    what: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    with_heads: bool = False,
    license: str | None = None,
) -> str:
    """The command that pushes a release or a corpus, as a shell takes it.

    >>> push_command("my runs/sw", "me/swahili", private=True, revision="next")
    "metaphrase push 'my runs/sw' --repo me/swahili --private --revision next"
    """
    words = ["metaphrase", "push", str(what), "--repo", repo_id]
    words += ["--private"] if private else []
    words += ["--revision", revision] if revision else []
    words += ["--with_heads"] if with_heads else []
    words += ["--license", license] if license else []
    return shlex.join(words)


def make_repository(repo_id: str, *, private: bool = False, token: str | None = None, later: str = "") -> str:
    """Make the repository of a model that is still to be trained, or see that the one there can be pushed to.

    Args:
        repo_id: `organisation/name`; a name alone is one of the token's own user.
        private: Make a new repository private, and accept no public one.
        token: Access token; None takes `HF_TOKEN`, then the one stored by `hf auth login`.
        later: What the messages of errors end with.

    Returns:
        `organisation/name`.

    Raises:
        HubAccessError: There is no token, or the Hub does not let it write there.
        HubConnectionError: The Hub cannot be reached, or fails; :func:`may_pass` tells whether to try again later.
        UsageError: `repo_id` is no name, or a private repository is wanted and this one is public.
    """
    _check_name(repo_id)
    _check_token(repo_id, token, later)
    api = HfApi(token=token)
    with _explained(repo_id, "write to", later, given=token is not None):
        made = _make(api, private, repo_id=repo_id)
        try:
            _patiently(lambda: api.auth_check(made, write=True), PAUSES[:1])
        except HfHubHTTPError as error:
            if _status(error) != 404:  # there is the repository, but not every Hub has this answer
                raise
    return made


def may_pass(error: HubError) -> bool:
    """Whether an error may be gone later by itself: the Hub failed, or was out of reach."""
    return _may_pass(error) or any(isinstance(cause, OfflineModeIsEnabled) for cause in _causes(error))


def _check_name(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(
            f"A repository is named organisation/name, in letters, digits, '-', '_' and '.'; got {repo_id!r}."
        ) from error


def _check_token(repo_id: str, token: str | None, later: str) -> None:
    if token is None and not constants.HF_HUB_OFFLINE and get_token() is None:
        raise HubAccessError(
            f"Pushing to {repo_id} needs a token with write access: set HF_TOKEN or run `hf auth login`. {later}"
        )


def _make(api: HfApi, private: bool, **where: Any) -> str:
    """Make a repository if it is not there; returns its full name.

    Raises:
        UsageError: It is there and public, and a private one is wanted.
    """
    made = _patiently(lambda: api.create_repo(**where, private=private or None, exist_ok=True), PAUSES[:1]).repo_id
    if private and not _patiently(lambda: api.repo_info(**where | {"repo_id": made})).private:
        raise UsageError(f"{made} exists and is public. Make it private in its settings, or name another one.")
    return made


class _Push:
    """One push, from the repository that it makes to the commit that it ends with.

    Args:
        repo_id: `organisation/name`.
        repo_type: None or "dataset".
        private: Make a new repository private.
        revision: Branch; None is `main`.
        token: Access token, or None.
        again: The command that pushes the same later.
    """

    def __init__(
        self,
        repo_id: str,
        repo_type: str | None,
        private: bool,
        revision: str | None,
        token: str | None,
        *,
        again: str,
    ) -> None:
        if "/" not in repo_id:
            raise UsageError(f"A repository is named organisation/name; got {repo_id!r}.")
        _check_name(repo_id)
        self.later = f"What you have is kept; push it later with `{again}`."
        _check_token(repo_id, token, self.later)
        self.repo_id, self.private, self.given = repo_id, private, token is not None
        self.where: dict[str, Any] = {"repo_id": repo_id, "repo_type": repo_type}
        self.revision = revision
        self.api = HfApi(token=token)
        self.name = uuid.uuid4().hex
        self.start: str | None = None

    def upload(
        self,
        files: Mapping[str, str | bytes],
        message: str,
        replaces: Callable[[str], bool] = lambda path: False,
    ) -> str:
        """Make the repository hold `files`, and none else that `replaces` accepts; returns the commit's sha."""
        with _explained(self.repo_id, "write to", self.later, given=self.given):
            _make(self.api, self.private, **self.where)
            if (branch := self.revision) is not None:
                _patiently(lambda: self.api.create_branch(**self.where, branch=branch, exist_ok=True))
            return _patiently(lambda: self._commit(files, message, replaces))

    def _commit(
        self, files: Mapping[str, str | bytes], message: str, replaces: Callable[[str], bool] = lambda path: False
    ) -> str:
        """One attempt: ask whether an earlier one has landed, plan for the present head, and commit onto it."""
        if self.start is not None and (landed := self._landed()):
            logger.warning("The commit had landed; only the Hub's answer was lost.")
            return landed
        head: Any = self.api.repo_info(**self.where, revision=self.revision)
        self.start = self.start or str(head.sha)
        there = {sibling.rfilename for sibling in head.siblings or ()}
        deletions = [CommitOperationDelete(path) for path in sorted(there - files.keys()) if replaces(path)]
        commit = self.api.create_commit(
            **self.where,
            operations=[*(CommitOperationAdd(path, content) for path, content in files.items()), *deletions],
            commit_message=message,
            commit_description=f"metaphrase push {self.name}",
            revision=self.revision,
            parent_commit=head.sha,
        )
        return str(commit.oid)

    def _landed(self) -> str | None:
        """The commit of this push among those that came after its start."""
        for commit in self.api.list_repo_commits(**self.where, revision=self.revision):
            if commit.commit_id == self.start:
                break
            if self.name in commit.message:
                return str(commit.commit_id)
        return None

    def url(self, sha: str) -> str:
        """Address of a commit."""
        kind = "datasets/" if self.where["repo_type"] == "dataset" else ""
        return f"{self.api.endpoint}/{kind}{self.repo_id}/commit/{sha}"


def _check_modules(model: SentenceTransformer) -> None:
    for module in model.modules():
        kind = type(module)
        if isinstance(module, Module) and kind.__module__.split(".")[0] != "sentence_transformers":
            raise ModelError(
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
    has_option = "add_pooling_layer" in inspect.signature(type(model.transformers_model).__init__).parameters
    if has_option and (folder / CONFIG_FILE).is_file():
        disable_pooler(folder)


def _check_release(model: SentenceTransformer, folder: Path) -> None:
    loaded = load(folder, device=str(model.device))
    _compare(loaded, json.loads((folder / REFERENCE).read_text(encoding="utf-8")), "The written release")
    if loaded.max_seq_length != model.max_seq_length:
        raise HubError(
            f"The release keeps {loaded.max_seq_length} pieces of a text, the model {model.max_seq_length}. "
            "Set `model.max_seq_length` to what its tokenizer and positions allow."
        )


def _compare(model: SentenceTransformer, reference: Mapping[str, Any], name: str) -> float:
    embeddings_bh = model.encode(reference["texts"], prompt="", show_progress_bar=False)
    difference = float(np.abs(embeddings_bh - np.array(reference["embeddings"], dtype=np.float32)).max())
    if not difference <= reference["tolerance"]:
        raise HubError(
            f"{name} does not give its reference embeddings: a component differs by {difference:.1e}, more than "
            f"{reference['tolerance']:.0e}. If its files were altered, download or release it again; if only the hardware is "
            "another, --no_check pushes it all the same."
        )
    return difference


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A new folder inside of one that only this process writes to: beside it may be another disk, or no right to write."""
    new = not folder.exists()
    staging = folder / PARTIAL / "release"
    try:
        with exclusive(folder):
            shutil.rmtree(staging, ignore_errors=True)
            try:
                staging.mkdir(parents=True)
                yield staging
            finally:
                shutil.rmtree(staging, ignore_errors=True)
                _remove_if_empty(staging.parent)
    finally:
        if new:
            _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _move_into_place(staging: Path, folder: Path) -> None:
    old = [SEAL, *(path for path in release_files(folder) if path != SEAL), "training_args.bin"]
    for path in old:
        (folder / path).unlink(missing_ok=True)
    for path in sorted(release_files(staging), key=lambda path: path == SEAL):
        (folder / path).parent.mkdir(exist_ok=True)
        (staging / path).replace(folder / path)


def _files_to_push(folder: Path, *, with_heads: bool = False) -> dict[str, Path]:
    """By its name in the repository, where each file lies."""
    for name in CHECKPOINT_FILES:
        if (folder / name).exists():
            raise ModelError(
                f"{folder} holds {name}: it is a training checkpoint, not a release. Push the run's own folder, "
                "or write a release with `metaphrase.publishing.hub.release`."
            )
    missing = [name for name in ("modules.json", SEAL) if not (folder / name).is_file()]
    if missing:
        raise MissingFileError(f"{folder} is no release: it lacks {' and '.join(missing)}. {A_RELEASE}")
    files = {name: folder / name for name in release_files(folder)}
    if not any(_is_weights(name) for name in files):
        raise MissingFileError(f"{folder} is no release: it lacks weights in safetensors form. {A_RELEASE}")
    if with_heads:
        files |= _heads_of(folder)
    for path in (path for name, path in files.items() if _is_weights(name)):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    raise ModelError(
                        f"Tensor {name} in {path} is not finite; such a model is not pushed. Release an earlier checkpoint "
                        "with `metaphrase.publishing.hub.release`, and push that."
                    )
    return files


def _heads_of(folder: Path) -> dict[str, Path]:
    """The heads beside a release, or those that the last checkpoint with the same encoder was trained with."""
    passed = []
    for place in (folder, *reversed(checkpoints(folder))):
        files = [path for path in sorted((place / HEADS).glob("*")) if _matches(path.name, MODULE_FILES)]
        if not any(_is_weights(path.name) for path in files):
            continue
        if place == folder or _same_weights(folder, place):
            return {f"{HEADS}/{path.name}": path for path in files}
        passed.append(place.name)
    if passed:
        raise MissingFileError(
            f"{folder} has no heads to push with its encoder: those of {', '.join(passed)} were trained with other weights "
            f"than the released ones. Push without heads, or put those that you want into {folder / HEADS}."
        )
    raise MissingFileError(
        f"{folder} has no heads to push: there are no weights in {folder / HEADS}, nor in the heads of a checkpoint."
    )


def _same_weights(release: Path, checkpoint: Path) -> bool:
    """Whether a checkpoint has every tensor of a release, as it is."""
    for name in filter(_is_weights, release_files(release)):
        if not (checkpoint / name).is_file():
            return False
        with safe_open(release / name, "pt") as ours, safe_open(checkpoint / name, "pt") as theirs:
            keys = set(ours.keys())
            if not keys <= set(theirs.keys()):
                return False
            if not all(torch.equal(ours.get_tensor(key), theirs.get_tensor(key)) for key in keys):
                return False
    return True


def _is_weights(path: str) -> bool:
    return path.endswith(".safetensors")


def _is_release_file(path: str) -> bool:
    """Whether a file of a repository came with a release, so that the next release replaces it."""
    folder, _, name = path.rpartition("/")
    if not folder:
        return _matches(name, (*ROOT_FILES, "training_args.bin"))
    return path == EVAL_RESULTS or (
        re.fullmatch(rf"\d+_\w+|{HEADS}", folder) is not None and _matches(name, MODULE_FILES)
    )


def _content(path: Path, repo_id: str) -> str | bytes:
    """What to upload for a file: its path, except that text of ours loses secrets and the card learns its address."""
    if path.name not in (CARD, TRAINING_ARGS):
        return str(path)
    return redact(path.read_text(encoding="utf-8")).replace(MODEL_ID_PLACEHOLDER, repo_id).encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _corpus_facts(path: Path) -> dict[str, Any]:
    """Pairs, columns and languages of a bitext in Parquet form."""
    if not path.is_file():
        raise MissingFileError(
            f"There is no file {path} to push. Name a .parquet that `metaphrase align` or `metaphrase filter` wrote."
        )
    try:
        table = pq.ParquetFile(path)
        columns = table.schema_arrow.names
        named = [name for name in ("source_lang", "target_lang") if name in columns]
        languages: set[str] = set()
        for batch in table.iter_batches(columns=named):
            languages |= {value for column in batch.columns for value in pc.unique(column).to_pylist() if value}
    except (pa.ArrowException, OSError) as error:
        raise UsageError(
            f"{path} is no Parquet file, which is what is pushed; `metaphrase align` and `metaphrase filter` write one "
            "where their output ends in .parquet."
        ) from error
    if not {"source", "target"} <= set(columns):
        raise UsageError(f"{path} is no bitext: it has the columns {', '.join(columns)}, and not source and target.")
    return {"pairs": table.metadata.num_rows, "columns": columns, "languages": sorted(languages)}


# ------------------------------------------------------------------------------------------------------ the Hub's faults

#: What the client raises: its own HTTP errors, those of the transport, and a RuntimeError where a file's upload failed.
_FAULTS = (HTTPError, OSError, RuntimeError)


def _patiently(action: Callable[[], Result], pauses: Sequence[float] | None = None) -> Result:
    """Do something, and again after a pause where it failed by what may have passed by then."""
    for pause in (*(PAUSES if pauses is None else pauses), None):
        try:
            with _listening():
                return action()
        except _FAULTS as error:
            if pause is None or not _may_pass(error):
                raise
            wait = max(pause, _retry_after(error))
            logger.warning("%s. Trying again in %g seconds.", _told(error), wait)
            time.sleep(wait)
    raise AssertionError  # the last attempt returned or raised


@contextlib.contextmanager
def _listening() -> Iterator[None]:
    """Gives each request a limit to the Hub's silence where the client sets none, be it for all or for this one."""

    def limit(request: Request) -> None:
        if all(seconds is None for seconds in request.extensions.get("timeout", {}).values()):
            request.extensions["timeout"] = Timeout(SILENCE).as_dict()

    hooks = get_session().event_hooks["request"]
    hooks.append(limit)
    try:
        yield
    finally:
        hooks.remove(limit)


def _may_pass(error: BaseException) -> bool:
    """Whether a fault may be gone when the same is done again: never where the Hub refuses or a file here is missing."""
    status = _status(error)
    if status is None:
        return any(isinstance(cause, TransportError) for cause in _causes(error))
    if type(error) is RuntimeError and status in (403, 404):  # the signed address of an upload has expired
        return True
    return status in (408, 409, 412, 429) or status >= 500


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error, which the client may have wrapped."""
    answers = (cause.response for cause in _causes(error) if isinstance(cause, HfHubHTTPError))
    return next((answer.status_code for answer in answers if answer is not None), None)


def _retry_after(error: BaseException) -> float:
    answers = (cause.response for cause in _causes(error) if isinstance(cause, HfHubHTTPError))
    asked = next((answer.headers.get("Retry-After", "") for answer in answers if answer is not None), "")
    return min(float(asked), 60.0) if asked.isdigit() else 0.0


def _told(error: BaseException) -> str:
    """What an error and its causes say, on one line and without secrets."""
    reasons: list[str] = []
    for cause in _causes(error):
        reason = re.sub(r"For more information check: \S+", "", redact(str(cause)))
        reason = " ".join(reason.split()).rstrip(".:")
        if not any(reason in told for told in reasons):
            reasons.append(reason)
    return ": ".join(reasons)


@contextlib.contextmanager
def _explained(repo_id: str, wish: str, later: str, *, given: bool) -> Iterator[None]:
    """Turns the client's errors into one sentence each: what went wrong and what to do. No token stands in it."""
    try:
        yield
    except (HubError, UsageError):
        raise
    except _FAULTS as error:
        raise _explanation(error, repo_id, wish, later, given) from error


def _explanation(error: Exception, repo_id: str, wish: str, later: str, given: bool) -> HubError:
    status, told = _status(error), _told(error)
    stored = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the token of `hf auth login`"
    token = "the given token" if given else stored if get_token() else "a visitor without a token"
    gated = any(type(cause).__name__ == "GatedRepoError" for cause in _causes(error))
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in _causes(error)):
        return HubConnectionError(f"The Hub could not be reached, as HF_HUB_OFFLINE is set: unset it. {later}")
    if "xet-write-token" in told:
        return HubConnectionError(
            f"The Hub at {constants.ENDPOINT} has no Xet storage: set HF_HUB_DISABLE_XET=1 and push again. {later}"
        )
    if gated:
        return HubAccessError(
            f"{repo_id} is gated, and the Hub does not show it to {token} ({status}): ask for access on its page, "
            f"{constants.ENDPOINT}/{repo_id}. {later}"
        )
    if type(error) is not RuntimeError and status == 401:
        return HubAccessError(f"The Hub does not accept {token} for {repo_id} (401): renew it and log in. {later}")
    if type(error) is not RuntimeError and status == 403:
        owner = repo_id.split("/")[0]
        need = f"{'write ' if wish != 'read' else ''}access to {owner!r}"
        return HubAccessError(
            f"The Hub does not let {token} {wish} {repo_id} (403): it needs {need}, or choose another repository. {later}"
        )
    if type(error) is not RuntimeError and status == 404:
        return HubMissingError(f"The Hub knows no {repo_id}, or does not show it to {token} (404). {later}")
    if status is None and any(isinstance(cause, TransportError) for cause in _causes(error)):
        return HubConnectionError(f"The Hub at {constants.ENDPOINT} could not be reached: {told}. {later}")
    doing = "download of" if wish == "read" else "upload to"
    return HubConnectionError(f"The {doing} {repo_id} failed: {told}. {later}")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
