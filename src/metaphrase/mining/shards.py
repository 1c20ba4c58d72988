"""Work in pieces: what is done is kept in a folder, and found there by the next run of a killed command.

Texts, their embeddings and their neighbours stand on disk; what memory holds of them is a shard at a time.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from metaphrase.corpus.text import MAX_CHARS, one_line, read_lines
from metaphrase.exceptions import CorpusError, DataError, DataMismatchError, MissingFileError
from metaphrase.mining.search import Neighbours, Rows, unit_rows

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
#: Sentences of a shard: some 10 MB of embeddings, and a minute or so of encoding on a CPU.
SHARD = 8192


def open_work_folder(folder: str | Path, manifest: Mapping[str, Any]) -> Path:
    """Begin work that can be interrupted, or go on with it.

    Args:
        folder: Where chunks are kept until all are there.
        manifest: What the work is: plain data in which every input and option stands.

    Returns:
        The folder.

    Raises:
        ValueError: Other work was left there, or work whose manifest is damaged.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    shutil.rmtree(_done(folder), ignore_errors=True)
    way_out = f"Repeat that command to finish it, or delete {folder} to begin anew."
    if path.exists():
        left = _left(path)
        if left != manifest:
            keys = sorted(key for key in left.keys() | manifest.keys() if left.get(key) != manifest.get(key))
            raise DataMismatchError(
                f"{folder} was left by another command, which differs in: {', '.join(keys)}. {way_out}"
            )
        return folder
    if folder.exists() and any(other != _part(path) for other in folder.iterdir()):
        raise DataMismatchError(f"{folder} is in the way: unfinished work would be kept there. Move it.")
    with _whole(path) as file:
        file.write((json.dumps(manifest, indent=1) + "\n").encode())
    return folder


def clear_work_folder(folder: Path) -> None:
    """Delete a work folder; renamed first, so that a process that is killed meanwhile leaves no half of it in the way."""
    done = _done(folder)
    shutil.rmtree(done, ignore_errors=True)
    folder.rename(done)
    shutil.rmtree(done)


def _done(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.done")


def _left(path: Path) -> dict[str, Any]:
    """The manifest of work that was left."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error}), so that nobody can tell which command left the work there. Delete "
            f"{path.parent} to begin anew."
        ) from error


def read_sentences(path: str | Path, column: str | None = None) -> Iterator[str | None]:
    """The sentences of a text file, one a line, or of a column of a TSV file, packed (gzip) or not.

    Args:
        path: UTF-8 text, or TSV without quoting.
        column: The column's name in the header, or its number from 1 where there is no header; None takes whole lines.

    Yields:
        A sentence without white space around it, tabs inside of it made spaces; ``""`` where there is none, None where
        a line cannot be read.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or has no such column.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"There is no file {path}.")
    at = int(column) - 1 if column is not None and column.isdecimal() else None
    for number, line in read_lines(path):
        if not isinstance(line, str):
            yield None
            continue
        if column is not None:
            cells = line.split("\t")
            if at is None:
                if column not in cells:
                    raise CorpusError(f"{path} has no column {column!r}; its header is: {', '.join(cells)}.")
                at = cells.index(column)
                continue
            if not 0 <= at < len(cells):
                raise CorpusError(f"{path}:{number}: there are {len(cells)} columns, and none is number {at + 1}.")
            line = cells[at]
        text = one_line(line).strip()
        yield text if len(text) <= MAX_CHARS else None


class Sentences(Sequence[str]):
    """Distinct sentences on disk, in the order of their first occurrence.

    Args:
        folder: Where `write` put them.

    Attributes:
        facts: ``lines`` read, and of them ``empty``, ``unreadable`` and ``repeated`` ones; ``sentences`` that are left.
    """

    def __init__(self, folder: Path) -> None:
        self.facts: dict[str, int] = json.loads((folder / "sentences.json").read_text(encoding="utf-8"))
        self._end_n = np.load(folder / "ends.npy", mmap_mode="r")
        self._bytes = np.memmap(folder / "sentences.txt", dtype=np.uint8, mode="r")

    @classmethod
    def write(cls, folder: Path, read: Callable[[], Iterable[str | None]]) -> Sentences:
        """Write sentences, unless they were written before.

        Args:
            folder: Where.
            read: Begins to read; called twice, so that a number for each line is all that is remembered.

        Raises:
            ValueError: There is no sentence.
        """
        facts = folder / "sentences.json"
        if not facts.exists():
            folder.mkdir(parents=True, exist_ok=True)
            key_l = np.fromiter(
                (xxhash.xxh3_64_intdigest(text.encode()) if text else 0 for text in read()), dtype=np.uint64
            )
            is_new_l = np.zeros(len(key_l), dtype=bool)
            is_new_l[np.unique(key_l, return_index=True)[1]] = True
            counts = {"lines": len(key_l), "empty": 0, "unreadable": 0, "repeated": 0, "sentences": 0}
            ends = np.lib.format.open_memmap(folder / "ends.npy", "w+", np.int64, (max(1, int(is_new_l.sum())),))
            end = 0
            with (folder / "sentences.txt").open("wb") as file:
                for text, is_new in zip(read(), is_new_l, strict=True):
                    if text and is_new:
                        end += file.write(text.encode())
                        ends[counts["sentences"]] = end
                        counts["sentences"] += 1
                    else:
                        counts["repeated" if text else "unreadable" if text is None else "empty"] += 1
            if not counts["sentences"]:
                raise CorpusError(f"There are no sentences in {counts['lines']} lines of text.")
            ends.flush()
            with _whole(facts) as file:
                file.write(json.dumps(counts).encode())
        return cls(folder)

    def __len__(self) -> int:
        return self.facts["sentences"]

    def __getitem__(self, at: Any) -> Any:
        """A sentence, or a list of those of a slice."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(f"There are {len(self)} sentences, and none is number {at}.")
        return self._bytes[self._end_n[at - 1] if at else 0 : self._end_n[at]].tobytes().decode()


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file that is there when all of it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _part(path).open("wb") as file:
        yield file
    _part(path).replace(path)


def _part(path: Path) -> Path:
    return path.with_suffix(".part")


def encode_shards(
    texts: Sequence[str],
    folder: Path,
    encode: Callable[[list[str]], NDArray[Any]],
    *,
    size: int = SHARD,
    half: bool = False,
    advance: Callable[[int], None] = lambda n: None,
) -> Rows:
    """Embed texts, a shard at a time, each in a file of its own.

    Args:
        texts: The texts.
        folder: Where the shards are; those that are there are kept.
        encode: Gives embeddings of shape ``(texts, hidden)``.
        size: Texts of a shard.
        half: Keep float16 in place of float32.
        advance: Told how many more texts have embeddings.

    Returns:
        Unit rows, mapped into memory.
    """
    paths = []
    for at, first in enumerate(range(0, len(texts), size)):
        paths.append(folder / f"{at:06d}.npy")
        chunk = texts[first : first + size]
        if not paths[-1].exists():
            rows_nh = unit_rows(np.asarray(encode(list(chunk))))
            with _whole(paths[-1]) as file:
                np.save(file, rows_nh.astype(np.float16 if half else np.float32, copy=False))
        advance(len(chunk))
    return Rows([np.load(path, mmap_mode="c") for path in paths])  # torch takes no read-only arrays


def neighbour_shards(
    queries: Rows,
    folder: Path,
    search: Callable[[NDArray[np.float32]], Neighbours],
    *,
    advance: Callable[[int], None] = lambda n: None,
) -> Neighbours:
    """Search the neighbours of rows, a shard at a time, each in a file of its own.

    Args:
        queries: The rows.
        folder: Where the shards are; those that are there are kept.
        search: Finds the neighbours of some rows.
        advance: Told how many more rows have neighbours.
    """
    shards = []
    for at in range(len(queries.blocks)):
        path = folder / f"{at:06d}.npz"
        if not path.exists():
            found = search(queries.block(at))
            with _whole(path) as file:
                np.savez(file, similarity=found.similarity_qk, row=found.row_qk)
        with np.load(path) as shard:
            shards.append(Neighbours(shard["similarity"], shard["row"]))
        advance(len(queries.blocks[at]))
    return Neighbours(
        np.concatenate([shard.similarity_qk for shard in shards]), np.concatenate([shard.row_qk for shard in shards])
    )
