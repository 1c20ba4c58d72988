"""Digests of files, texts and weights, the same in every process, and files whose content must not change."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from metaphrase.exceptions import CorpusError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import Tensor, nn


#: A file that was modified this recently, in ns, may change again without another modification time.
_RECENT = 2_000_000_000


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def text_digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def json_digest(content: Any) -> str:
    """SHA-256 of data that JSON can express, regardless of the order of keys; other values count as their text.

    >>> json_digest({"a": 1, "b": [2]}) == json_digest({"b": (2,), "a": 1})
    True
    """
    return text_digest(json.dumps(content, sort_keys=True, default=str))


def file_facts(path: str | Path) -> dict[str, Any]:
    """SHA-256 and size in bytes of a file, for a manifest."""
    return {"sha256": file_sha256(path), "bytes": Path(path).stat().st_size}


@dataclass(frozen=True)
class PinnedFile:
    """A file and the digest of its content, which must not change while the file is in use.

    Attributes:
        path: The file.
        sha256: Digest of its content.
        size: Its size in bytes.
        stamp: Inode, size and times of its last changes; None if these are too recent to reveal another change.
    """

    path: Path
    sha256: str
    size: int
    stamp: tuple[int, ...] | None

    @classmethod
    def of(cls, path: str | Path) -> PinnedFile:
        """Read a file to compute its digest."""
        path = Path(path)
        stamp, now = _stamp(path), time.time_ns()
        return cls(path, file_sha256(path), stamp[1], stamp if now - max(stamp[2:]) > _RECENT else None)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> PinnedFile:
        """Create a pin from the output of `to_dict`."""
        stamp = content["stamp"]
        return cls(**content | {"path": Path(content["path"]), "stamp": stamp and tuple(stamp)})

    def to_dict(self) -> dict[str, Any]:
        """The pin as plain data."""
        return asdict(self) | {"path": str(self.path)}

    def check(self) -> None:
        """Check that the content is still the same; it is only read if the file was touched."""
        try:
            if _stamp(self.path) == self.stamp or file_sha256(self.path) == self.sha256:
                return
            reason = "its content has changed"
        except FileNotFoundError:
            reason = "it no longer exists"
        raise CorpusError(
            f"{self.path} changed while it was in use: {reason}. Pass a copy that no other process writes to, and run "
            "again."
        )


@contextmanager
def unchanged(files: Iterable[PinnedFile]) -> Iterator[None]:
    """Check before and after a block that files have not changed, even if the block fails: the change may be the reason."""
    files = tuple(files)

    def check() -> None:
        for file in files:
            file.check()

    check()
    try:
        yield
    except Exception:
        check()
        raise
    check()


def _stamp(path: Path) -> tuple[int, ...]:
    """Inode, size and times of the last changes of a file."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def files_sha256(files: Iterable[str | Path]) -> str:
    """SHA-256 of the names and contents of files, sorted by name."""
    digest = hashlib.sha256()
    for path in sorted(map(Path, files)):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """Digest of the names, types, shapes and values of a model's weights, 32 hexadecimal digits."""
    return tensors_digest(model.state_dict())


def tensors_digest(tensors: Mapping[str, Tensor], settings: Any = None) -> str:
    """Digest of the names, types, shapes and values of tensors, and of settings that JSON can express."""
    import torch

    digest = xxhash.xxh3_128(b"" if settings is None else json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def model_hash(model: SentenceTransformer) -> str:
    """Digest of a model's weights and of its modules' settings (pooling, maximum length), 32 hexadecimal digits.

    It depends on neither the model's path nor its name: a copy has the same digest.
    """
    return tensors_digest(model.state_dict(), [module_settings(model), model.max_seq_length])


#: Keys of a configuration that do not change embeddings: names, training, outputs; the dtype is that of the weights.
_IRRELEVANT = {
    *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "initializer_range"),
    *("id2label", "label2id", "problem_type", "use_cache", "return_dict", "output_hidden_states", "output_attentions"),
    *("classifier_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"),
}


def encoder_digest(model: SentenceTransformer, *settings: Any) -> str:
    """Digest of what determines a model's embeddings: `model_hash`, dimensions, architecture, tokenizer, further settings."""
    known = [module_settings(model), model.max_seq_length, model.truncate_dim, tokenizer_content(model.tokenizer)]
    return tensors_digest(model.state_dict(), [*known, architecture(model), *settings])


def architecture(model: nn.Module) -> list[dict[str, Any]]:
    """The configuration of each transformer of a model, without names, versions and precision."""
    configs = [getattr(getattr(module, "auto_model", None), "config", None) for module in model.children()]
    return [
        {key: value for key, value in config.to_dict().items() if key not in _IRRELEVANT}
        for config in configs
        if config is not None
    ]


def tokenizer_content(tokenizer: Any) -> dict[str, Any]:
    """Vocabulary and rules of a tokenizer, without the settings that each call changes."""
    if getattr(tokenizer, "is_fast", False):
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        return {key: value for key, value in content.items() if key not in ("truncation", "padding", "version")}
    return dict(tokenizer.get_vocab())


def module_settings(model: nn.Module) -> list[Any]:
    """The class and the settings (pooling, dimensions) of each module of a model."""
    return [[type(module).__name__, getattr(module, "get_config_dict", dict)()] for module in model.children()]
