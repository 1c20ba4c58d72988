"""The names of models: the starter, a folder, an installed model or a Hub id, with task vectors that are added to it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError

from metaphrase.encoders.folders import CONFIG, MODULES_FILE, VECTOR_FILE, is_local, readable_file
from metaphrase.encoders.installed import check_files, installed_model, is_installed, is_packaged, suggestion
from metaphrase.exceptions import HubError, MissingFileError, ModelFileError, UsageError
from metaphrase.io.hub import download
from metaphrase.merging import TaskVector

STARTER = "starter"
#: Between the name of a model and the names of the task vectors that are added to it.
PLUS = " + "

#: Files of an encoder: settings, weights, tokenizer, modules and card.
_FILES = (
    "*config*.json",
    "modules.json",
    "model*.safetensors*",
    "*token*.json",
    "*vocab*",
    "merges.txt",
    "*.model",
    "README.md",
    "?_*/*",
    VECTOR_FILE,
)


def name_parts(name: str) -> tuple[str, list[str]]:
    """The model that a name starts with, and the vectors that are added to it: files, folders, packages or repositories.

    A folder, package or repository that contains only a vector is split into its base and the vector.
    """
    base, files = split_vectors(name)
    found, folder = find_folder(base)
    installed = installed_model(base)
    if not (has_vector(folder) or (installed and is_packaged(folder))):
        return base, files
    place = found if folder == Path(found) else str(installed or f"{found}@{folder.name}")
    check_files(folder, place)
    vector = TaskVector.load(folder / VECTOR_FILE)
    if vector.base_name is None or place in files:
        raise ModelFileError(
            f"The task vector of {base} does not name its base. Load it as BASE + {folder / VECTOR_FILE}."
        )
    return name_parts(PLUS.join([vector.base_name, place, *files]))


def load_vectors(files: Iterable[str]) -> list[TaskVector]:
    """Read the task vectors that the name of a model adds, by the names that `split_vectors` or `name_parts` returns."""
    return [TaskVector.load(vector_file(file) or file) for file in files]


def has_vector(folder: Path) -> bool:
    """Whether a folder holds a task vector instead of a model."""
    return (folder / VECTOR_FILE).is_file() and not ((folder / MODULES_FILE).exists() or (folder / CONFIG).exists())


def vector_file(name: str) -> Path | None:
    """The task vector's file for a name: the file itself, or that in a folder or repository that contains only a vector.

    None if the name denotes a model, or a model and vectors that are added to it.
    """
    if split_vectors(name)[1]:
        return None
    if name.endswith(Path(VECTOR_FILE).suffix) and not Path(name).is_dir():
        return Path(name)
    folder = find_folder(name)[1]
    return folder / VECTOR_FILE if has_vector(folder) else None


def find_folder(name_or_path: str | Path) -> tuple[str, Path]:
    """The name without its revision, and the folder, of a model or of a task vector; see `find_model`."""
    name, revision = split_revision(str(name_or_path))
    if not name:
        raise UsageError("The name of a model is empty. Pass 'starter', a folder, an installed model or a Hub id.")
    if revision == "":
        raise UsageError(f"The revision of {name} is empty. Name one after the @, or omit the @.")
    if name == STARTER:
        from metaphrase.encoders.starter import starter_path

        place = starter_path(source=_starter_source(revision)) if revision else starter_path()
        return str(place), place
    if (installed := installed_model(str(name_or_path))) is not None:
        return name, installed.folder
    if revision is not None or not is_local(name):  # a folder has no revisions
        return name, _download_model(name, revision)
    if not Path(name).is_dir():
        if name.endswith(Path(VECTOR_FILE).suffix):
            raise ModelFileError(f'{name} is a file. If it is a task vector, name its base too: "BASE + {name}".')
        raise ModelFileError(f"{name} is a file, but a model is a folder. Name the folder that contains it.")
    return name, Path(name)


def repository_of(name: str) -> str:
    """The name of a model on the Hub without its revision; other names are returned unchanged.

    >>> repository_of("organisation/name@fd1525a"), repository_of("starter@wheel")
    ('organisation/name', 'starter@wheel')
    """
    return split_revision(name)[0] if "/" in name else name


def full_name(name: str) -> str:
    """The name of a model with its version: the source of the starter, or the version of an installed model."""
    if is_starter(name):
        from metaphrase.encoders.starter import stored_source

        return "@".join(filter(None, (STARTER, stored_source(find_folder(name)[1]))))
    return str(installed_model(name) or name)


def is_starter(name: str | None) -> bool:
    """Whether a name denotes the starter alone, with or without its source."""
    return name is not None and split_revision(name)[0] == STARTER and not split_vectors(name)[1]


def _starter_source(name: str) -> Any:
    if name not in ("hub", "wheel"):
        raise UsageError(
            f"The starter comes from the Hub or from a wheel: {STARTER}@hub or {STARTER}@wheel, not @{name}."
        )
    return name


def split_revision(name: str) -> tuple[str, str | None]:
    """Split ``organisation/name@revision`` into name and revision; an ``@`` in the name of a folder is part of the name.

    >>> split_revision("intfloat/multilingual-e5-small@fd1525a"), split_revision("starter")
    (('intfloat/multilingual-e5-small', 'fd1525a'), ('starter', None))
    """
    before, at, revision = name.partition("@")
    return (name, None) if not at or is_local(name) else (before, revision)


def split_vectors(name: str) -> tuple[str, list[str]]:
    """Split ``model + vector.safetensors`` into the model and the files of task vectors; an existing path is not split.

    >>> split_vectors("starter + sw.safetensors"), split_vectors("starter")
    (('starter', ['sw.safetensors']), ('starter', []))
    """
    words, parts = name.split(PLUS), []
    while words:
        ends = (at for at in range(len(words), 1, -1) if Path(PLUS.join(words[:at])).exists())
        end = next(ends, 1)
        parts.append(PLUS.join(words[:end]))
        words = words[end:]
    return parts[0], parts[1:]


def model_folder(name: str | None) -> Path | None:
    """The folder of a model that is neither the starter, nor installed, nor on the Hub."""
    base = split_vectors(name)[0] if name else None
    if not base or is_starter(base) or not (Path(base).is_dir() and is_local(base)) or installed_model(base):
        return None
    return Path(base)


def model_file(folder: Path, path: str) -> Path | None:
    """A file that accompanies a model, such as its licence, if it exists. A link that leads out of the folder is refused.

    An installed model may have such links, because some installers link the files of packages.
    """
    file = folder / path
    if not file.is_file():
        return None
    return file if file.is_symlink() and is_installed(folder) else readable_file(str(folder), folder, path)


def encoder_files(name: str | None) -> list[Path]:
    """The local files that :func:`load_encoder` reads; none for the starter and a model on the Hub."""
    folder = model_folder(name)
    files = [path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()] if folder else []
    return files + [Path(file) for file in split_vectors(name or "")[1] if Path(file).is_file()]


def _download_model(name: str, revision: str | None) -> Path:
    """The folder of a Hub's model in the cache, named after its commit; without a network, the cached one."""
    full = f"{name}@{revision}" if revision else name
    holds_none = f"The folder {full} exists, but holds no model"
    missing = f"There is no folder {full}, and no model of that name"
    if Path(full).is_dir():
        missing = f"{holds_none}, and there is no model of that name"
    near = "" if "/" in name else suggestion(name, (STARTER,))
    try:
        return download(name, revision=revision)
    except (HFValidationError, HubError) as error:
        if any(Path(full).glob("checkpoint-*")):
            raise ModelFileError(
                f"{full} holds checkpoints, but no release. Repeat the command of the run to resume it."
            ) from error
        if isinstance(error, HubError):
            raise type(error)(f"{missing} in the cache{near or '.'} {error}") from error
        if Path(full).is_dir():
            raise ModelFileError(f"{holds_none}: it has no {CONFIG}.") from error
        hint = "Models on the Hub are called organisation/name."
        if PLUS.strip() in name:
            hint = 'A task vector and its base are separated by spaces and a plus sign: "BASE + VECTOR".'
        raise MissingFileError(f"{missing}{near or '.'} {hint}") from error
