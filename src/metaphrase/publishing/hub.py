"""Uploads to a Hub: releases, and bitexts as data sets.

A push is one commit on top of the current head, never forced. It uses `HfApi.create_commit`, because
`HfApi.upload_folder` may split an upload into several commits, so that an interrupted push could leave half a release. Each
push is identified by a name in its commit's description, so that a commit whose response was lost is not made twice. Files
are uploaded before the commit: an interrupted push leaves the repository unchanged, and the next one uploads the rest.
"""

from __future__ import annotations

import logging
import shlex
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open

from metaphrase.checkpoints.folders import HEADS, TRAINING_ARGS, checkpoints
from metaphrase.exceptions import HubAccessError, HubError, MissingFileError, ModelError, UsageError
from metaphrase.io.digests import file_sha256
from metaphrase.io.hub import RETRY_PAUSES, download, hub_errors, retry, status_of
from metaphrase.io.redaction import redact
from metaphrase.publishing.card import MODEL_ID_PLACEHOLDER, corpus_card
from metaphrase.publishing.release import (
    CARD,
    MODULE_FILES,
    REFERENCE,
    belongs_to_release,
    is_weights,
    matches,
    missing_files,
    release_files,
    verify,
)

logger = logging.getLogger(__name__)

CHECKPOINT_FILES = ("optimizer.pt", "optimizer.bin", "scheduler.pt")
#: Path of a pushed corpus in its repository.
CORPUS_FILE = "data/train.parquet"


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
    """Upload a release to a Hub, in one commit; `HF_ENDPOINT` selects a Hub other than huggingface.co.

    The same commit deletes files of an earlier release that this one does not have. Other files of the repository are kept.

    Args:
        folder: A folder that :func:`metaphrase.publishing.release.release` wrote. Only its release files are uploaded.
        repo_id: `organisation/name`; the repository is created if it does not exist.
        private: Make a new repository private.
        revision: Branch to commit to; created if it does not exist.
        token: Access token; None uses `HF_TOKEN`, then the token stored by `hf auth login`.
        commit_message: Title of the commit.
        with_heads: Also upload the objectives' heads, to the folder `heads` of the repository, where
            ``AlignmentHeads.from_pretrained(repo_id, subfolder="heads")`` finds them. They come from `folder`/heads if it
            exists, else from the last checkpoint in `folder` that has the released encoder.
        check: Compare the release with its reference embeddings before the upload, and once more after a download.

    Returns:
        URL of the commit; of the current one if nothing has changed.

    Raises:
        FileNotFoundError: `folder` has no complete release, or no heads that belong to it.
        ValueError: `folder` is a training checkpoint or has weights that are not finite, or `repo_id` is not a valid name.
        PermissionError: The Hub refuses the token, or it is missing.
        ConnectionError: The Hub cannot be reached, or the upload failed.
        RuntimeError: The release does not reproduce its reference embeddings, before or after the upload.
    """
    folder = Path(folder)
    files = {name: _content(path, repo_id) for name, path in _files_to_push(folder, with_heads=with_heads).items()}
    check = check and REFERENCE in files
    if check:
        verify(folder)
    command = push_command(folder, repo_id, private=private, revision=revision, with_heads=with_heads)
    upload = _Upload(repo_id, None, private, revision, token, command=command)
    sha = upload.run(files, commit_message or "Release by metaphrase", replaces=belongs_to_release)
    if check:
        with tempfile.TemporaryDirectory(prefix="metaphrase-") as cache:
            verify(download(repo_id, revision=sha, token=token, cache_dir=cache))
        logger.info("%s at %s reproduces its reference embeddings.", repo_id, sha)
    return upload.url(sha)


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
    """Upload a bitext, with its word links if it has any, as a data set that ``load_corpus("hf:organisation/name")`` reads.

    Args:
        path: A Parquet file that ``metaphrase align`` or ``metaphrase filter`` wrote.
        repo_id: `organisation/name` of the data set; it is created if it does not exist.
        private: Make a new data set private.
        revision: Branch to commit to; created if it does not exist.
        token: Access token; None uses `HF_TOKEN`, then the token stored by `hf auth login`.
        commit_message: Title of the commit.
        license: Licence of the text, as the Hub spells it, e.g. ``cc-by-4.0``.

    Returns:
        URL of the commit; of the current one if nothing has changed.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a Parquet file of sentence pairs, or `repo_id` is not a valid name.
        PermissionError: The Hub refuses the token, or it is missing.
        ConnectionError: The Hub cannot be reached, or the upload failed.
        RuntimeError: The downloaded file differs from the uploaded one.
    """
    path = Path(path)
    facts = _corpus_facts(path)
    card = corpus_card(repo_id, license=license, **facts).encode()
    command = push_command(path, repo_id, private=private, revision=revision, license=license)
    upload = _Upload(repo_id, "dataset", private, revision, token, command=command)
    sha = upload.run({CARD: card, CORPUS_FILE: str(path)}, commit_message or "Corpus by metaphrase")
    with tempfile.TemporaryDirectory(prefix="metaphrase-") as cache:
        folder = download(repo_id, revision=sha, repo_type="dataset", token=token, cache_dir=cache)
        if file_sha256(folder / CORPUS_FILE) != file_sha256(path):
            raise HubError(f"{upload.url(sha)} and {path} have different content; push it again.")
    return upload.url(sha)


def push_command(
    what: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    with_heads: bool = False,
    license: str | None = None,
) -> str:
    """The shell command that pushes a release or a corpus.

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
    """Create the repository of a model before training, or check that an existing one is writable.

    Args:
        repo_id: `organisation/name`; a bare name belongs to the token's user.
        private: Make a new repository private, and refuse a public one.
        token: Access token; None uses `HF_TOKEN`, then the token stored by `hf auth login`.
        later: Last sentence of error messages.

    Returns:
        `organisation/name`.

    Raises:
        HubAccessError: The token is missing, or has no write access.
        HubConnectionError: The Hub cannot be reached, or fails; see :func:`metaphrase.io.hub.is_transient`.
        UsageError: `repo_id` is not a valid name, or the repository is public and a private one is required.
    """
    _check_name(repo_id)
    _check_token(repo_id, token, later)
    api = HfApi(token=token)
    with hub_errors(repo_id, "write to", later, token_given=token is not None):
        made = _make(api, private, repo_id=repo_id)
        try:
            retry(lambda: api.auth_check(made, write=True), RETRY_PAUSES[:1])
        except HfHubHTTPError as error:
            if status_of(error) != 404:  # the repository exists, but not every Hub implements this request
                raise
    return made


def _check_name(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(
            f"A repository is named organisation/name, in letters, digits, '-', '_' and '.'; got {repo_id!r}."
        ) from error


def _check_token(repo_id: str, token: str | None, hint: str) -> None:
    if token is None and not constants.HF_HUB_OFFLINE and get_token() is None:
        raise HubAccessError(
            f"Pushing to {repo_id} requires a token with write access: set HF_TOKEN or run `hf auth login`. {hint}"
        )


def _make(api: HfApi, private: bool, **where: Any) -> str:
    """Create a repository if it does not exist; returns its full name.

    Raises:
        UsageError: The repository is public, and a private one is required.
    """
    made = retry(lambda: api.create_repo(**where, private=private or None, exist_ok=True), RETRY_PAUSES[:1]).repo_id
    if private and not retry(lambda: api.repo_info(**where | {"repo_id": made})).private:
        raise UsageError(f"{made} exists and is public. Make it private in its settings, or choose another name.")
    return made


class _Upload:
    """One push: creates the repository and the branch, and commits.

    Args:
        repo_id: `organisation/name`.
        repo_type: None or "dataset".
        private: Make a new repository private.
        revision: Branch; None is `main`.
        token: Access token, or None.
        command: The command that repeats the push, for error messages.
    """

    def __init__(
        self,
        repo_id: str,
        repo_type: str | None,
        private: bool,
        revision: str | None,
        token: str | None,
        *,
        command: str,
    ) -> None:
        if "/" not in repo_id:
            raise UsageError(f"A repository is named organisation/name; got {repo_id!r}.")
        _check_name(repo_id)
        self.hint = f"Nothing is lost; push it later with `{command}`."
        _check_token(repo_id, token, self.hint)
        self.repo_id, self.private, self.token_given = repo_id, private, token is not None
        self.where: dict[str, Any] = {"repo_id": repo_id, "repo_type": repo_type}
        self.revision = revision
        self.api = HfApi(token=token)
        self.name = uuid.uuid4().hex
        self.start: str | None = None

    def run(
        self,
        files: Mapping[str, str | bytes],
        message: str,
        replaces: Callable[[str], bool] = lambda path: False,
    ) -> str:
        """Make the repository contain `files`, and no other file that `replaces` accepts; returns the commit's SHA."""
        with hub_errors(self.repo_id, "write to", self.hint, token_given=self.token_given):
            _make(self.api, self.private, **self.where)
            if (branch := self.revision) is not None:
                retry(lambda: self.api.create_branch(**self.where, branch=branch, exist_ok=True))
            return retry(lambda: self._commit(files, message, replaces))

    def _commit(self, files: Mapping[str, str | bytes], message: str, replaces: Callable[[str], bool]) -> str:
        """One attempt: find the commit of an earlier attempt, or commit onto the current head."""
        if self.start is not None and (landed := self._landed()):
            logger.warning("The commit exists; only the Hub's response was lost.")
            return landed
        head: Any = self.api.repo_info(**self.where, revision=self.revision)
        self.start = self.start or str(head.sha)
        existing = {sibling.rfilename for sibling in head.siblings or ()}
        deletions = [CommitOperationDelete(path) for path in sorted(existing - files.keys()) if replaces(path)]
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
        """The commit of this push among those since its first attempt."""
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


def _files_to_push(folder: Path, *, with_heads: bool = False) -> dict[str, Path]:
    """The local path of each file, by its path in the repository."""
    for name in CHECKPOINT_FILES:
        if (folder / name).exists():
            raise ModelError(
                f"{folder} contains {name}: it is a training checkpoint, not a release. Push the run's own folder, "
                "or write a release with `metaphrase.release`."
            )
    if missing := missing_files(folder):
        raise MissingFileError(
            f"{folder} is not a release folder: missing {' and '.join(missing)}. Push the output folder of a training run, "
            "or one that `metaphrase.release` wrote."
        )
    files = {name: folder / name for name in release_files(folder)}
    if with_heads:
        files |= _heads_of(folder)
    for path in (path for name, path in files.items() if is_weights(name)):
        _check_finite(path)
    return files


def _check_finite(path: Path) -> None:
    with safe_open(path, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
            tensor = tensors.get_tensor(name)
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ModelError(
                    f"Tensor {name} in {path} has NaN or infinite values; the model is not pushed. Release an earlier "
                    "checkpoint with `metaphrase.release`, and push that."
                )


def _heads_of(folder: Path) -> dict[str, Path]:
    """The heads in the folder of a release, or those of the last checkpoint with the same encoder."""
    others = []
    for place in (folder, *reversed(checkpoints(folder))):
        files = [path for path in sorted((place / HEADS).glob("*")) if matches(path.name, MODULE_FILES)]
        if not any(is_weights(path.name) for path in files):
            continue
        if place == folder or _same_weights(folder, place):
            return {f"{HEADS}/{path.name}": path for path in files}
        others.append(place.name)
    if others:
        raise MissingFileError(
            f"{folder} has no heads for the released encoder: those of {', '.join(others)} were trained with other weights. "
            f"Push without heads, or copy the heads to {folder / HEADS}."
        )
    raise MissingFileError(
        f"{folder} has no heads to push: neither {folder / HEADS} nor a checkpoint has weights of heads. Push without heads."
    )


def _same_weights(release: Path, checkpoint: Path) -> bool:
    """Whether a checkpoint has every tensor of a release, with equal values."""
    for name in filter(is_weights, release_files(release)):
        if not (checkpoint / name).is_file():
            return False
        with safe_open(release / name, "pt") as ours, safe_open(checkpoint / name, "pt") as theirs:
            keys = set(ours.keys())
            if not keys <= set(theirs.keys()):
                return False
            if not all(torch.equal(ours.get_tensor(key), theirs.get_tensor(key)) for key in keys):
                return False
    return True


def _content(path: Path, repo_id: str) -> str | bytes:
    """Content to upload: the path of a file, or the text of a card or of arguments, without secrets, with the model's id."""
    if path.name not in (CARD, TRAINING_ARGS):
        return str(path)
    return redact(path.read_text(encoding="utf-8")).replace(MODEL_ID_PLACEHOLDER, repo_id).encode()


def _corpus_facts(path: Path) -> dict[str, Any]:
    """Pairs, columns and languages of a bitext in Parquet format."""
    if not path.is_file():
        raise MissingFileError(
            f"The file {path} does not exist. Name a .parquet file that `metaphrase align` or `metaphrase filter` wrote."
        )
    try:
        table = pq.ParquetFile(path)
        columns = table.schema_arrow.names
        languages: set[str] = set()
        for batch in table.iter_batches(columns=[name for name in ("source_lang", "target_lang") if name in columns]):
            languages |= {value for column in batch.columns for value in pc.unique(column).to_pylist() if value}
    except (pa.ArrowException, OSError) as error:
        raise UsageError(
            f"{path} is not a Parquet file, the only format that is pushed. `metaphrase align` and `metaphrase filter` write "
            "one if their output ends in .parquet."
        ) from error
    if not {"source", "target"} <= set(columns):
        raise UsageError(
            f"{path} is not a bitext: it has the columns {', '.join(columns)}, but requires source and target."
        )
    return {"pairs": table.metadata.num_rows, "columns": columns, "languages": sorted(languages)}
