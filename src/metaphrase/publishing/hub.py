"""Uploads to a Hub: releases, and bitexts as data sets.

A push is one commit on top of the current head, never forced. It uses `HfApi.create_commit`, because
`HfApi.upload_folder` may split an upload into several commits, so that an interrupted push could leave half a release. Each
push is identified by a name in its commit's description, so that a commit whose response was lost is not made twice. Files
are uploaded before the commit: an interrupted push leaves the repository unchanged, and the next one uploads the rest.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token, metadata_load
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from metaphrase.checkpoints.folders import TRAINING_ARGS
from metaphrase.encoders.checks import REFERENCE
from metaphrase.encoders.folders import VECTOR_FILE
from metaphrase.encoders.installed import MANIFEST, RELEASED, check_files, installed_models, is_packaged
from metaphrase.encoders.names import is_starter, model_file, split_vectors
from metaphrase.exceptions import (
    HubAccessError,
    HubConnectionError,
    HubError,
    MissingFileError,
    ModelFileError,
    UsageError,
)
from metaphrase.io.digests import file_sha256
from metaphrase.io.hub import RETRY_PAUSES, download, hub_errors, retry, status_of
from metaphrase.io.redaction import redact, without_tokens
from metaphrase.merging import TaskVector
from metaphrase.publishing.contents import CARD, NOTICES, belongs_to_release, copy_release
from metaphrase.publishing.corpus_card import corpus_card
from metaphrase.publishing.examples import name_model, name_package
from metaphrase.publishing.provenance import stated_in
from metaphrase.publishing.release import verify
from metaphrase.publishing.vector_card import vector_card

logger = logging.getLogger(__name__)

#: Path of a pushed corpus in its repository.
CORPUS_FILE = "data/train.parquet"
_TEXT_COLUMNS = ("source", "target", "source_lang", "target_lang")
_STRINGS = (pa.string(), pa.large_string(), pa.string_view())


class CommitOptions(TypedDict, total=False):
    """Options of every push.

    Attributes:
        private: Make a new repository private, and push nothing to a public one.
        revision: Branch to commit to; created if it does not exist.
        token: Access token; None uses `HF_TOKEN`, then the token stored by `hf auth login`.
        commit_message: Title of the commit.
    """

    private: bool
    revision: str | None
    token: str | None
    commit_message: str | None


def push(
    folder: str | Path, repo_id: str, *, with_heads: bool = False, check: bool = True, **options: Unpack[CommitOptions]
) -> str:
    """Upload a release to a Hub, in one commit; `HF_ENDPOINT` selects a Hub other than huggingface.co.

    The files that the release's manifest lists are copied, verified and uploaded. Only the model card may differ from what
    was released. The same commit deletes files of an earlier release that this one does not have. Other files of the
    repository are kept.

    Args:
        folder: A folder that :func:`metaphrase.publishing.release.release` wrote.
        repo_id: `organisation/name`; the repository is created if it does not exist.
        with_heads: Also upload the objectives' heads, to the folder `heads` of the repository, where
            ``AlignmentHeads.from_pretrained(repo_id, subfolder="heads")`` finds them. They come from `folder`/heads if it
            exists, else from the last checkpoint in `folder` that has the released encoder.
        check: Compare the release with its reference embeddings before the upload, and its files with a download after it.
        **options: See `CommitOptions`.

    Returns:
        URL of the commit; of the current one if nothing has changed.

    Raises:
        FileNotFoundError: `folder` has no complete release, or no heads that belong to it.
        ValueError: `folder` is a training checkpoint, a file was altered or is a link, weights are not finite, or `repo_id`
            is not a valid name.
        PermissionError: The Hub refuses the token, or it is missing.
        ConnectionError: The Hub cannot be reached, or the upload failed.
        RuntimeError: The release does not reproduce its reference embeddings, its download differs, or the repository became
            public during the push although `private` is set.
    """
    command = push_command(folder, repo_id, with_heads=with_heads, check=check, **options)
    repository = _Repository(repo_id, hint=_hint(command), **options)
    with tempfile.TemporaryDirectory(prefix="metaphrase-") as place:
        copy = Path(place)
        names = copy_release(Path(folder), copy, with_heads=with_heads)
        for name in {CARD, TRAINING_ARGS} & set(names):
            text = name_model(redact(_text(copy / name, Path(folder) / name)), repo_id, [folder, Path(folder).name])
            (copy / name).write_text(text, encoding="utf-8")
        _check_metadata(copy / CARD, Path(folder) / CARD)
        if check:
            verify(copy, name=str(folder))
        return repository.commit(
            {name: copy / name for name in names}, "Release by metaphrase", replaces=belongs_to_release, check=check
        )


def push_corpus(
    path: str | Path, repo_id: str, *, license: str | None = None, **options: Unpack[CommitOptions]
) -> str:
    """Upload a bitext, with its word links if it has any, as a data set that ``load_corpus("hf:organisation/name")`` reads.

    Args:
        path: A Parquet file that ``metaphrase mine``, ``filter`` or ``align`` wrote.
        repo_id: `organisation/name` of the data set; it is created if it does not exist.
        license: Licence of the text, as the Hub spells it, e.g. ``cc-by-4.0``.
        **options: See `CommitOptions`.

    Returns:
        URL of the commit; of the current one if nothing has changed.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a Parquet file of sentence pairs, or `repo_id` is not a valid name.
        PermissionError: The Hub refuses the token, or it is missing.
        ConnectionError: The Hub cannot be reached, or the upload failed.
        RuntimeError: The downloaded file differs from the uploaded one.
    """
    command = push_command(path, repo_id, license=license, **options)
    repository = _Repository(repo_id, "dataset", hint=_hint(command), **options)
    card = corpus_card(repo_id, license=license, **_corpus_facts(Path(path)))
    with tempfile.TemporaryDirectory(prefix="metaphrase-") as place:
        (Path(place) / CARD).write_text(card, encoding="utf-8")
        return repository.commit({CARD: Path(place, CARD), CORPUS_FILE: Path(path)}, "Corpus by metaphrase")


def push_vector(
    path: str | Path,
    repo_id: str,
    *,
    check: bool = True,
    command: str | None = None,
    **options: Unpack[CommitOptions],
) -> str:
    """Upload a task vector with its card; ``load_encoder("organisation/name")`` adds it to its base.

    The vector of a model package is uploaded with the package's card, whose examples name the repository, its digests,
    reference embeddings, licence and notices. The commit deletes files of a release in the repository. Other files are kept.

    Args:
        path: A file that ``metaphrase merge --vector`` wrote.
        repo_id: `organisation/name`; the repository is created if it does not exist.
        check: Compare the files with a download after the upload.
        command: The shell command that error messages name, if it is not the one that pushes the file.
        **options: See `CommitOptions`.

    Returns:
        URL of the commit; of the current one if nothing has changed.

    Raises:
        MissingFileError: The file does not exist.
        ModelFileError: The file is damaged or not a task vector.
        UsageError: The base is a local folder, which others cannot load, or `repo_id` is not a valid name.
        HubError: The Hub refuses the token, cannot be reached, or the upload failed.
    """
    vector = TaskVector.load(path)
    base, added = split_vectors(vector.base_name or "")
    if unpinned := [one for one in (base, *added) if "/" in one and "@" not in one]:
        raise UsageError(
            f"The base of the task vector is {unpinned[0]}, without a commit, so it may change. Make the vector with "
            f'base_name="{unpinned[0]}@COMMIT", or with `metaphrase merge {unpinned[0]} TUNED --vector`.'
        )
    if not all(map(_is_public, (base, *added))):
        raise UsageError(
            f"The base of the task vector is {vector.base_name or 'unknown'}, which is not on a Hub, so others cannot load "
            "it. Push the base, make the vector with `metaphrase merge organisation/base TUNED --vector`, and push that."
        )
    repository = _Repository(repo_id, hint=_hint(command or push_command(path, repo_id, **options)), **options)
    folder = Path(path).parent
    packaged = Path(path).name == VECTOR_FILE and is_packaged(folder)
    if packaged:
        check_files(folder, str(folder))
    names = (CARD, MANIFEST, REFERENCE, *NOTICES) if packaged else ()
    beside = {name: file for name in names if (file := model_file(folder, name))}
    with tempfile.TemporaryDirectory(prefix="metaphrase-") as place:
        card = (
            name_package(_text(beside[CARD], folder / CARD), repo_id)
            if CARD in beside
            else vector_card(vector, repo_id, repo_id, languages=stated_in(vector.card, "language"))
        )
        (Path(place) / CARD).write_text(redact(card), encoding="utf-8")
        return repository.commit(
            beside | {CARD: Path(place, CARD), VECTOR_FILE: Path(path)},
            "Task vector by metaphrase",
            replaces=belongs_to_release,
            check=check,
        )


def _is_public(name: str) -> bool:
    """Whether a part of the name of a vector's base is the starter, a model on the Hub, or one in a package."""
    place, at, _ = name.partition("@")  # the stored name of a local folder has no path
    return is_starter(name) or (bool(at) and ("/" in place or place in (*RELEASED, *installed_models())))


def _check_metadata(card: Path, original: Path) -> None:
    """Refuse a card whose metadata the Hub could not read, before a repository is made."""
    try:
        metadata_load(card)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ModelFileError(
            f"The metadata of {original} are not valid YAML: {reason}. Correct them, and push again."
        ) from error


def _text(path: Path, original: Path) -> str:
    """The text of the copy of a file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{original} is not in UTF-8. Save it in UTF-8, and push again.") from error


def push_command(
    what: str | Path,
    repo_id: str,
    *,
    with_heads: bool = False,
    vector_bits: int | None = None,
    license: str | None = None,
    check: bool = True,
    **options: Unpack[CommitOptions],
) -> str:
    """The shell command that pushes a release, its task vector or a corpus, without token and title.

    >>> push_command("my runs/sw", "me/swahili", private=True, revision="next")
    "metaphrase push 'my runs/sw' --repo me/swahili --private --revision next"
    """
    words = ["metaphrase", "push", str(what), "--repo", repo_id]
    words += ["--private"] if options.get("private") else []
    words += ["--revision", revision] if (revision := options.get("revision")) else []
    words += ["--with_heads"] if with_heads else []
    words += ["--vector", "--bits", str(vector_bits)] if vector_bits else []
    words += ["--license", license] if license else []
    words += [] if check else ["--no_check"]
    return without_tokens(shlex.join(words))


def make_repository(
    repo_id: str, repo_type: str | None = None, *, private: bool = False, token: str | None = None, later: str = ""
) -> str:
    """Create a repository before the work whose result it receives, or check that an existing one is writable.

    A bare name belongs to the token's user. ``later`` is the last sentence of error messages; see `CommitOptions` for the
    others. Returns `organisation/name`.
    """
    repository = _Repository(repo_id, repo_type, private=private, token=token, hint=later, bare=True)
    with repository.errors():
        repository.create()
        try:
            retry(lambda: repository.api.auth_check(**repository.where, write=True), RETRY_PAUSES[:1])
        except HfHubHTTPError as error:
            if status_of(error) != 404:  # the repository exists, but not every Hub implements this request
                raise
    return repository.repo_id


def _hint(command: str) -> str:
    return f"Nothing is lost; push it later with `{command}`."


@dataclass(repr=False)
class _Repository:
    """A repository on the Hub; ``hint`` is the last sentence of error messages, and a ``bare`` name has no organisation."""

    repo_id: str
    repo_type: str | None = None
    _: KW_ONLY
    hint: str
    bare: bool = False
    private: bool = False
    revision: str | None = None
    token: str | None = None
    commit_message: str | None = None

    def __post_init__(self) -> None:
        _check_name(self.repo_id, bare=self.bare)
        if self.revision == "":
            raise UsageError("The name of the branch is empty. Pass one, or omit it to push to main.")
        if self.token is None and not constants.HF_HUB_OFFLINE and get_token() is None:
            raise HubAccessError(
                f"Pushing to {self.repo_id} requires a token with write access: set HF_TOKEN or run `hf auth login`. "
                f"{self.hint}"
            )
        self.api = HfApi(token=self.token)
        self._name = uuid.uuid4().hex  # identifies the commit of this push
        self._start: str | None = None  # head before the first attempt to commit

    @property
    def where(self) -> dict[str, Any]:
        return {"repo_id": self.repo_id, "repo_type": self.repo_type}

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Translate the errors of the client inside a block."""
        return hub_errors(self.repo_id, "write to", self.hint, token=self.token)

    def create(self) -> None:
        """Create the repository if it does not exist, and complete its name."""
        made = retry(
            lambda: self.api.create_repo(**self.where, private=self.private or None, exist_ok=True), RETRY_PAUSES[:1]
        ).repo_id
        if self.repo_id.casefold() not in (made.casefold(), made.casefold().partition("/")[2]):
            raise HubConnectionError(
                f"{self.repo_id} was requested, but the Hub returned {made!r}. If the repository was renamed, use its new "
                "name."
            )
        self.repo_id = made
        if self.private and not self._is_private():
            raise UsageError(
                f"{made} exists and is public. Make it private in its settings, or choose another name. {self.hint}".rstrip()
            )

    def commit(
        self,
        files: Mapping[str, Path],
        title: str,
        *,
        replaces: Callable[[str], bool] = lambda path: False,
        check: bool = True,
    ) -> str:
        """Make the repository contain `files`, and no other file that `replaces` accepts, with one commit. Returns its
        address.

        The commit is downloaded and compared with the files if ``check`` is set.
        """
        digests = {name: file_sha256(path) for name, path in files.items()} if check else {}
        with self.errors():
            self.create()
            if self.revision is not None:
                retry(lambda: self.api.create_branch(**self.where, branch=str(self.revision), exist_ok=True))
            sha = retry(lambda: self._attempt(files, redact(self.commit_message or title), replaces))
            kind = "datasets/" if self.repo_type == "dataset" else ""
            url = f"{self.api.endpoint}/{kind}{self.repo_id}/commit/{sha}"
            if self.private and not self._is_private():
                raise HubError(
                    f"{self.repo_id} became public during the push, so everybody can read {url}. Make it private in its "
                    "settings or delete it, and consider its content published."
                )
        if check:
            with tempfile.TemporaryDirectory(prefix="metaphrase-") as cache:
                there = download(**self.where, revision=sha, token=self.token, cache_dir=cache, files=[*files])
                for name, digest in digests.items():
                    if not (there / name).is_file() or file_sha256(there / name) != digest:
                        raise HubError(f"{name} in {url} differs from the file that was pushed. {self.hint}")
            logger.info("The files in %s are those that were pushed.", url)
        return url

    def _is_private(self) -> bool:
        return retry(lambda: self.api.repo_info(**self.where)).private is True

    def _attempt(self, files: Mapping[str, Path], message: str, replaces: Callable[[str], bool]) -> str:
        """Find the commit of an earlier attempt, or commit onto the current head; returns the commit."""
        if self._start is not None and (landed := self._landed()):
            logger.warning("The commit exists; only the Hub's response was lost.")
            return landed
        head: Any = self.api.repo_info(**self.where, revision=self.revision)
        self._start = self._start or str(head.sha)
        existing = {sibling.rfilename for sibling in head.siblings or ()}
        deletions = [CommitOperationDelete(path) for path in sorted(existing - files.keys()) if replaces(path)]
        commit = self.api.create_commit(
            **self.where,
            operations=[*(CommitOperationAdd(path, content) for path, content in files.items()), *deletions],
            commit_message=message,
            commit_description=f"metaphrase push {self._name}",
            revision=self.revision,
            parent_commit=head.sha,
        )
        if not re.fullmatch(r"[0-9a-f]{40}", str(commit.oid)):
            raise HubConnectionError(
                f"The Hub at {self.api.endpoint} returned {commit.oid!r}, which is not a commit id. Check "
                f"{self.repo_id} on its page, and push again."
            )
        return str(commit.oid)

    def _landed(self) -> str | None:
        """The commit of this push among those since its first attempt."""
        for commit in self.api.list_repo_commits(**self.where, revision=self.revision):
            if commit.commit_id == self._start:
                break
            if self._name in commit.message:
                return str(commit.commit_id)
        return None


def _check_name(repo_id: str, *, bare: bool) -> None:
    if without_tokens(repo_id) != repo_id:
        raise UsageError("The name of the repository contains an access token. Nothing was sent; choose another name.")
    with contextlib.suppress(HFValidationError):
        validate_repo_id(repo_id)  # accepts letters of any script
        if repo_id.isascii() and (bare or "/" in repo_id):
            return
    raise UsageError(
        f"A repository is named organisation/name, in letters, digits, '-', '_' and '.' (ASCII only); got {repo_id!r}."
    )


def _corpus_facts(path: Path) -> dict[str, Any]:
    """Pairs, columns and languages of a bitext in Parquet format."""
    if not path.is_file():
        raise MissingFileError(
            f"The file {path} does not exist. Name a .parquet file that `metaphrase mine`, `filter` or `align` wrote."
        )
    try:
        table = pq.ParquetFile(path)
        columns = table.schema_arrow.names
        languages: set[str] = set()
        for batch in table.iter_batches(columns=[name for name in ("source_lang", "target_lang") if name in columns]):
            languages |= {value for column in batch.columns for value in pc.unique(column).to_pylist() if value}
    except (pa.ArrowException, OSError) as error:
        raise UsageError(
            f"{path} is not a Parquet file, the only format that is pushed. `metaphrase mine`, `filter` and `align` write "
            "one if their output ends in .parquet."
        ) from error
    if not {"source", "target"} <= set(columns):
        raise UsageError(
            f"{path} is not a bitext: it has the columns {', '.join(columns)}, but requires source and target."
        )
    for name in filter(columns.__contains__, _TEXT_COLUMNS):
        kind = table.schema_arrow.field(name).type
        if (kind.value_type if pa.types.is_dictionary(kind) else kind) not in _STRINGS:
            raise UsageError(f"{path} is not a bitext: its column {name} holds {kind}, but requires text.")
    return {"pairs": table.metadata.num_rows, "columns": columns, "languages": sorted(languages)}
