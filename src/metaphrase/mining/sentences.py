"""The sentences of a monolingual text, distinct and on disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from metaphrase.corpus.codes import standard_code
from metaphrase.corpus.files import FORMATS
from metaphrase.corpus.readers.columns import is_header
from metaphrase.corpus.text import MAX_CHARS, is_blank, one_line, read_lines
from metaphrase.exceptions import CorpusError, DataError
from metaphrase.io.counts import counted
from metaphrase.io.files import read_json
from metaphrase.io.work_folders import read_kept, write_atomically

logger = logging.getLogger(__name__)

#: Formats of a corpus that cannot be read line by line.
_OTHER_FORMATS = FORMATS.keys() - {".tsv"}


def read_sentences(path: str | Path, column: str | None = None) -> Iterator[str | None]:
    """Read the sentences of a text file, one per line, or of a column of a TSV file; both may be gzip files.

    A column is its name in the header, or its number, from 1; a header such as ``source``, ``target`` is skipped. Yields
    stripped sentences, with tabs replaced by spaces; ``""`` for an empty line, None for an unreadable one.

    Raises:
        CorpusError: The file has another format, the column is missing, or a file named ``.tsv`` has several columns and none
            is chosen.
    """
    path = Path(path)
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix in _OTHER_FORMATS:
        raise CorpusError(
            f"{path} is not text with one sentence per line, or TSV. Write its sentences to such a file."
        )
    at = int(column) - 1 if column is not None and column.isdecimal() else None
    for number, line in read_lines(path):
        if not isinstance(line, str):
            yield None
            continue
        if column is not None:
            cells = line.split("\t")
            if at is None:
                if cells.count(column) != 1:
                    some = "several columns" if column in cells else "no column"
                    raise CorpusError(f"{path} has {some} {column!r}; its header is: {', '.join(cells)}.")
                at = cells.index(column)
                continue
            if number == 1 and (is_header(cells, min(len(cells), 2)) or _are_languages(cells)):
                logger.info("%s:1 is skipped, because it is a header: %s.", path, ", ".join(cells))
                continue
            if not 0 <= at < len(cells):
                raise CorpusError(f"{path}:{number}: column {at + 1} is missing; the line has {len(cells)}.")
            line = cells[at]
        elif suffix == ".tsv" and "\t" in line:
            raise CorpusError(
                f"{path}:{number}: the file has several columns. Name one (--source_column, --target_column)."
            )
        text = "" if is_blank(line) else one_line(line).strip()
        yield text if len(text) <= MAX_CHARS else None


def _are_languages(cells: Sequence[str]) -> bool:
    """Whether all cells of a line are codes of different languages, one of them English, such as in a header."""
    codes = {cell.strip().lower() for cell in cells}
    return 1 < len(codes) == len(cells) and "en" in codes and all(map(standard_code, codes))


def check_text(name: str, read: Callable[[], Iterable[str | None]]) -> None:
    """Fail on a missing file or column, or a text without sentences, before any work."""
    lines = 0
    for lines, text in enumerate(read(), 1):  # noqa: B007 - their number is part of the message
        if text:
            return
    raise CorpusError(f"The {name} contains no sentences, in {counted(lines, 'line')}.")


class Sentences(Sequence[str]):
    """Distinct sentences on disk, in the order of their first occurrence.

    ``facts`` are the numbers of ``lines`` read, of ``empty``, ``unreadable`` and ``repeated`` lines, and of ``sentences``.
    """

    def __init__(self, folder: Path) -> None:
        self.facts: dict[str, int] = read_json(folder / "sentences.json")
        self._end_n = np.load(folder / "ends.npy", mmap_mode="r")
        self._bytes = np.memmap(folder / "sentences.txt", dtype=np.uint8, mode="r")
        if self._end_n[self.facts["sentences"] - 1] != len(self._bytes):
            raise DataError(f"The files of {folder} do not match each other.")

    @classmethod
    def write(cls, folder: Path, read: Callable[[], Iterable[str | None]]) -> Sentences:
        """Write sentences to a folder, unless it already has them.

        ``read`` returns an iterator over the lines. It is called twice, so that memory holds one number per line.
        """
        facts = folder / "sentences.json"
        kept = read_kept(facts, lambda path: cls(path.parent))
        if kept is None:
            folder.mkdir(parents=True, exist_ok=True)
            key_l = np.fromiter(
                (xxhash.xxh3_64_intdigest(text.encode()) if text else 0 for text in read()), dtype=np.uint64
            )
            is_new_l = np.zeros(len(key_l), dtype=bool)
            is_new_l[np.unique(key_l, return_index=True)[1]] = True
            counts = {"lines": len(key_l), "empty": 0, "unreadable": 0, "repeated": 0, "sentences": 0}
            end_n = np.zeros(int(is_new_l.sum()), dtype=np.int64)
            end = 0
            with write_atomically(folder / "sentences.txt") as file:
                for text, is_new in zip(read(), is_new_l, strict=True):
                    if text and is_new:
                        end += file.write(text.encode())
                        end_n[counts["sentences"]] = end
                        counts["sentences"] += 1
                    else:
                        counts["repeated" if text else "unreadable" if text is None else "empty"] += 1
            with write_atomically(folder / "ends.npy") as file:  # a full disk kills a process that writes a memory map
                np.save(file, end_n)
            with write_atomically(facts) as file:
                file.write(json.dumps(counts).encode())
        return kept or cls(folder)

    def __len__(self) -> int:
        return self.facts["sentences"]

    def __getitem__(self, at: Any) -> Any:
        """Return a sentence, or a list for a slice."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(f"Index {at} is out of range for {len(self)} sentences.")
        return self._bytes[self._end_n[at - 1] if at else 0 : self._end_n[at]].tobytes().decode()
