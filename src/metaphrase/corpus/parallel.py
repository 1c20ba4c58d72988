"""Test sets: the parallel sentences of a language, from folders of ``xx-en[.split].tsv[.gz]`` files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from metaphrase.corpus.codes import standard_code
from metaphrase.corpus.readers import read_parallel
from metaphrase.exceptions import DataError, MissingFileError

TARGET_LANGUAGE = "en"

_FILE = re.compile(r"(?P<language>[a-z]{2,3}(-[A-Z][a-z]{3})?)-en(\.(?P<split>[a-z]+))?\.tsv(\.gz)?")


@dataclass(frozen=True)
class ParallelSet:
    """The parallel sentences of one language: ``sources[i]`` and ``targets[i]`` translate each other.

    Attributes:
        language: Language of the sources; the targets are English.
        sources: Sentences in the language.
        targets: Their translations.
        path: File that they were read from.
    """

    language: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    path: Path | None = None

    @property
    def sha256(self) -> str:
        """Digest of the pairs, as lines ``source<TAB>target``."""
        lines = "".join(f"{source}\t{target}\n" for source, target in zip(self.sources, self.targets, strict=True))
        return hashlib.sha256(lines.encode()).hexdigest()


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
    folder = Path(path)
    if not str(path) or not folder.is_dir():
        raise MissingFileError(
            f"{str(path) or repr('')} is not a folder. Pass a folder with files such as sw-en.tsv.gz."
        )
    names = {file: match for file in sorted(folder.iterdir()) if (match := _FILE.fullmatch(file.name))}
    files: dict[str, Path] = {}
    for file, match in names.items():
        if match["split"] == split:
            add_file(files, match["language"], file)
    if not files:
        splits = sorted({match["split"] or "none" for match in names.values()})
        raise MissingFileError(
            f"{folder} has no file named {f'xx-en.{split}' if split else 'xx-en'}.tsv.gz. "
            + (f"Its splits are: {', '.join(splits)}." if splits else "It has no parallel files.")
        )
    by_code = {standard_code(language) or language: language for language in files}
    wanted = [by_code.get(standard_code(language) or language, language) for language in languages or files]
    chosen = list(dict.fromkeys(wanted))
    if missing := [language for language in chosen if language not in files]:
        raise MissingFileError(f"{folder} has no pairs for {', '.join(missing)}. It has: {', '.join(files)}.")
    sets = {}
    for language in chosen:
        pairs = read_parallel(files[language])
        if not pairs:
            raise DataError(f"{files[language]} has no pairs.")
        sources, targets = zip(*pairs, strict=True)
        sets[language] = ParallelSet(language, sources, targets, files[language])
    return sets


def add_file(files: dict[str, Path], key: str, file: Path) -> None:
    """Add a file to those of a test set, and refuse a second one in its place."""
    if (other := files.setdefault(key, file)) != file:
        raise DataError(f"There are both {other} and {file}, of which only one can be read. Keep one of them.")
