"""Embeddings on disk, so that a text is encoded once by all suites, and an interrupted evaluation resumes within one.

The folder of an encoder is named after its digest, so that other weights, pooling or maximum length have other files.
Each file holds a block of texts and is named after the digest of its content. Files are only ever created and deleted:
several processes may write at once, and one that is killed leaves at most an unfinished file, which is never read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from metaphrase.evaluation.encoding import CachedEncoder
from metaphrase.exceptions import DataError
from metaphrase.io.files import replacing
from metaphrase.io.work_folders import read_kept

logger = logging.getLogger(__name__)

#: Bytes of all encoders' embeddings in a folder; the files that were not used for the longest time are deleted.
STORE_BYTES = 4 << 30


class StoredEncoder(CachedEncoder):
    """A model whose ``encode`` embeds each text once, in this process and in later ones.

    The folder holds the embeddings of all encoders, in ``limit`` bytes at most.
    """

    def __init__(
        self, model: SentenceTransformer, folder: str | Path, digest: str, *, limit: int = STORE_BYTES
    ) -> None:
        super().__init__(model)
        self.folder = Path(folder)
        self.own = self.folder / digest[:12]
        self.limit = limit
        self.stored: dict[bytes, NDArray[Any]] = {}
        for path in sorted(self.own.glob("*.npy")):
            with suppress(FileNotFoundError):  # deleted by another process
                if (table := read_kept(path, _verified)) is not None:
                    os.utime(path)
                    self.stored.update(
                        (key.tobytes(), row_h) for key, row_h in zip(table["text"], table["row"], strict=True)
                    )

    def missing(self, texts: Iterable[str], prompt: str = "") -> list[str]:
        """Distinct texts without an embedding."""
        missing = []
        for text in super().missing(texts, prompt):
            if (row_h := self.stored.get(_key(prompt, text))) is None:
                missing.append(text)
            else:
                self.rows[prompt, text] = row_h
        return missing

    def add(self, texts: Sequence[str], prompt: str, embeddings_nh: NDArray[Any]) -> None:
        """Keep the embeddings of texts, also on disk if they are finite."""
        super().add(texts, prompt, embeddings_nh)
        if self.limit and np.isfinite(embeddings_nh).all():
            try:
                self._write([_key(prompt, text) for text in texts], embeddings_nh)
            except OSError as error:
                self.limit = 0
                logger.warning("Embeddings are no longer kept in %s: %s.", self.folder, error.strerror or error)

    def _write(self, keys: Sequence[bytes], embeddings_nh: NDArray[Any]) -> None:
        row = (embeddings_nh.dtype, embeddings_nh.shape[1:])
        table = np.empty(len(keys), dtype=[("text", np.uint8, 16), ("row", *row)])
        table["text"] = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)
        table["row"] = embeddings_nh
        with replacing(self.own / f"{_digest(table)}.npy", unique=True) as partial, partial.open("wb") as file:
            np.save(file, table)
        shrink(self.folder, self.limit)


def shrink(folder: Path, limit: int) -> None:
    """Delete the files of a folder that were not used for the longest time, until it holds at most ``limit`` bytes."""
    files = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    size = sum(one for _, one, _ in files)
    for _, one, path in sorted(files):
        if size <= limit:
            return
        path.unlink(missing_ok=True)
        size -= one


def _key(prompt: str | None, text: str) -> bytes:
    return xxhash.xxh3_128_digest(json.dumps([prompt, text]).encode())


def _digest(table: NDArray[Any]) -> str:
    content: Any = table.view(np.uint8)
    return xxhash.xxh3_128_hexdigest(content)


def _verified(path: Path) -> NDArray[Any]:
    table: NDArray[Any] = np.load(path, mmap_mode="r")
    if _digest(table) != path.stem:
        raise DataError("its content is not that of its digest")
    return table
