"""Origins and licences of training data and base models, if they are stated."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from httpx2 import HTTPError
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from sentence_transformers import SentenceTransformer

from metaphrase.encoders.folders import is_local, public_name
from metaphrase.encoders.installed import installed_model
from metaphrase.encoders.names import (
    PLUS,
    find_folder,
    full_name,
    has_vector,
    is_starter,
    model_file,
    split_revision,
    split_vectors,
    vector_file,
)
from metaphrase.encoders.starter import HUB_ID
from metaphrase.io.configuration import MAX_DEPTH, MAX_VALUES
from metaphrase.io.files import DEMO
from metaphrase.merging import TaskVector

logger = logging.getLogger(__name__)

#: Origin and licences of the packaged bitext, also for copies of its pairs in other files.
PACKAGED = {
    "origin": "localisation files of free software",
    "license": "BSD-3-Clause, BSD-2-Clause, Apache-2.0, MIT",
}

#: Metadata of the licence of a model. One that the Hub does not list is ``other``, with a name and a link.
LICENSE_KEYS = ("license", "license_name", "license_link")

Origins = Mapping[str, Mapping[str, str]]


def provenance(
    file: Mapping[str, Any], *, origins: Origins | None = None, data_license: str | None = None
) -> dict[str, str]:
    """Return the origin and licence of a training file, if they are known.

    ``origins`` has known origins and licences, of files by their names without folder, of data sets on the Hub by their
    ids; ``data_license`` is the licence of all other files.
    """
    name = str(file.get("file", ""))
    packaged = PACKAGED if Path(str(file.get("path", ""))).parent == DEMO else {}
    known = (origins or {}).get(hub_data_set(name) or Path(name).name, packaged)
    return ({"license": data_license} if data_license else {}) | dict(known)


def hub_licenses(files: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the licences in the cards of data sets on the Hub, by id; each card is read once."""
    revisions = {name: file.get("revision") for file in files if (name := hub_data_set(file.get("file")))}
    by_name = {name: stated(name, "license", repo_type="dataset", revision=at) for name, at in revisions.items()}
    return {name: {"license": ", ".join(licenses)} for name, licenses in by_name.items() if licenses}


def hub_data_set(name: Any) -> str | None:
    """Return ``organisation/name`` of a corpus that is a data set on the Hub.

    >>> hub_data_set("hf:acme/corpus:sw-en@train#main"), hub_data_set("sw-en.tsv")
    ('acme/corpus', None)
    """
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)([:@#].*)?", str(name), re.ASCII)
    return match[1] if match else None


def stated(name: str, key: str, *, repo_type: str = "model", revision: str | None = None) -> list[str]:
    """Return the licences (``license``), their names and links (`LICENSE_KEYS`) or the languages (``language``) in a card.

    The card is that of a folder or of a repository on the Hub. The values are spelled as in the card; none if it cannot be
    read. For a model with task vectors, they are those of all of them, and for a folder with a task vector and no card those
    of the vector. For a data set with another licence, the card's ``license_name``.
    """
    base, files = split_vectors(name) if repo_type == "model" else (name, [])
    if files:
        of_all = stated(base, key, revision=revision)
        for vector in map(TaskVector.load, filter(None, map(vector_file, files))):
            licenses = filter(None, (vector.license or "").split(" AND "))
            of_all += licenses if key == "license" else stated_in(vector.card, key)
        return list(dict.fromkeys(of_all))
    if is_starter(name):
        return ["mit"] if key == "license" else []
    metadata = card_metadata(name, repo_type=repo_type, revision=revision)
    values = _value(metadata, key)
    if values is None and repo_type == "model" and (file := _local_vector(name)) is not None:
        vector = TaskVector.load(file)
        return (
            (vector.license or "").split(" AND ")
            if key == "license" and vector.license
            else stated_in(vector.card, key)
        )
    if repo_type == "dataset" and values in ("other", ["other"]):
        values = metadata.get("license_name") or values
    return as_list(values)


def _local_vector(name: str) -> Path | None:
    """The task vector in a local folder, or in an installed package, that holds nothing else."""
    return vector_file(name) if is_local(name) or installed_model(name) else None


def stated_license(name: str, *, revision: str | None = None) -> dict[str, Any]:
    """Return the metadata of the licence of a model for the card of a model that is made from it."""
    return license_metadata(*(stated(name, key, revision=revision) for key in LICENSE_KEYS))


def license_metadata(licenses: Iterable[str], names: Iterable[str], links: Iterable[str]) -> dict[str, Any]:
    """Return licences as metadata of a card; ``license`` is a list if there are several.

    The Hub accepts one name and one link: of several, none is returned, with a warning.

    >>> license_metadata(["mit", "other"], ["acme-1.0"], [])
    {'license': ['mit', 'other'], 'license_name': 'acme-1.0'}
    """
    metadata = {key: [*dict.fromkeys(of)] for key, of in zip(LICENSE_KEYS, (licenses, names, links), strict=True)}
    other = [*metadata["license_name"], *metadata["license_link"]]
    if max(len(metadata["license_name"]), len(metadata["license_link"])) > 1:
        logger.warning("The licences have different names or links: %s. Add them to the model card.", ", ".join(other))
        metadata = {"license": metadata["license"]}
    return {key: values if len(values) > 1 else values[0] for key, values in metadata.items() if values}


def card_metadata(name: str, *, repo_type: str = "model", revision: str | None = None) -> dict[str, Any]:
    """Return the metadata of the card of a model or of a data set; none if it cannot be read."""
    card = find_card(name, repo_type=repo_type, revision=revision)
    try:
        return {} if card is None else read_card(card)[0] or {}
    except OSError as error:
        logger.debug("The card of %s could not be read: %s", name, error)
        return {}


def earlier_training(name: str, added: Iterable[str] = ()) -> dict[str, Any] | None:
    """What the card of a model records about its training with metaphrase; None if nothing.

    What the cards of task vectors in its name, and of ``added`` models, record is among its ``runs``.
    """
    base, vectors = split_vectors(name)
    facts = _records(base)
    source: dict[str, Any] = facts[0] if len(facts) == 1 else {"runs": facts} if facts else {}
    for names in (vectors, added):
        # models that were trained from the base, or the base with vectors, repeat its record
        runs = [
            {key: value for key, value in run.items() if (key, value) != ("source", source)}
            for run in earlier_runs(names)
            if run != source
        ]
        if runs:
            source = {**source, "runs": [*mappings(source.get("runs")), *runs]}
    return source or None


def trained_languages(name: str) -> list[str]:
    """The languages in the cards of the task vectors in a name, and of the base if it was trained with metaphrase, too."""
    base, vectors = split_vectors(name)
    parts = vectors if earlier_training(base) is None else [base, *vectors]
    return [language for part in parts for language in stated(part, "language")]


def earlier_runs(names: Iterable[str]) -> list[dict[str, Any]]:
    """What the cards of models, and of task vectors in their names, record about training with metaphrase."""
    parts = [part for name in names for base, vectors in [split_vectors(name)] for part in (base, *vectors)]
    return [run for part in parts for facts in _records(part) for run in _runs(facts)]


def recorded_runs(card: str | None) -> list[dict[str, Any]]:
    """What the texts of cards record about training with metaphrase."""
    return [run for facts in filter(None, map(_record, _metadata(card))) for run in _runs(facts)]


def _runs(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs in the record of a task vector, or the record of a run."""
    return mappings(facts["runs"]) if facts.keys() == {"runs"} else [facts]


def _records(name: str) -> list[dict[str, Any]]:
    """What the card of a model or of a task vector, without other vectors, records about training with metaphrase."""
    if is_starter(name):
        return []
    if record := _record(card_metadata(name)):
        return [record]
    file = _local_vector(name)
    return [] if file is None else recorded_runs(TaskVector.load(file).card)


def _record(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    facts = metadata.get("metaphrase")
    return facts if isinstance(facts, dict) and facts and _is_small(facts) else None


def _is_small(content: Any) -> bool:
    """Whether content of a foreign card has bounded size and depth; with aliases, YAML may contain itself."""
    todo, values = [(content, 0)], 0
    while todo:
        one, depth = todo.pop()
        values += 1
        if values > MAX_VALUES or depth > MAX_DEPTH:
            return False
        parts = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        todo += [(part, depth + 1) for part in parts]
    return True


def read_card(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Read the metadata of a card, None if they are damaged, and the text below them."""
    content = path.read_text(encoding="utf-8-sig", errors="replace")
    block = REGEX_YAML_BLOCK.search(content)
    try:
        metadata = (yaml.safe_load(block[2]) if block else None) or {}
    except (yaml.YAMLError, ValueError, RecursionError):  # a date that does not exist, or very deep nesting
        metadata = None
    return metadata if isinstance(metadata, dict) else None, content[block.end() :] if block else content


def mappings(value: Any) -> list[Any]:
    """The mappings in a list; other values, which a card may contain, are dropped."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def as_list(value: Any) -> list[str]:
    """Languages or licences in the metadata of a card, a text or a list; YAML reads the code of Norwegian as false."""
    values = value if isinstance(value, list) else [value]
    return ["no" if one is False else str(one) for one in values if one is not None]


def _value(metadata: Mapping[str, Any], key: str) -> Any:
    """A value of a card; languages have their scripts and regions if it states them, see `hub_languages`."""
    if key != "language" or metadata.get(key) is None:
        return metadata.get(key)
    tags = as_list(metadata.get("language_bcp47"))
    codes = ([tag for tag in tags if tag.split("-")[0] == code] or [code] for code in as_list(metadata["language"]))
    return list(chain.from_iterable(codes))


def stated_in(card: str | None, key: str) -> list[str]:
    """Return what `stated` returns, from the texts of cards."""
    return list(dict.fromkeys(value for metadata in _metadata(card) for value in as_list(_value(metadata, key))))


def _metadata(card: str | None) -> list[dict[str, Any]]:
    """The metadata of the texts of cards, without damaged ones."""
    found = []
    for block in re.findall(r"^---\n(.*?)^---$", card or "", re.DOTALL | re.MULTILINE):
        with suppress(yaml.YAMLError, ValueError, RecursionError):
            found.append(yaml.safe_load(block))
    return [metadata for metadata in found if isinstance(metadata, dict)]


def hub_base(model: SentenceTransformer, name: str) -> tuple[str | None, str | None]:
    """The id and the commit of a model that is on the Hub, without task vectors that its name adds."""
    base = split_vectors(name)[0]
    if is_starter(base):
        return HUB_ID, None
    hub_id, folder = find_folder(base)
    if has_vector(folder) and folder != Path(hub_id) and installed_model(base) is None:
        return hub_id, folder.name
    return model.model_card_data.base_model or stated_base(name), model.model_card_data.base_model_revision


def stated_base(name: str) -> str | None:
    """The Hub id of the base in the metadata of a model's card, without task vectors that its name adds."""
    base = card_metadata(split_vectors(name)[0]).get("base_model")
    return base if isinstance(base, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", base) else None


def named_base(merge: Mapping[str, Any] | None, name: str, hub_id: str | None) -> dict[str, Any] | None:
    """Facts of a merge for a card, with the name of its base unless the base is the model that the card links to.

    >>> named_base({"alpha": 0.5}, "acme/sw@main", "acme/sw"), named_base({"alpha": 0.5}, "acme/sw", "acme/base")
    ({'alpha': 0.5}, {'alpha': 0.5, 'base': 'acme/sw'})
    """
    if merge is None:
        return None
    base, files = split_vectors(name)
    if hub_id is None or (not files and (is_starter(base) or split_revision(base)[0] == hub_id)):
        return dict(merge)
    return {**merge, "base": PLUS.join(map(public_name, (full_name(base), *files)))}


def find_card(name: str, *, repo_type: str = "model", revision: str | None = None) -> Path | None:
    """The card of a model, in its folder or on the Hub, or of a data set on the Hub; None if it is not available."""
    place, at = split_revision(name)
    try:
        installed = installed_model(name) if repo_type == "model" else None
        if installed or (repo_type == "model" and at is None and is_local(place)):
            return model_file(installed.folder if installed else Path(place), constants.REPOCARD_NAME)
        return Path(hf_hub_download(place, constants.REPOCARD_NAME, repo_type=repo_type, revision=revision or at))
    except (OSError, ValueError, RuntimeError, HTTPError, EntryNotFoundError) as error:
        logger.debug("The card of %s could not be read: %s", name, error)
        return None
