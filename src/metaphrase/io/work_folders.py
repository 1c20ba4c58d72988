"""Work folders: finished parts of a long command, which the next run reuses if the command was killed."""

from __future__ import annotations

import json
import logging
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from metaphrase.exceptions import DataError, DataMismatchError, MetaphraseError, MissingFileError
from metaphrase.io.digests import json_digest
from metaphrase.io.files import as_json, read_json, replacing, write_json
from metaphrase.io.locks import LOCK, exclusive
from metaphrase.io.redaction import excerpt

logger = logging.getLogger(__name__)

#: Files that state which work a folder is for: of a command, and of the arguments of a function.
MANIFEST, ARGUMENTS = "manifest.json", "arguments.json"
#: Key of the digest in a JSON file.
_DIGEST = "digest"
#: What readers of damaged files raise: JSON, NumPy, zip, Arrow and faiss.
DAMAGED = (
    *(ValueError, LookupError, TypeError, AttributeError, EOFError, RuntimeError, FileNotFoundError),
    *(zipfile.BadZipFile, zlib.error),
)
_Part = TypeVar("_Part")
_DONE = "_metaphrase_done"  # in a folder whose work is complete and that is being deleted


@contextmanager
def work_folder_of(output: str | Path) -> Iterator[Path]:
    """Hold the work folder of an output file, ``OUTPUT.partial``, so that no other process writes the file."""
    folder = Path(f"{output}.partial")
    try:
        with exclusive(folder):
            yield folder
    finally:
        with suppress(OSError):  # it is kept for the next run
            folder.rmdir()


def open_work_folder(folder: str | Path, manifest: Mapping[str, Any], *, locked: bool = False) -> Path:
    """Start work that can be interrupted, or resume it.

    The manifest is plain data with every input and option of the work. A folder with another manifest is refused, unless
    the caller holds its lock (``locked``) and no part of that work is finished.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    manifest = as_json(manifest)
    if (folder / _DONE).exists():
        clear_work_folder(folder)
    if path.exists():
        earlier = _read_manifest(path)
        if earlier == manifest:
            return folder
        if not locked or holds_parts(folder):
            keys = sorted(key for key in earlier.keys() | manifest.keys() if earlier.get(key) != manifest.get(key))
            raise DataMismatchError(
                f"{folder} holds the work of another command, which differs in: {', '.join(keys)}. Run that "
                f"command again to use it, or delete {folder} to start over."
            )
    elif folder.exists() and any(
        other.name != LOCK and not other.name.startswith(f".{MANIFEST}.") for other in folder.iterdir()
    ):
        raise DataMismatchError(
            f"{folder} is needed for unfinished work, but something else is stored there. Move it."
        )
    with write_atomically(path) as file:
        file.write((json.dumps(manifest, indent=1) + "\n").encode())
    return folder


def holds_parts(folder: Path) -> bool:
    """Whether any part of the work of a folder is finished."""
    names = {path.name for path in folder.rglob("*") if path.is_file()} - {MANIFEST, ARGUMENTS, LOCK}
    return any(not (name.startswith(".") and name.endswith(".part")) for name in names)


def clear_work_folder(folder: Path) -> None:
    """Delete the content of a work folder. If the process is killed meanwhile, the next run deletes the rest."""
    (folder / _DONE).touch()
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (_DONE, LOCK):
            path.unlink()
    (folder / _DONE).unlink()


@contextmanager
def damage_in(path: str | Path) -> Iterator[None]:
    """Report a file whose content cannot be used inside this block as damaged, or as missing."""
    try:
        yield
    except MetaphraseError:
        raise
    except DAMAGED as error:
        if isinstance(error, FileNotFoundError) and not Path(path).exists():
            raise MissingFileError(f"The file {path} does not exist.") from error
        reason = excerpt(str(error))
        raise DataError(
            f"{path} is damaged, or is another kind of file ({type(error).__name__}: {reason})."
        ) from error


@contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that exists only once it is complete, even if several processes write it."""
    with replacing(path, unique=True) as partial, partial.open("wb") as file:
        yield file


def read_kept(path: Path, read: Callable[[Path], _Part]) -> _Part | None:
    """Read a stored part of some work; None if it does not exist. A damaged part is deleted, to be computed again."""
    if not path.is_file():
        return None
    try:
        return read(path)
    except DAMAGED as error:
        logger.warning("%s is damaged (%s). It is deleted and computed again.", path, excerpt(str(error)))
        path.unlink()
        return None


def write_part(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Store a part of some work as JSON with its digest. Returns the content as it will be read."""
    content = as_json(content, default=str)
    write_json(path, content | {_DIGEST: json_digest(content)})
    return content


def read_part(path: Path) -> dict[str, Any] | None:
    """Read what `write_part` wrote; None if it does not exist or is damaged. The next `write_part` replaces it."""
    if not path.is_file():
        return None
    try:
        return _verified(path)
    except DAMAGED as error:
        logger.warning("%s is damaged (%s), and is ignored.", path, excerpt(str(error)))
        return None


def _verified(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if content.pop(_DIGEST) != json_digest(content):
        raise DataError("its content does not match its digest")
    return content


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of unfinished work."""
    try:
        return dict(read_json(path))
    except DAMAGED as error:
        raise DataError(
            f"{path} is damaged ({error}), so it is unknown which command the work belongs to. Delete {path.parent} to start "
            "over."
        ) from error
