"""Checkpoints that are whole or not there.

A checkpoint is written into a folder aside; every file is flushed to the disk and listed in a manifest with its size and
SHA-256; then the folder is renamed into place. A process that dies at any moment leaves the checkpoints before it as they
were. Only one process writes to a folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from metaphrase.exceptions import CheckpointError, NewerCheckpointError
from metaphrase.io.digests import file_facts
from metaphrase.io.environment import versions

try:
    import fcntl
except ImportError:  # Windows: two processes on one folder are not noticed there
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

#: Version of a checkpoint's format. One that this library writes loads in every later version, and every version makes the
#: manifest's own digest in the same way.
FORMAT = 1

MANIFEST = "manifest.json"

#: Folder of the objectives' heads, in a checkpoint and in the repository of a release.
HEADS = "heads"
#: Training arguments as JSON, in place of the pickle that transformers writes.
TRAINING_ARGS = "training_args.json"

#: Inside an output folder: where a checkpoint or a release is written, where an old checkpoint is taken to be deleted, and
#: who writes. Uploads to the Hub pass over names that begin with an underscore.
PARTIAL, DELETED, LOCK = "_partial", "_deleted", "_lock"

#: What a lock that another process holds answers; other errors say that there are no locks.
_IN_USE = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)

_held: dict[Path, int] = {}  # by which process: a forked one holds nothing


# -------------------------------------------------------------------------------------------------------------- writing


def publish(partial: Path, place: Path, facts: Mapping[str, Any]) -> None:
    """Make a written folder the checkpoint of that name, at once.

    Args:
        partial: The folder, on the same file system.
        place: The checkpoint's name; one that is there already is replaced.
        facts: What the manifest says beside format, versions and files.
    """
    paths = sorted(path for path in partial.rglob("*") if path.name != MANIFEST)
    for path in paths:
        _flush(path)
    files = {path.relative_to(partial).as_posix(): file_facts(path) for path in paths if path.is_file()}
    _seal(partial, {"format": FORMAT, **facts, "versions": versions(), "files": files})
    if place.exists():
        _delete(place, by=lambda aside: (place.rename(aside), partial.rename(place)))
    else:
        partial.rename(place)
    _flush(place.parent)


def rotate(output: Path, written: Path, limit: int | None, *, best: str | None = None) -> None:
    """Delete the oldest checkpoints above a number.

    Args:
        output: The folder of the checkpoints.
        written: The checkpoint that was written last. It is kept; where it does not read back as it was written, so are all.
        limit: How many are kept; None or 0 keeps all.
        best: A checkpoint that is kept too.
    """
    folders = checkpoint_folders(output)
    keep = {written.name, Path(best or written).name}
    surplus = len(folders) - max(limit, len(keep)) if limit and limit > 0 else 0
    if surplus <= 0:
        return
    try:
        verify(written)
    except CheckpointError as error:
        logger.warning("%s Older checkpoints are kept.", error)
        return
    for folder in [folder for folder in folders if folder.name not in keep][:surplus]:
        remove(folder)


def leave_out(folder: Path, name: str) -> None:
    """Delete a file of a checkpoint, which verifies before and behind.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    if (folder / MANIFEST).is_file():
        manifest = _read(folder)
        if manifest["files"].pop(name, None):
            _seal(folder, manifest)
    (folder / name).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Delete a checkpoint, which is there or not there at every moment."""
    _delete(folder, by=folder.rename)


def tidy(output: Path) -> None:
    """Clear away what a killed process left: a checkpoint that lacks but its place gets it, the rest is deleted."""
    for folder in sorted((output / PARTIAL).glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        place = output / folder.name
        with suppress(CheckpointError):
            verify(folder)
            if not place.exists():
                folder.rename(place)
                logger.info("%s was written whole, though the run was killed.", place)
    for name in (PARTIAL, DELETED):
        shutil.rmtree(output / name, ignore_errors=True)


def _delete(folder: Path, *, by: Any) -> None:
    """Delete a folder that is first moved out of sight: killed in the middle, it is not half there."""
    aside = folder.parent / DELETED / folder.name
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(exist_ok=True)
    by(aside)
    shutil.rmtree(aside.parent, ignore_errors=True)


def _seal(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest at once."""
    content = json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1, ensure_ascii=False) + "\n"
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


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# -------------------------------------------------------------------------------------------------------------- reading


def checkpoint_folders(output: str | Path) -> list[Path]:
    """The folders that are named like checkpoints, in the order of their steps."""
    found = {path: re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name) for path in Path(output).glob("*-*")}
    steps = {path: int(match[1]) for path, match in found.items() if match and path.is_dir()}
    return sorted(steps, key=lambda path: steps[path])


def checkpoints(output: str | Path) -> list[Path]:
    """The checkpoints whose files are there in their sizes, in the order of their steps; contents are not looked at."""
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
    """Read every file of a checkpoint and compare it with the manifest.

    Returns:
        The manifest.

    Raises:
        CheckpointError: With the file that is missing or not as it was written.
        NewerCheckpointError: The checkpoint was written by a version of the library to come.
    """
    manifest = _read(folder)
    for name, facts in manifest["files"].items():
        try:
            there = file_facts(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read: {error.strerror}.") from error
        if there != facts:
            raise CheckpointError(f"{folder}: {name} is not what was written; the file was damaged since.")
    return manifest


def _read(folder: Path) -> dict[str, Any]:
    """The manifest, where all files that it names have their sizes."""
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint {folder}.")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        intact = manifest.pop("sha256") == _digest(manifest)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was cut off, or written by another program. Start from its weights with "
            f"--model {folder}."
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged ({error}).") from error
    if not intact:
        raise CheckpointError(f"{folder}: {MANIFEST} is not what was written; the file was damaged since.")
    if manifest["format"] > FORMAT:
        by = manifest.get("versions", {})
        raise NewerCheckpointError(
            f"{folder} was written by metaphrase {by.get('metaphrase', '?')} in format {manifest['format']}; metaphrase "
            f"{version('metaphrase')} reads formats up to {FORMAT}. Install that version, or a later one."
        )
    for name, facts in manifest["files"].items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} is missing.") from error
        if size != facts["bytes"]:
            raise CheckpointError(f"{folder}: {name} has {size} bytes in place of {facts['bytes']}.")
    return dict(manifest)


def newest(output: str | Path) -> Path | None:
    """The last checkpoint of a folder that verifies; those behind it are named in the log with what is wrong.

    Returns:
        The checkpoint, or None where the folder has none at all.

    Raises:
        CheckpointError: There are checkpoints, but none verifies.
        NewerCheckpointError: The last one was written by a version of the library to come.
    """
    wrong = []
    for folder in reversed(checkpoint_folders(output)):
        try:
            verify(folder)
        except NewerCheckpointError:
            raise
        except CheckpointError as error:
            logger.warning("Skipped: %s", error)
            wrong.append(str(error))
        else:
            return folder
    if wrong:
        raise CheckpointError(
            f"No checkpoint of {output} can be gone on from. {' '.join(wrong)} Begin anew in another --output_dir, or "
            "delete them."
        )
    return None


def last_good(output: str | Path) -> str:
    """The last checkpoint that verifies, for a message."""
    for folder in reversed(checkpoint_folders(output)):
        with suppress(CheckpointError):
            verify(folder)
            return f"The last good checkpoint is {folder}."
    return "There is no earlier checkpoint."


# --------------------------------------------------------------------------------------------------------- output folder


@contextmanager
def exclusive(output: str | Path) -> Iterator[None]:
    """Be the only process that writes to a folder, which is made if need be.

    The operating system gives the folder free when the process ends, however it does, so that nothing stale is left.
    A process that holds it can enter again.

    Raises:
        CheckpointError: Another process holds the folder, it is a file, or nothing can be written there.
    """
    output = Path(output)
    key = output.absolute()
    if _held.get(key) == os.getpid():
        yield
        return
    handle = _lock(output)
    _held[key] = os.getpid()
    try:
        yield
    finally:
        del _held[key]
        with suppress(OSError):
            (output / LOCK).unlink()
        os.close(handle)


def make_folder(output: Path) -> None:
    """Make an output folder where it is not there.

    Raises:
        CheckpointError: It is a file, or cannot be made.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"The output folder {output} is a file, or lies in one. Choose another.") from error
    except OSError as error:
        raise CheckpointError(
            f"Nothing can be written to the output folder {output}: {error.strerror}. Choose another."
        ) from error


def _lock(output: Path) -> int:
    path = output / LOCK
    while True:
        try:
            make_folder(output)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(
                f"Nothing can be written to the output folder {output}: {error.strerror}. Choose another."
            ) from error
        if fcntl is None:
            return handle
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _IN_USE:
                logger.warning(
                    "The file system of %s has no locks (%s): see that no other process writes to it.",
                    output,
                    error.strerror,
                )
                return handle
            owner = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise CheckpointError(
                f"{output} is in use by {owner}. Wait for it or stop it, or choose another output folder."
            ) from error
        # One that held the lock until now has removed the file; then this is a lock on nothing.
        if path.exists() and path.stat().st_ino == os.fstat(handle).st_ino:
            os.truncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return handle
        os.close(handle)


def check_space(output: Path, weights: int, whole: int) -> None:
    """Refuse a disk on which not even the weights of one checkpoint have room.

    Args:
        output: The folder of the checkpoints.
        weights: Bytes of encoder and heads.
        whole: About how many bytes a checkpoint has.

    Raises:
        CheckpointError: The disk is too full.
    """
    free = shutil.disk_usage(output).free
    message = f"{output} has {size(free)} free, and a checkpoint takes about {size(whole)}."
    if free < weights:
        raise CheckpointError(f"{message} Make room, choose another output folder, or train with --save_strategy no.")
    if free < whole:
        logger.warning("%s The first checkpoint may not fit.", message)


def size(count: int) -> str:
    """A number of bytes to read.

    >>> size(1_234_567)
    '1.2 MB'
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Collection[str]:
    """What of a run was changed, by name, with both values where they are short."""

    def shown(value: Any) -> str:
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= 40 else f"{text[:40]}…"

    return [
        f"{name} ({shown(before.get(name))} → {shown(now.get(name))})"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
