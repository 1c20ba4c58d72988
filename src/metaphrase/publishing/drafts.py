"""Drafts of models: :func:`drafted` writes a model to a temporary folder, where it can be measured before it is published."""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from sentence_transformers import SentenceTransformer

from metaphrase.encoders.folders import VECTOR_FILE, public_name
from metaphrase.encoders.loading import load_encoder
from metaphrase.encoders.names import find_folder, load_vectors, model_file, name_parts, split_vectors
from metaphrase.exceptions import ConfigError, UsageError
from metaphrase.io.configuration import plain, read_yaml
from metaphrase.io.files import explain_full_disk, read_json, write_json
from metaphrase.io.locks import LOCK, exclusive
from metaphrase.io.outputs import FAILED_RELEASE, check_writable
from metaphrase.publishing.card import AlignmentModelCardData
from metaphrase.publishing.contents import CARD, NOTICE, NOTICES, RECIPE, write_manifest
from metaphrase.publishing.examples import name_model
from metaphrase.publishing.provenance import (
    earlier_training,
    hub_base,
    stated,
    stated_license,
)
from metaphrase.publishing.release import release

logger = logging.getLogger(__name__)


@dataclass
class Draft:
    """A model that is written to a temporary folder.

    Attributes:
        folder: The temporary folder.
        model: The model that was loaded from it.
        destination: The final folder.
    """

    folder: Path
    model: SentenceTransformer
    destination: Path

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def publish(self, card: str | None = None) -> Path:
        """Move the model to its destination, atomically.

        Args:
            card: Text of its model card, in place of the one that was written with it.
        """
        if card is None:
            card = name_model((self.folder / CARD).read_text(encoding="utf-8"), self.destination)
        (self.folder / CARD).write_text(card, encoding="utf-8")
        write_manifest(self.folder)
        check_destination(self.destination)
        self.folder.replace(self.destination.resolve())
        return self.destination


@contextmanager
def drafted(
    model: SentenceTransformer,
    output_dir: str | Path,
    *,
    source: str | Path | None = None,
    tuned: Sequence[Path] = (),
    card: AlignmentModelCardData | None = None,
) -> Iterator[Draft]:
    """Write a model to a temporary folder next to its destination and load it; it is deleted unless it is published.

    Also deletes what killed processes left next to the destination.

    Args:
        model: The model.
        output_dir: The destination.
        source: Folder of the original model, whose licence and notices are copied.
        tuned: Folders of models that were merged into it, whose notices are added.
        card: Data of its model card, with the recipe. Default: those of a model with the recipe of ``source``.

    Raises:
        UsageError: The destination exists.
        CheckpointError: The folder that contains the destination is not writable.
        StorageError: The disk is full.
        RuntimeError: The written model does not reproduce the embeddings. Its files are kept in a folder that the message
            names, until the next model is written next to it.
    """
    check_destination(output_dir)
    destination = Path(output_dir)
    with explain_full_disk(destination), _staging(destination.resolve().parent) as folder:
        card = card or AlignmentModelCardData(recipe=None if source is None else stored_recipe(Path(source)))
        release(model, folder, recipe=card.recipe, card=card, prompts=model.prompts, folded=True)
        settings = folder / "config_sentence_transformers.json"
        content = read_json(settings)
        content["default_prompt_name"] = model.default_prompt_name
        write_json(settings, content)
        for name in NOTICES:
            if source is not None and (notice := model_file(Path(source), name)) is not None:
                shutil.copyfile(notice, folder / name)
        _add_notices(folder / NOTICE, tuned)
        yield Draft(folder, load_encoder(folder, device=str(model.device)), destination)


def part_folders(name: str) -> list[Path]:
    """The folders of a model and of the task vectors that its name adds; a vector that is a file alone has none."""
    base, vectors = split_vectors(name)
    suffix = Path(VECTOR_FILE).suffix
    return [find_folder(part)[1] for part in (base, *vectors) if not part.endswith(suffix) or Path(part).is_dir()]


def _add_notices(path: Path, folders: Iterable[Path]) -> None:
    """Append the notices of models to a file, unless it contains them."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for notice in filter(None, (model_file(folder, NOTICE) for folder in folders)):
        new = notice.read_text(encoding="utf-8", errors="replace").strip()
        text = text if new in text else f"{text.rstrip()}\n\n{new}\n".lstrip()
    if text:
        path.write_text(text, encoding="utf-8")


@contextmanager
def _staging(parent: Path) -> Iterator[Path]:
    """Yield a hidden, locked folder for a draft, and delete the folders that killed processes left behind."""
    for left in parent.glob(f".{'[0-9a-f]' * 32}.export"):
        with suppress(OSError):  # another process may delete it
            if time.time() - left.stat().st_mtime < 60:  # another process may be about to lock it
                continue
        with suppress(OSError), FileLock(left / LOCK, blocking=False, fallback_to_soft=False):
            shutil.rmtree(left, ignore_errors=True)
    folder = parent / f".{uuid.uuid4().hex}.export"
    draft = folder / "draft"
    with exclusive(folder):
        try:
            yield draft
        finally:
            if not (draft / FAILED_RELEASE).exists():
                shutil.rmtree(draft, ignore_errors=True)


def derived_card(model: SentenceTransformer, name: str, **known: Any) -> AlignmentModelCardData:
    """The card of a model that is made from another one.

    It has the languages, the recipe, the Hub id and the licence of the other model, the task vectors that the name adds, and
    what its card records.
    """
    card = AlignmentModelCardData(
        **stated_license(name),
        language=stated(name, "language") or None,
        recipe=stored_recipe(find_folder(split_vectors(name)[0])[1]),
        source=earlier_training(name),
        **{**_additions(name), **known},
    )
    card.base_model, card.base_model_revision = hub_base(model, name)
    return card


def _additions(name: str) -> dict[str, Any]:
    """What the task vectors of a name add to their base, for a card."""
    base, files = name_parts(name)
    if not files:
        return {}
    vectors = load_vectors(files)
    alphas, removed = [vector.alpha for vector in vectors], dict.fromkeys((vector.base for vector in vectors), 0)
    for vector in vectors:  # the sum of vectors of one base has the directions of the one with most
        count = 0 if vector.directions is None else len(vector.directions)
        removed[vector.base] = max(removed[vector.base], count)
    base, *tuned = map(public_name, (base, *files))
    return {
        "merge": {"base": base, "alpha": alphas[0] if len(set(alphas)) == 1 else alphas, "tuned": tuned},
        "debias": {"directions": sum(removed.values())} if any(removed.values()) else None,
    }


def stored_recipe(folder: Path) -> dict[str, Any] | None:
    """The recipe of a release, if it has one."""
    path = model_file(folder, RECIPE)
    if path is None:
        return None
    try:
        recipe = plain(read_yaml(path))
    except ConfigError:
        recipe = None
    if not isinstance(recipe, dict):
        logger.warning("%s is not a recipe, so it is not copied.", folder / RECIPE)
        return None
    return recipe


def check_destination(output_dir: str | Path) -> None:
    """Check that an export overwrites nothing, replaces neither the current folder nor a mounted one, and can be written."""
    folder = Path(output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists. Nothing is overwritten: choose another --output_dir, or delete it.")
    if folder.resolve() == Path.cwd():
        raise UsageError(f"{folder} is the current folder, but a new one is written. Choose another --output_dir.")
    if folder.is_mount():
        raise UsageError(f"{folder} is a mounted folder, which cannot be replaced. Name a new folder in it.")
    check_writable(folder.absolute().parent)


def how_to_load(folder: str | Path) -> str:
    """A sentence on how to load an export."""
    return f'Load it with SentenceTransformer("{folder}").'
