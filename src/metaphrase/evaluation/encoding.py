"""Embedding of texts for evaluations: prompts, pooling and length, with each distinct text embedded once, also on disk."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack

import numpy as np
import xxhash
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from metaphrase.encoders.adapters import shared_copy
from metaphrase.encoders.positions import set_max_length
from metaphrase.encoders.prompts import resolve_prompt
from metaphrase.exceptions import DataError, ModelError
from metaphrase.io.arguments import Count, LayerNumber, Length, checked
from metaphrase.io.progress import progress_bars
from metaphrase.io.work_folders import read_kept, write_atomically
from metaphrase.merging.pooling import replace_pooling
from metaphrase.modeling.bulk import distinct_texts
from metaphrase.modeling.packing import packed
from metaphrase.modeling.precision import bfloat16

logger = logging.getLogger(__name__)


#: Encoders whose hidden state *k* is the output of their first *k* layers alone: no norm follows the last layer.
_TRUNCATABLE = ("bert", "camembert", "electra", "mpnet", "roberta", "xlm-roberta")

#: Texts that are sorted by length, encoded and kept together.
_BLOCK = 1 << 10
#: Has the signature of ``SentenceTransformer.encode``.
Encode = Callable[..., NDArray[Any]]
#: A model for all texts, or one model per language.
Encoders: TypeAlias = SentenceTransformer | Mapping[str, SentenceTransformer]


class EncodingOptions(TypedDict, total=False):
    """How texts are embedded: options of all evaluations of sentence embeddings.

    Attributes:
        prompt: Text before each sentence: None for no prompt, ``"auto"`` for the query prompt that the model stores
            (E5's ``"query: "``).
        batch_size: Sentences per forward pass; 32 by default.
        show_progress: Show a progress bar.
        encode: Replaces ``model.encode``, with its signature.
    """

    prompt: str | None
    batch_size: Count
    show_progress: bool
    encode: Encode | None


@checked
def encoding_settings(model: Any, **encoding: Unpack[EncodingOptions]) -> dict[str, Any]:
    """How a model embeds texts, for the settings of a result."""
    return {
        "prompt": resolve_prompt(model, encoding.get("prompt")),
        **encoder_settings(model),
        "batch_size": encoding.get("batch_size", 32),
    }


def encoder_settings(model: Any) -> dict[str, Any]:
    """Pooling mode, pooled layer and maximum length of a model; None where undefined."""
    modules = list(model) if isinstance(model, SentenceTransformer) else []
    config = getattr(getattr(modules[0], "auto_model", None), "config", None) if modules else None
    return {
        "pooling": next((module.pooling_mode for module in modules if isinstance(module, Pooling)), None),
        "layer": getattr(config, "num_hidden_layers", None),
        "max_length": getattr(model, "max_seq_length", None),
    }


@checked
def encode_texts(
    model: Any,
    texts: Sequence[str],
    *,
    prompt: str | None = None,
    batch_size: Count = 32,
    show_progress: bool = False,
    encode: Encode | None = None,
) -> NDArray[Any]:
    """Embed texts, shape ``(texts, hidden)``; without padding if the model is a SentenceTransformer."""
    with packed(model) if isinstance(model, SentenceTransformer) else nullcontext():
        return (encode or model.encode)(
            list(texts),
            prompt=resolve_prompt(model, prompt),
            batch_size=batch_size,
            show_progress_bar=show_progress,
            convert_to_numpy=True,
        )


@checked
def embed_sides(
    model: Any, sides: Iterable[Iterable[str]], **encoding: Unpack[EncodingOptions]
) -> Iterator[NDArray[Any]]:
    """Embeddings of the texts of each side, shape ``(texts, hidden)``. Each distinct text is encoded once."""
    texts, rows = distinct_texts(sides)
    embeddings_th = encode_texts(model, texts, **encoding)
    return (embeddings_th[row_n] for row_n in rows)


class CachedEncoder:
    """A model whose ``encode`` embeds each text once, in bfloat16 with ``bf16``."""

    def __init__(self, model: SentenceTransformer, *, bf16: bool = False) -> None:
        self.model = model
        self.bf16 = bf16
        self.rows: dict[tuple[str, str], NDArray[Any]] = {}

    def missing(self, texts: Iterable[str], prompt: str = "") -> list[str]:
        """Distinct texts without an embedding."""
        return list(dict.fromkeys(text for text in texts if (prompt, text) not in self.rows))

    def add(self, texts: Sequence[str], prompt: str, embeddings_nh: NDArray[Any]) -> None:
        """Keep the embeddings of texts."""
        self.rows.update(((prompt, text), row_h) for text, row_h in zip(texts, embeddings_nh, strict=True))

    def encode(
        self,
        texts: Sequence[str],
        *,
        prompt: str = "",
        batch_size: int = 32,
        show_progress_bar: bool = False,
        **_: Any,
    ) -> NDArray[Any]:
        """Embeddings, shape ``(texts, hidden)``. They are kept block by block."""
        new = self.missing(texts, prompt)
        settings: dict[str, Any] = {"prompt": prompt, "batch_size": batch_size, "show_progress_bar": False}
        with progress_bars(show_progress_bar) as begin:
            advance = begin("Embedding", len(new))
            for first in range(0, len(new), _BLOCK):
                block = new[first : first + _BLOCK]
                with bfloat16(self.model, enabled=self.bf16):
                    self.add(block, prompt, self.model.encode(block, convert_to_numpy=True, **settings))
                advance(len(block))
        return np.stack([self.rows[prompt, text] for text in texts])


@checked
def prepare(
    model: SentenceTransformer,
    *,
    pooling: str | None = None,
    layer: LayerNumber | None = None,
    max_length: Length | None = None,
) -> SentenceTransformer:
    """Return a view of a model with other pooling, layer or length, which shares its weights. The model does not change.

    Args:
        model: The model.
        pooling: Pooling mode (``"cls"``, ``"mean"``, …) that replaces the model's own.
        layer: Hidden layer to pool, counted as in XTREME: 0 is the embedding layer, 12 the output of a base-size
            encoder; negative values count from the end. The layers above are dropped.
        max_length: Number of tokens at which a sentence is truncated (DAP: 32).

    Raises:
        ModelError: The model does not have this layer, or has no pooling to replace.
        UsageError: The encoder has fewer positions than `max_length`.
    """
    if pooling is None and layer is None and max_length is None:
        return model
    model = shared_copy(model)
    model[0].processor = copy.deepcopy(model.tokenizer)  # it holds the maximum length
    if layer is not None:
        encoder = model[0].auto_model
        if encoder.config.model_type not in _TRUNCATABLE:
            raise ModelError(
                f"A layer can be chosen for {', '.join(_TRUNCATABLE)}, but this encoder is of type "
                f"{encoder.config.model_type}. Evaluate it without a layer."
            )
        layers = encoder.encoder.layer
        if not -len(layers) - 1 <= layer <= len(layers):
            raise ModelError(f"Layer {layer} was requested, but the encoder has layers 0 to {len(layers)}.")
        del layers[layer if layer >= 0 else len(layers) + 1 + layer :]
        encoder.config.num_hidden_layers = len(layers)
    if pooling is not None:
        replace_pooling(model, pooling)
    set_max_length(model, max_length)
    return model


#: Bytes of all encoders' embeddings in a folder; the files that were not used for the longest time are deleted.
STORE_BYTES = 4 << 30


class StoredEncoder(CachedEncoder):
    """A model whose ``encode`` embeds each text once, in this process and in later ones, so that all suites share them.

    The folder holds the embeddings of all encoders, in ``limit`` bytes at most. Each encoder has a subfolder, named after its
    digest, so that other weights, pooling or maximum length have other files. Each file holds a block of texts and is
    named after the digest of its content. Files are only ever created and deleted: several processes may write at once,
    and one that is killed leaves at most an unfinished file, which is never read.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        folder: str | Path,
        digest: str,
        *,
        bf16: bool = False,
        limit: int = STORE_BYTES,
    ) -> None:
        super().__init__(model, bf16=bf16)
        self.folder = Path(folder)
        self.encoder_folder = self.folder / digest[:12]
        self.limit = limit
        self.stored: dict[bytes, tuple[Path, int]] = {}  # a mapped file stays open, and there may be thousands
        for path in sorted(self.encoder_folder.glob("*.npy")):
            with suppress(FileNotFoundError):  # deleted by another process
                if (table := read_kept(path, _verified)) is not None:
                    os.utime(path)
                    self.stored.update((key.tobytes(), (path, at)) for at, key in enumerate(table["text"]))

    def missing(self, texts: Iterable[str], prompt: str = "") -> list[str]:
        """Distinct texts without an embedding."""
        missing = super().missing(texts, prompt)
        places: dict[Path, dict[str, int]] = {}
        for text in missing:
            if (place := self.stored.get(_key(prompt, text))) is not None:
                places.setdefault(place[0], {})[text] = place[1]
        for path, rows in places.items():
            with suppress(FileNotFoundError):  # deleted by another process
                if (table := read_kept(path, _verified)) is not None:
                    self.rows.update(((prompt, text), np.array(table["row"][at])) for text, at in rows.items())
        return [text for text in missing if (prompt, text) not in self.rows]

    def add(self, texts: Sequence[str], prompt: str, embeddings_nh: NDArray[Any]) -> None:
        """Keep the embeddings of texts, also on disk if they are finite."""
        super().add(texts, prompt, embeddings_nh)
        if self.limit and np.isfinite(embeddings_nh).all():
            try:
                self._write([_key(prompt, text) for text in texts], embeddings_nh)
            except OSError as error:
                self.limit = 0
                logger.warning("Embeddings are no longer cached in %s: %s.", self.folder, error.strerror or error)

    def _write(self, keys: Sequence[bytes], embeddings_nh: NDArray[Any]) -> None:
        row = (embeddings_nh.dtype, embeddings_nh.shape[1:])
        table = np.empty(len(keys), dtype=[("text", np.uint8, 16), ("row", *row)])
        table["text"] = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)
        table["row"] = embeddings_nh
        with write_atomically(self.encoder_folder / f"{_digest(table)}.npy") as file:
            np.save(file, table)
        shrink(self.folder, self.limit)


def shrink(folder: Path, limit: int) -> None:
    """Delete the files of a folder that were not used for the longest time, until it holds at most ``limit`` bytes."""
    files = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= limit:
            return
        path.unlink(missing_ok=True)
        total -= size


def _key(prompt: str | None, text: str) -> bytes:
    return xxhash.xxh3_128_digest(json.dumps([prompt, text]).encode())


def _digest(table: NDArray[Any]) -> str:
    content: Any = table.view(np.uint8)
    return xxhash.xxh3_128_hexdigest(content)


def _verified(path: Path) -> NDArray[Any]:
    table: NDArray[Any] = np.load(path, mmap_mode="r")
    if _digest(table) != path.stem:
        raise DataError("its content does not match its digest")
    return table
