"""Packaged data, and atomic writing of files."""

from __future__ import annotations

import csv
import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from metaphrase.exceptions import StorageError

#: Data included in the package: the demo's bitext and the Universal Declaration of Human Rights.
PACKAGED_DATA = Path(__file__).parents[1] / "data"
DEMO = PACKAGED_DATA / "demo"
UDHR = PACKAGED_DATA / "udhr"
#: The packaged recipes.
RECIPES = Path(__file__).parents[1] / "recipes"


@contextmanager
def replacing(path: str | Path, *, unique: bool = False) -> Iterator[Path]:
    """Write a file atomically: a reader never sees a partial file. The folder is created if necessary.

    Yields a path to write to, which replaces ``path`` at the end of the block, and is deleted if the block raises. If
    ``unique``, several processes may write the file at the same time.

    Raises:
        StorageError: The disk is full.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part" if unique else f".{path.name}.part")
    try:
        with explain_full_disk(path):
            yield partial
            partial.replace(path)
    finally:
        with suppress(OSError):  # such as of a read-only file system, which would hide the first error
            partial.unlink()


@contextmanager
def explain_full_disk(path: str | Path) -> Iterator[None]:
    """Turn the error of a full disk into a :class:`StorageError` that names what cannot be written."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        # Some errors have no number: that of NumPy ("9216 requested and 8192 written"), and those of `as_os_errors`.
        texts = (" requested and ", "No space left on device")
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or any(text in str(error) for text in texts):
            message = f"Cannot write {path}: the disk is full. Free some space and run the command again."
            raise StorageError(message) from error
        raise


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Turn errors of safetensors and tokenizers, which cannot write a file, into OSErrors.

    tokenizers raises plain exceptions: "No space left on device (os error 28)".
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SafetensorError) or (type(error) is Exception and "(os error " in str(error)):
            raise OSError(str(error)) from error
        raise


def read_json(path: str | Path) -> Any:
    """Read JSON."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def as_json(content: Any, **options: Any) -> Any:
    """Return content as it is read back from JSON: tuples are lists, keys are text. ``options`` are those of `json.dumps`."""
    return json.loads(json.dumps(content, **options))


def write_json(path: str | Path, content: Any) -> Path:
    """Write JSON atomically."""
    return replace_text(path, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")


def replace_text(path: str | Path, text: str) -> Path:
    """Write text atomically. The folder is created if necessary."""
    with replacing(path, unique=True) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files that are not UTF-8
    return Path(path)


def follow_umask(folder: Path) -> None:
    """Give the files of a new folder the permissions that the umask gives to new files.

    safetensors creates files that only their owner can read, regardless of the umask.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def append_csv(path: str | Path, row: Mapping[str, Any]) -> Path:
    """Append a row to a CSV file, and return its path. A new file starts with a header of the row's keys.

    If the file has another header, the row is appended to ``NAME-2.csv``, and so on.
    """
    first = Path(path)
    first.parent.mkdir(parents=True, exist_ok=True)
    files = chain([first], (first.with_stem(f"{first.stem}-{number}") for number in count(2)))
    own = next(file for file in files if _csv_header(file) in (None, list(row)))
    is_new = _csv_header(own) is None
    with own.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(row.keys())
        writer.writerow(row.values())
    return own


def _csv_header(path: Path) -> list[str] | None:
    """The first row of a CSV file; None if there is none."""
    if not path.exists():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), None)
