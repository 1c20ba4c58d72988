"""Work folders: finished pieces of a long command, which its next run reuses if the command was killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from metaphrase.exceptions import DataError, DataMismatchError
from metaphrase.io.files import replacing

MANIFEST = "manifest.json"


def open_work_folder(folder: str | Path, manifest: Mapping[str, Any]) -> Path:
    """Start work that can be interrupted, or resume it.

    The manifest is plain data with every input and option of the work.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    shutil.rmtree(_done(folder), ignore_errors=True)
    if path.exists():
        left = _read_manifest(path)
        if left != manifest:
            keys = sorted(key for key in left.keys() | manifest.keys() if left.get(key) != manifest.get(key))
            raise DataMismatchError(
                f"{folder} holds unfinished work of another command, which differs in: {', '.join(keys)}. Repeat that "
                f"command to finish it, or delete {folder} to start over."
            )
        return folder
    if folder.exists() and any(other.name != f".{MANIFEST}.part" for other in folder.iterdir()):
        raise DataMismatchError(f"{folder} exists, but is needed for unfinished work. Move it.")
    with write_atomically(path) as file:
        file.write((json.dumps(manifest, indent=1) + "\n").encode())
    return folder


def clear_work_folder(folder: Path) -> None:
    """Delete a work folder. It is renamed first, so that a process killed meanwhile leaves no partial folder."""
    done = _done(folder)
    shutil.rmtree(done, ignore_errors=True)
    folder.rename(done)
    shutil.rmtree(done)


@contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that exists only once it is complete."""
    with replacing(path) as partial, partial.open("wb") as file:
        yield file


def _done(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.done")


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of unfinished work."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error}), so the command that left the work is unknown. Delete {path.parent} to start "
            "over."
        ) from error
