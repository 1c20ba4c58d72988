"""Test sets: the parallel sentences of a language, from folders of ``xx-en[.split].tsv[.gz]`` files."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from metaphrase.corpus.codes import find_languages
from metaphrase.corpus.kinds import check_regular
from metaphrase.corpus.readers import read_parallel
from metaphrase.exceptions import DataError, MissingFileError
from metaphrase.io.digests import text_digest

logger = logging.getLogger(__name__)

TARGET_LANGUAGE = "en"

_Set = TypeVar("_Set", bound=Any)

#: Names of the files that are read.
PARALLEL_FILE = re.compile(
    r"(?P<language>[a-z]{2,3}([-_][A-Z][a-z]{3})?([-_]([A-Z]{2}|\d{3}))?)-en(\.(?P<split>[a-z]+))?\.tsv(\.gz)?"
)


@dataclass(frozen=True)
class ParallelSet:
    """The parallel sentences of one language, and their file: the English ``targets[i]`` translates ``sources[i]``."""

    language: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    path: Path | None = None

    @property
    def sha256(self) -> str:
        """Digest of the pairs, as lines ``source<TAB>target``."""
        return text_digest("".join(f"{a}\t{b}\n" for a, b in zip(self.sources, self.targets, strict=True)))

    @property
    def english(self) -> dict[str, str]:
        """The English sentence of each distinct source; of a source that recurs, the last one."""
        return dict(zip(self.sources, self.targets, strict=True))

    def rows(self, chosen: Iterable[int]) -> ParallelSet:
        """Some of the pairs, by number."""
        return rows_of(self, ("sources", "targets"), chosen)


def sets_digest(sets: Mapping[str, ParallelSet]) -> str:
    """Digest of the pairs of all languages."""
    return text_digest("".join(sets[language].sha256 for language in sorted(sets)))


def select_languages(
    tests: Mapping[str, Mapping[str, ParallelSet]], is_chosen: Callable[[str], bool]
) -> dict[str, dict[str, ParallelSet]]:
    """The test sets, by name and language, with the chosen languages only; without empty ones."""
    selected = {
        name: {language: one for language, one in sets.items() if is_chosen(language)} for name, sets in tests.items()
    }
    return {name: sets for name, sets in selected.items() if sets}


def rows_of(one: _Set, columns: Iterable[str], chosen: Iterable[int]) -> _Set:
    """A set with some rows of its columns, by number."""
    rows = list(chosen)
    return replace(one, **{name: tuple(getattr(one, name)[row] for row in rows) for name in columns})


def load_parallel_folder(
    path: str | Path, languages: Sequence[str] | None = None, split: str | None = None
) -> dict[str, ParallelSet]:
    """Read the test sets of a folder: one file ``xx-en[.split].tsv[.gz]`` per language, header ``source target …``.

    Args:
        path: The folder.
        languages: Languages to read, in this order; None reads all languages, in alphabetical order.
        split: Which of ``xx-en.dev.tsv.gz``, ``xx-en.test.tsv.gz``, … to read; None reads files without a split.

    Raises:
        FileNotFoundError: The folder, the split or a language does not exist; the message lists the available ones.
        ValueError: A file is malformed or has no pairs, or a language has two files.
    """
    sets = {}
    for language, file in parallel_files(path, languages, split).items():
        pairs = read_parallel(file)
        if not pairs:
            raise DataError(f"{file} has no pairs.")
        sources, targets = zip(*pairs, strict=True)
        sets[language] = ParallelSet(language, sources, targets, file)
    return sets


def parallel_files(path: str | Path, languages: Sequence[str] | None, split: str | None) -> dict[str, Path]:
    """The files that `load_parallel_folder` reads, by language."""
    named = f"{f'xx-en.{split}' if split else 'xx-en'}.tsv.gz"
    return files_by_language(path, PARALLEL_FILE, split, languages, named=named, example="sw-en.tsv.gz")


def load_test_folder(path: str | Path, languages: Sequence[str] | None = None) -> dict[str, ParallelSet]:
    """`load_parallel_folder` with the split ``test`` of a folder that has it, else with the files without a split."""
    return load_parallel_folder(path, languages, test_split(Path(path)))


def test_split(folder: Path) -> str | None:
    """The split ``test`` if a folder has it, or else None, for the files without a split.

    Warns if both exist, in different languages.
    """
    matches = [match for file in folder.glob("*") if (match := PARALLEL_FILE.fullmatch(file.name))]
    tested = {match["language"] for match in matches if match["split"] == "test"}
    unsplit = sorted(match[0] for match in matches if not match["split"] and match["language"] not in tested)
    if tested and unsplit:
        logger.warning("%s has files of the split test, so these are not read: %s.", folder, ", ".join(unsplit))
    return "test" if tested else None


def files_by_language(
    path: str | Path,
    pattern: re.Pattern[str],
    split: str | None,
    languages: Sequence[str] | None,
    *,
    named: str,
    example: str,
) -> dict[str, Path]:
    """The files of a split in a folder, by language; of files without a split if it is None.

    The pattern of the files' names has the groups ``language`` and ``split``. ``named`` and ``example`` are names for
    messages.
    """
    folder = Path(path)
    if not str(path) or not folder.is_dir():
        raise MissingFileError(f"{str(path) or repr('')} is not a folder. Pass a folder with files such as {example}.")
    names = {file: match for file in sorted(folder.iterdir()) if (match := pattern.fullmatch(file.name))}
    files: dict[str, Path] = {}
    for file, match in names.items():
        if match["split"] == split:
            add_file(files, match["language"], file)
    if not files:
        splits = ", ".join(sorted({match["split"] or "none" for match in names.values()}))
        found = f"Its splits are: {splits}." if splits else "It has no such files."
        raise MissingFileError(f"{folder} has no file named {named}. {found}")
    wanted = list(chain.from_iterable(find_languages(code, files) or [code] for code in languages or files))
    if missing := [language for language in wanted if language not in files]:
        raise MissingFileError(f"{folder} has no pairs for {', '.join(missing)}. It has: {', '.join(files)}.")
    for language in wanted:
        check_regular(files[language])
    return {language: files[language] for language in wanted}


def add_file(files: dict[str, Path], key: str, file: Path) -> None:
    """Add a file to a test set, and refuse a second one in its place."""
    if (other := files.setdefault(key, file)) != file:
        raise DataError(f"Both {other} and {file} exist, but only one can be read. Keep one of them.")
