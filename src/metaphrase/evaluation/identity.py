"""Who was measured, on what: digests of models and of files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import xxhash
from sentence_transformers import SentenceTransformer


def model_hash(model: SentenceTransformer) -> str:
    """A digest of a model's content: its weights, and what its modules do with them (pooling, length limit, …).

    Two checkpoints of one base model differ in it, wherever they lie and whatever they are called; a copy does not.

    Returns:
        32 hexadecimal digits.
    """
    modules: list[Any] = [[type(module).__name__, getattr(module, "get_config_dict", dict)()] for module in model]
    digest = xxhash.xxh3_128(json.dumps([modules, model.max_seq_length], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def files_sha256(files: Iterable[str | Path]) -> str:
    """SHA-256 of the names and contents of some files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(map(Path, files)):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()
