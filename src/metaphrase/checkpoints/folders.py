"""Atomic checkpoint folders.

A checkpoint is written to a staging folder. Every file is flushed to disk and listed in a manifest with its size and
SHA-256, then the folder is renamed into place. If the process dies, earlier checkpoints stay intact. Only
one process writes to an output folder (:mod:`metaphrase.io.locks`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from metaphrase.exceptions import CheckpointError, NewerCheckpointError
from metaphrase.io.counts import format_size
from metaphrase.io.digests import file_facts, json_digest
from metaphrase.io.environment import hardware, versions
from metaphrase.io.files import follow_umask, read_json

logger = logging.getLogger(__name__)

#: Version of the checkpoint format. Later versions of the library read all earlier formats; the digest of a manifest is
#: computed in the same way in all of them.
FORMAT = 1

MANIFEST = "manifest.json"

#: Folder of the objectives' heads inside a checkpoint.
HEADS = "heads"

#: File of the training arguments inside a checkpoint or a release: JSON, in place of the pickle of the parent classes.
TRAINING_ARGS = "training_args.json"

#: Folders inside an output folder: staging for a checkpoint or a release that is being written, and for one that is being
#: deleted. Uploads to the Hub ignore names that begin with an underscore.
PARTIAL, DELETED = "_partial", "_deleted"


# -------------------------------------------------------------------------------------------------------------- writing


def publish(partial: Path, place: Path, facts: Mapping[str, Any]) -> None:
    """Turn a staging folder into a checkpoint atomically.

    The staging folder is on the same file system. An existing checkpoint is replaced.
    """
    follow_umask(partial)
    paths = sorted(path for path in partial.rglob("*") if path.name != MANIFEST)
    for path in paths:
        _flush(path)
    files = {path.relative_to(partial).as_posix(): file_facts(path) for path in paths if path.is_file()}
    environment = {"versions": versions(), "hardware": hardware()}
    _write_manifest(partial, {"format": FORMAT, **facts, **environment, "files": files})
    if place.exists():
        _delete(place, by=lambda aside: (place.rename(aside), partial.rename(place)))
    else:
        partial.rename(place)
    _flush(place.parent)


def rotate(output: Path, written: Path, limit: int | None, *, best: str | None = None) -> None:
    """Delete the oldest checkpoints beyond a limit.

    The latest and the best checkpoint are always kept. If the latest fails verification, all checkpoints are kept. None or
    0 means no limit.
    """
    folders = checkpoint_folders(output)
    keep = {written.name, Path(best or written).name}
    surplus = len(folders) - max(limit, len(keep)) if limit and limit > 0 else 0
    if surplus <= 0:
        return
    if fault := fault_of(written):
        logger.warning("%s Older checkpoints are kept.", fault)
        return
    for folder in [folder for folder in folders if folder.name not in keep][:surplus]:
        remove(folder)


def remove_file(folder: Path, name: str) -> None:
    """Delete a file of a checkpoint and its entry in the manifest; the checkpoint stays valid throughout."""
    if (folder / MANIFEST).is_file():
        manifest = _read(folder)
        if manifest["files"].pop(name, None):
            _write_manifest(folder, manifest)
    (folder / name).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Delete a checkpoint atomically."""
    _delete(folder, by=folder.rename)


def tidy(output: Path) -> None:
    """Clean up after a killed process: complete checkpoints in staging are moved into place, the rest is deleted."""
    for folder in checkpoint_folders(output, staged=True):
        recover(folder)
    for name in (PARTIAL, DELETED):
        shutil.rmtree(output / name, ignore_errors=True)


def recover(folder: Path) -> Path:
    """Move a checkpoint into place if it is in staging. Returns its place."""
    if folder.parent.name != PARTIAL:
        return folder
    place = folder.parent.parent / folder.name
    if folder.exists() and not place.exists():
        folder.rename(place)
        logger.info("Recovered %s, which a killed run had written completely.", place)
    return place


def _delete(folder: Path, *, by: Callable[[Path], Any]) -> None:
    """Delete a folder after moving it aside, so that a killed process never leaves a partial folder."""
    aside = folder.parent / DELETED / folder.name
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(exist_ok=True)
    by(aside)
    shutil.rmtree(aside.parent, ignore_errors=True)


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest atomically."""
    content = json.dumps({**manifest, "sha256": json_digest(manifest)}, indent=1, ensure_ascii=False) + "\n"
    aside = folder / f"{MANIFEST}.new"
    aside.write_text(content, encoding="utf-8")
    _flush(aside)
    aside.replace(folder / MANIFEST)
    _flush(folder)


def _flush(path: Path) -> None:
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -------------------------------------------------------------------------------------------------------------- reading


def checkpoint_folders(output: str | Path, *, staged: bool = False) -> list[Path]:
    """Return folders named like checkpoints, sorted by step. ``staged`` adds complete ones that are not yet in place."""
    paths = [*Path(output).glob("*-*"), *(filter(_is_staged, Path(output, PARTIAL).glob("*-*")) if staged else ())]
    found = {path: re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name) for path in paths}
    steps = {path: int(match[1]) for path, match in found.items() if match and path.is_dir()}
    return sorted(steps, key=lambda path: steps[path])


def step_of(checkpoint: str | Path) -> int:
    """Step of a checkpoint, from the name of its folder."""
    return int(Path(checkpoint).name.rpartition("-")[2])


def _is_staged(folder: Path) -> bool:
    """Whether a checkpoint in staging is complete and missing in its place."""
    return fault_of(folder) is None and not (folder.parent.parent / folder.name).exists()


def checkpoints(output: str | Path) -> list[Path]:
    """Checkpoints whose files exist with the expected sizes, sorted by step; contents are not verified."""
    return [folder for folder in checkpoint_folders(output) if not _is_damaged(folder)]


def _is_damaged(folder: Path) -> bool:
    try:
        _read(folder)
    except NewerCheckpointError:
        return False
    except CheckpointError:
        return True
    return False


def verify(folder: Path) -> dict[str, Any]:
    """Verify every file of a checkpoint against the manifest.

    Returns:
        The manifest.

    Raises:
        CheckpointError: A file is missing or damaged; the message names it.
        NewerCheckpointError: A later version of the library wrote the checkpoint.
    """
    manifest = _read(folder)
    for name, facts in manifest["files"].items():
        try:
            there = file_facts(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read: {error.strerror}.") from error
        if there != facts:
            raise CheckpointError(f"{folder}: {name} is damaged: its digest differs from the manifest.")
    return manifest


def fault_of(folder: Path) -> CheckpointError | None:
    """Why a checkpoint cannot be resumed; None if it can.

    Raises:
        NewerCheckpointError: A later version of the library wrote the checkpoint.
    """
    try:
        verify(folder)
    except NewerCheckpointError:
        raise
    except CheckpointError as error:
        return error
    return None


def _read(folder: Path) -> dict[str, Any]:
    """Read the manifest and check the sizes of the files that it lists."""
    if not folder.is_dir():
        raise CheckpointError(f"Checkpoint {folder} does not exist.")
    try:
        manifest = read_json(folder / MANIFEST)
        intact = manifest.pop("sha256") == json_digest(manifest)
    except FileNotFoundError as error:
        if checkpoints := checkpoint_folders(folder):
            raise CheckpointError(
                f"{folder} is a folder of checkpoints. Name one of them, such as {checkpoints[-1]}, or set "
                f"--resume_from_checkpoint to true to resume from the last one in --output_dir."
            ) from error
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it is incomplete, or another program wrote it. Start from its weights with "
            f"--model {folder}."
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged ({error}).") from error
    if not intact:
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged: its digest does not match.")
    if manifest["format"] > FORMAT:
        by = manifest.get("versions", {})
        raise NewerCheckpointError(
            f"{folder} was written by metaphrase {by.get('metaphrase', '?')} in format {manifest['format']}; metaphrase "
            f"{version('metaphrase')} reads formats up to {FORMAT}. Install that version or a later one."
        )
    for name, facts in manifest["files"].items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} is missing.") from error
        if size != facts["bytes"]:
            raise CheckpointError(f"{folder}: {name} is damaged: it has {size} bytes instead of {facts['bytes']}.")
    return dict(manifest)


def read_manifest(checkpoint: str | Path) -> dict[str, Any]:
    """The manifest of a verified checkpoint."""
    return dict(read_json(Path(checkpoint) / MANIFEST))


def newest(output: str | Path) -> Path | None:
    """Return the latest valid checkpoint; damaged ones after it are logged and skipped.

    Returns:
        The checkpoint, or None if the folder has no checkpoints.

    Raises:
        CheckpointError: All checkpoints are damaged.
        NewerCheckpointError: A later version of the library wrote the latest checkpoint.
    """
    wrong = []
    for folder in reversed(checkpoint_folders(output, staged=True)):
        if (fault := fault_of(folder)) is None:
            return folder
        logger.warning("Skipped: %s", fault)
        wrong.append(str(fault))
    if wrong:
        raise CheckpointError(
            f"No checkpoint in {output} can be resumed. {' '.join(wrong)} Start again in another --output_dir, or delete "
            "them."
        )
    return None


def last_good(output: str | Path) -> str:
    """Name the latest valid checkpoint in a sentence for error messages."""
    for folder in reversed(checkpoint_folders(output)):
        with suppress(CheckpointError):
            verify(folder)
            return f"The last valid checkpoint is {folder}."
    return "There is no earlier checkpoint."


# --------------------------------------------------------------------------------------------------------- output folder


def check_space(output: Path, what: str, weights: int, whole: int) -> None:
    """Refuse a disk without room for the weights of what is written, a checkpoint or a release.

    Sizes are in bytes; ``whole``, of all its files, is approximate. The folder may not exist yet.
    """
    free = shutil.disk_usage(next(one for one in (output, *output.absolute().parents) if one.exists())).free
    message = f"{output} has {format_size(free)} free, and a {what} needs about {format_size(whole)}."
    if free < weights:
        skip = " Without checkpoints (--save_strategy no), a run needs less." if what == "checkpoint" else ""
        raise CheckpointError(f"{message} Free some space, or choose another output folder.{skip}")
    if free < whole:
        logger.warning("%s The first %s may not fit.", message, what)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Collection[str]:
    """List the changed facts of a run, each with both values; of long values, the part around the first difference.

    >>> differences({"seed": 1, "corpus": "x" * 40 + "1"}, {"seed": 2, "corpus": "x" * 40 + "2"})
    ['corpus (…xxxxxxxxxxxxxxxxxxxx1" → …xxxxxxxxxxxxxxxxxxxx2")', 'seed (1 → 2)']
    """

    def shown(*values: Any) -> str:
        texts = [json.dumps(value, ensure_ascii=False) for value in values]
        first = next((at for at, (one, other) in enumerate(zip(*texts, strict=False)) if one != other), 0)
        start = max(first - 20, 0) if max(map(len, texts)) > 40 else 0
        parts = (f"{'…' if start else ''}{text[start : start + 40]}{'…' * (len(text) > start + 40)}" for text in texts)
        return " → ".join(parts)

    return [
        f"{name} ({shown(before.get(name), now.get(name))})"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
