"""What suites share to find data: the subfolders of a folder, the size of files, the languages that are measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

from metaphrase.corpus.codes import find_languages
from metaphrase.corpus.parallel import TARGET_LANGUAGE
from metaphrase.evaluation.suites.benchmarks import Benchmark, Find, Settings
from metaphrase.exceptions import DataError

logger = logging.getLogger(__name__)


def folders(data: Path | None) -> list[Path]:
    """A folder and its subfolders."""
    return [] if data is None else [data, *sorted(path for path in data.iterdir() if path.is_dir())]


def folder_name(folder: Path) -> str:
    """Name of a folder as it was given, also of ``.`` and ``..``; of a link, the name of the link."""
    return folder.name if folder.name not in ("", "..") else folder.resolve().name


def in_each_folder(find: Callable[[Path, Settings], Iterable[Benchmark]]) -> Find:
    """Decorator: find the benchmarks of a folder and of its subfolders."""

    def find_all(data: Path | None, settings: Settings) -> Iterator[Benchmark]:
        for folder in folders(data):
            yield from find(folder, settings)

    return find_all


def text_size(files: Iterable[Path]) -> int:
    """Bytes of text in files, after decompression."""
    return sum(map(_text_size, files))


def _text_size(path: Path) -> int:
    stored = path.stat().st_size
    if path.suffix != ".gz":
        return stored
    with path.open("rb") as file:  # which ends with the size of its content, unless it is truncated
        file.seek(max(0, stored - 4))
        return min(int.from_bytes(file.read(), "little"), 20 * stored)


def wanted_languages(languages: Iterable[str], settings: Settings, folder: Path) -> list[str]:
    """The available languages of a folder that the settings ask for, in the order of the settings.

    The languages that it lacks have a warning, except for those of a sample.
    """
    available = list(languages)
    if not settings.languages:
        return available
    found = {code: find_languages(code, available) for code in settings.languages}
    if available and settings.first is None:
        warn_absent(folder, [code for code, names in found.items() if not names])
    return list(dict.fromkeys(chain.from_iterable(found.values())))


def warn_absent(folder: Path, languages: Iterable[str]) -> None:
    """Warn that a folder lacks languages, once, although several suites read it."""
    _warn_absent(folder, tuple(language for language in languages if language != TARGET_LANGUAGE))


@cache
def _warn_absent(folder: Path, languages: tuple[str, ...]) -> None:
    if languages:
        logger.warning("%s has no data in %s.", folder, ", ".join(languages))


def check_names(benchmarks: Iterable[Benchmark]) -> list[Benchmark]:
    """Check that different data sets have different names, under which results are stored.

    Raises:
        DataError: Two data sets have the same name.
    """
    known: dict[str, Benchmark] = {}
    for one in (found := list(benchmarks)):
        other = known.setdefault(one.name, one)
        if (other.suite, other.files) != (one.suite, one.files):
            raise DataError(
                f"Two data sets are called {one.name!r}: {other.files[0]} ({other.suite}) and {one.files[0]} ({one.suite}). "
                "Their results would replace each other. Put each data set into a folder of its own."
            )
    return found
