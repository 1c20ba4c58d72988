"""Digests of files, texts and weights, the same in every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import nn


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_facts(path: str | Path) -> dict[str, Any]:
    """SHA-256 and size in bytes of a file, for a manifest."""
    return {"sha256": file_sha256(path), "bytes": Path(path).stat().st_size}


def files_sha256(files: Iterable[str | Path]) -> str:
    """SHA-256 of the names and contents of files, sorted by name."""
    digest = hashlib.sha256()
    for path in sorted(map(Path, files)):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """Digest of the names, types, shapes and values of a model's weights, 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    _add_weights(digest, model)
    return digest.hexdigest()


def model_hash(model: SentenceTransformer) -> str:
    """Digest of a model's weights and of its modules' settings (pooling, maximum length), 32 hexadecimal digits.

    It depends on neither the model's path nor its name: a copy has the same digest.
    """
    modules: list[Any] = [[type(module).__name__, getattr(module, "get_config_dict", dict)()] for module in model]
    digest = xxhash.xxh3_128(json.dumps([modules, model.max_seq_length], sort_keys=True, default=str).encode())
    _add_weights(digest, model)
    return digest.hexdigest()


def _add_weights(digest: Any, model: nn.Module) -> None:
    import torch

    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
