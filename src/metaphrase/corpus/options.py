"""Options of loading a bitext, with the same names in Python, on the command line and in YAML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaphrase.corpus.files import find_files
from metaphrase.corpus.loading import Corpus, load_corpus
from metaphrase.io.arguments import Count, checked
from metaphrase.io.configuration import option

SOURCE_COLUMN = "Column with the texts in --languages, if its name is not recognised; requires --target_column."
TARGET_COLUMN = "Column with the translations; requires --source_column."


@checked
@dataclass(kw_only=True)
class BitextOptions:
    """The pairs to load from files, for commands that keep every pair as it is."""

    source_lang: str | None = option(None, "Language of the sources, if neither columns nor file names state it.")
    target_lang: str = option("en", "Language of the targets.")
    languages: list[str] = option([], "Languages to load from the files.")
    source_column: str | None = option(None, SOURCE_COLUMN)
    target_column: str | None = option(None, TARGET_COLUMN)
    split: str = option("train", "Which of xx-en.train.tsv.gz, xx-en.dev.tsv.gz, … to load.")
    limit: Count | None = option(None, "Maximum number of pairs of each language.")

    def input_files(self, files: Sequence[str]) -> list[Path]:
        """The files on disk that :meth:`load_bitext` reads."""
        return [path for file in find_files(files, **self._selected()) for path in file.paths]

    def load_bitext(self, files: Sequence[str]) -> Corpus:
        """Load the bitext without cleaning it."""
        return load_corpus(files, **self._selected(), limit=self.limit, cleaning=None)

    def _selected(self) -> dict[str, Any]:
        names = ("source_lang", "target_lang", "source_column", "target_column", "split")
        return {name: getattr(self, name) for name in names} | {"languages": self.languages or None}
