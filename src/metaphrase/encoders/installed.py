"""Models in pip packages, found by their names, and the comparison of a model with the digests of its release.

A package declares its model as an entry point in the group ``metaphrase.models``, which maps the model's name to the
Python package with its files: ``my-model = "my_model"``. Its code is not run. The files are those of a release, or
``task_vector.safetensors``, ``reference.json``, a card, and ``release.json`` with their digests and the digest of the
merged weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from sentence_transformers import SentenceTransformer

from metaphrase.encoders.checks import REFERENCE, reference_difference
from metaphrase.encoders.folders import holds_model
from metaphrase.exceptions import ModelError, ModelFileError
from metaphrase.io.configuration import did_you_mean
from metaphrase.io.digests import file_facts, weights_digest
from metaphrase.io.files import read_json

#: Entry points of model packages: ``my-model = "my_model"``.
ENTRY_POINTS = "metaphrase.models"
#: Digests of the files of a release, and of its weights.
MANIFEST = "release.json"
#: Models that have a package in this repository.
RELEASED = ("metaphrase-e5-small",)
_REMEDY = "Install or download it again."


@dataclass(frozen=True)
class InstalledModel:
    """A model in an installed package: its name, the version of the package, and the folder of its files."""

    name: str
    version: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


def installed_models() -> dict[str, EntryPoint]:
    """Entry points of the installed model packages by name of the model."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def installed_model(name: str) -> InstalledModel | None:
    """The installed model of a name, with or without a version.

    None if there is none, or if a folder of that name holds a model.
    """
    place = Path(name)
    name, _, version = name.partition("@")
    if holds_model(place):  # before the search of all packages, which is slow
        return None
    entries = [entry for entry in entry_points(group=ENTRY_POINTS) if entry.name == name]
    if not entries:
        return None
    if len(entries) > 1:
        packages = " and ".join(sorted(entry.dist.name for entry in entries if entry.dist is not None))
        raise ModelError(f"Several installed packages contain a model {name}: {packages}. Uninstall all but one.")
    entry = entries[0]
    found = entry.dist.version if entry.dist is not None else "0"
    if version not in ("", found):
        raise ModelError(
            f"{name} {found} is installed, but version {version} was requested. Install that version, or omit @{version}."
        )
    if (folder := _package_folder(entry.module)) is None:
        raise ModelFileError(f"The package of {name} has no folder {entry.value}. Install it again.")
    return InstalledModel(name, found, folder)


def is_installed(folder: Path) -> bool:
    """Whether a folder is that of an installed model's files."""
    return any(folder == _package_folder(entry.module) for entry in installed_models().values())


def _package_folder(module: str) -> Path | None:
    """The folder of a package, also of one in another package, whose code is not run."""
    outer, *inner = module.split(".")
    spec = find_spec(outer)
    for name in inner:
        spec = spec and PathFinder.find_spec(name, spec.submodule_search_locations or ())
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def suggestion(name: str, others: tuple[str, ...] = ()) -> str:
    """How to install a released model, or the installed models and the one that a misspelt name may mean, for a message.

    >>> suggestion("startr", ("starter",)).startswith(" (did you mean 'starter'?)")
    True
    """
    known = installed_models()
    if name in RELEASED:
        return f". Install its package in a clone of metaphrase: pip install ./models/{name}."
    listed = f" Installed models: {', '.join(sorted(known))}." if known else ""
    return f"{did_you_mean(name, [*others, *known, *RELEASED])}.{listed}"


def check_files(folder: Path, name: str) -> None:
    """Compare the files of a folder with the digests in its manifest, if it has one. The card may differ."""
    for file, facts in _manifest(folder, name).get("files", {}).items():
        if file == constants.REPOCARD_NAME:
            continue
        path = folder / file
        exists = path.is_relative_to(folder) and ".." not in Path(file).parts and path.is_file()
        if not exists or file_facts(path) != facts:
            what = "was altered or is damaged" if exists else "is missing"
            raise ModelFileError(f"{file} of {name} {what}. {_REMEDY}")


def is_packaged(folder: Path) -> bool:
    """Whether a folder holds a task vector with the digest of the merged weights."""
    return "weights" in _manifest(folder, str(folder))


def check_merged(model: SentenceTransformer, folder: Path, name: str, *, embeddings: bool = True) -> None:
    """Compare a model with the digest of its weights, and with its reference embeddings, if its folder has them."""
    wanted = _manifest(folder, name).get("weights")
    if wanted is None:
        return
    if (found := weights_digest(model)) != wanted:
        raise ModelFileError(f"The merged weights of {name} have the digest {found}, not {wanted}. {_REMEDY}")
    if not embeddings:
        return
    difference, tolerance = reference_difference(model, folder / REFERENCE, name)
    if not difference <= tolerance:
        raise ModelFileError(
            f"{name} does not reproduce its reference embeddings: a component differs by {difference:.1e}, more than "
            f"{tolerance:.0e}, although its weights are those that were released. Use the versions that its card names."
        )


def _manifest(folder: Path, name: str) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        content = read_json(path) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{MANIFEST} of {name} is damaged: {error}. {_REMEDY}") from error
    if not isinstance(content, dict) or not isinstance(content.get("files", {}), dict):
        raise ModelFileError(f"{MANIFEST} of {name} is damaged: it has no table of files. {_REMEDY}")
    return content
