"""Checks that outputs replace neither the inputs of a command nor files that this library did not write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from metaphrase.exceptions import UsageError
from metaphrase.io.counts import first_names
from metaphrase.io.files import read_json
from metaphrase.io.locks import LOCK, exclusive, make_folder, not_writable

#: File that marks an output folder. Uploads to the Hub ignore names that begin with an underscore.
MARK = "_metaphrase"

#: Files of a release that failed its check, until the next release.
FAILED_RELEASE = "_failed_release"

_NOTE = "metaphrase wrote this folder, and may replace its files when it writes to it again.\n"
#: A folder that this library wrote has one of these, or a release: the mark, a checkpoint, or files staged by a process
#: that was killed.
_SIGNS = (MARK, "checkpoint-*/manifest.json", "_partial/checkpoint-*", "_partial/release", FAILED_RELEASE)


def check_files(outputs: Iterable[str | Path | None], inputs: Iterable[str | Path | None]) -> None:
    """Refuse output files that are inputs (under any name or link), repeated, not regular files, or not writable."""
    read = {_identity(path): path for path in inputs if path is not None}
    written = set()
    for output in (path for path in outputs if path is not None):
        identity = _identity(output)
        if identity in read:
            raise UsageError(f"Writing {output} would overwrite the input {read[identity]}. Choose another output.")
        if identity in written:
            raise UsageError(f"{output} is written twice. Choose different outputs.")
        if Path(output).exists() and not Path(output).is_file():
            raise UsageError(f"{output} exists and is not a file. Choose another output.")
        check_writable(Path(output).absolute().parent)
        written.add(identity)


def check_writable(folder: Path) -> None:
    """Refuse a folder in which no file can be created; for a missing one, check the nearest that exists."""
    place = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    try:
        TemporaryDirectory(prefix=".metaphrase-", dir=place).cleanup()
    except OSError as error:
        raise not_writable(folder, error) from error


def check_folder(folder: str | Path, *, model: str | Path | None = None, around: bool = True) -> None:
    """Refuse an output folder that is or contains the model's, or that holds files which this library did not write.

    Hidden files are ignored.
    """
    place = Path(folder).resolve()
    if model is not None:
        inner = Path(model).resolve()
        if _identity(folder) in map(_identity, (inner, *inner.parents) if around else [inner]):
            raise UsageError(
                f"The output folder {folder} is, or contains, the folder of the model {model}, whose files could be "
                "replaced. Choose another."
            )
    try:
        paths = [] if _is_ours(place) or not place.is_dir() else list(place.iterdir())
    except PermissionError as error:
        raise not_writable(place, error) from error
    if names := sorted(path.name for path in paths if path.name != LOCK and not path.name.startswith(".")):
        listed = first_names(names)
        if all(re.fullmatch(r"seed-\d+", name) and _is_ours(place / name) for name in names):
            raise UsageError(
                f"The output folder {folder} holds the runs of several seeds: {listed}. Train further seeds with --seeds, or "
                "choose another folder."
            )
        raise UsageError(
            f"The output folder {folder} holds {listed}, which metaphrase did not write. Choose another, or move its "
            "contents."
        )


def claim_folder(folder: str | Path, *, model: str | Path | None = None) -> Path:
    """Check an output folder as :func:`check_folder` does, create it if it is missing, and mark a new one."""
    folder = Path(folder)
    check_folder(folder, model=model)
    make_folder(folder)
    if not _is_ours(folder):
        try:
            (folder / MARK).write_text(_NOTE, encoding="utf-8")
        except OSError as error:
            raise not_writable(folder, error) from error
    return folder


@contextmanager
def claimed(folder: str | Path, *, model: str | Path | None = None) -> Iterator[None]:
    """Claim an output folder and lock it, so that no other process writes to it. An empty folder is not marked."""
    folder = Path(folder)
    check_folder(folder, model=model)
    with exclusive(folder):
        claim_folder(folder)
        try:
            yield
        finally:
            if folder.is_dir() and {path.name for path in folder.iterdir()} <= {MARK, LOCK}:
                (folder / MARK).unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    """Whether this library wrote a folder."""
    if any(next(folder.glob(sign), None) for sign in _SIGNS):
        return True
    try:
        reference = read_json(folder / "reference.json")
        return {"texts", "tolerance", "embeddings"} <= set(reference)
    except (OSError, ValueError, TypeError):
        return False


def _identity(path: str | Path) -> object:
    """Identify a file: equal for two names of the same file."""
    place = Path(path).resolve()
    try:
        facts = place.stat()
    except OSError:
        return place
    return facts.st_dev, facts.st_ino
