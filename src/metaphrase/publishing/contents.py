"""The files of a release: the names it may contain, its manifest, and the verified copy that is uploaded."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open

from metaphrase.checkpoints.folders import HEADS, TRAINING_ARGS, checkpoints, read_manifest
from metaphrase.encoders.adapters import ADAPTER_FILES
from metaphrase.encoders.checks import REFERENCE
from metaphrase.encoders.folders import VECTOR_FILE
from metaphrase.encoders.installed import MANIFEST
from metaphrase.exceptions import MissingFileError, ModelError, ModelFileError, StorageError
from metaphrase.io.counts import listed
from metaphrase.io.digests import file_facts, file_sha256
from metaphrase.io.files import read_json

CARD = constants.REPOCARD_NAME
RECIPE = "recipe.yaml"
#: Gain and cost by weight, of a merged encoder.
CURVE = "alpha.json"
NOTICE = "NOTICE.md"
#: Files that accompany copies of a model. They are pushed with it, but a push deletes none in the repository.
NOTICES = ("LICENSE", NOTICE)
#: Results that the Hub shows on the pages of benchmarks.
EVAL_RESULTS = ".eval_results/metaphrase.yaml"
#: A folder without this file does not load: it is deleted first and moved into place last.
SEAL = "config.json"
#: Written by transformers' trainer, which pickles it. A release replaces it by ``training_args.json``.
PICKLED_ARGS = "training_args.bin"

_NAMES = {
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    *(SEAL, CARD, RECIPE, REFERENCE, EVAL_RESULTS, TRAINING_ARGS),
    *("model.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "spm.model", "source.spm"),
    *("tokenizer.model", "bpe.codes"),
    *ADAPTER_FILES,
}
_PATTERN = re.compile(
    r"model-\d{5}-of-\d{5}\.safetensors|\d+_\w+/(config|cnn_config)\.json|\d+_\w+/model\.safetensors",
    re.ASCII,
)
_HEADS = {f"{HEADS}/config.json", f"{HEADS}/model.safetensors"}
_CHECKPOINT_FILES = ("optimizer.pt", "optimizer.bin", "scheduler.pt")
_REMEDY = "Release the model again, and push that."


def is_weights(path: str) -> bool:
    """Whether a file has weights in safetensors format."""
    return path.endswith(".safetensors")


def belongs_to_release(path: str) -> bool:
    """Whether a file of a repository came with a release or a task vector, so that the next one replaces it."""
    return _is_listed(path) or path in {*_HEADS, PICKLED_ARGS, MANIFEST, VECTOR_FILE}


def release_files(folder: str | Path) -> list[str]:
    """Paths of the files in `folder` that a release can contain, relative to it and sorted.

    Checkpoints, heads, logs, pickles and other files of a run are not included.
    """
    paths = (path for pattern in ("*", "*/*") for path in Path(folder).glob(pattern) if path.is_file())
    return sorted(filter(_is_listed, (path.relative_to(folder).as_posix() for path in paths)))


def weights_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each weights file of a release."""
    return {name: file_sha256(folder / name) for name in release_files(folder) if is_weights(name)}


def write_manifest(folder: Path) -> None:
    """Write the sizes and digests of the files of a release, and of its notices, to its manifest."""
    notices = [name for name in NOTICES if (folder / name).is_file()]
    files = {name: file_facts(folder / name) for name in (*release_files(folder), *notices)}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")


def copy_release(folder: Path, copy: Path, *, with_heads: bool) -> list[str]:
    """Copy the files that the manifest of a release lists to an empty folder, and verify the copies. Returns their paths.

    The model card may have been edited; every other file must be the one that was released.
    """
    files: dict[str, Any] = _read_manifest(folder) | {CARD: None}
    for name, facts in files.items():
        _copy(folder, name, copy, facts)
    if with_heads:
        place, heads = _heads(folder, copy)
        for name, facts in heads.items():
            _copy(place, name, copy, facts)
        files |= heads
    for name in filter(is_weights, files):
        _check_finite(copy / name, folder / name)
    return sorted(files)


def _is_listed(path: str) -> bool:
    """Whether a release can contain a file of this name."""
    return path in _NAMES or _PATTERN.fullmatch(path) is not None


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Size and digest of each file of a release."""
    for name in _CHECKPOINT_FILES:
        if (folder / name).exists():
            raise ModelError(
                f"{folder} contains {name}: it is a training checkpoint, not a release. Push the run's own folder, "
                "or write a release with `metaphrase.release`."
            )
    missing = [name for name in ("modules.json", SEAL, MANIFEST) if not (folder / name).is_file()]
    try:
        manifest = {"files": {}} if missing else read_json(folder / MANIFEST)
        files = {str(name): dict(facts) for name, facts in manifest["files"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"{folder / MANIFEST} is damaged. {_REMEDY}") from error
    if unknown := [name for name in files if not (_is_listed(name) or name in NOTICES)]:
        raise ModelFileError(f"{folder / MANIFEST} lists {unknown[0]!r}, which is not a file of a release. {_REMEDY}")
    if missing := missing or [name for name in {**files, CARD: None} if not (folder / name).exists()]:
        problem = f"is not a release folder: missing {listed(missing)}" if folder.exists() else "does not exist"
        vector = folder / VECTOR_FILE
        what = (
            vector
            if vector.is_file()
            else "the output folder of a training run, or one that `metaphrase.release` wrote"
        )
        raise MissingFileError(f"{folder} {problem}. Push {what}.")
    return files


def _copy(folder: Path, name: str, copy: Path, facts: Mapping[str, Any] | None) -> None:
    """Copy a file, and compare the copy with its entry in a manifest, if it has one."""
    path, target = folder / name, copy / name
    target.parent.mkdir(exist_ok=True)
    if path.is_symlink() or ("/" in name and path.parent.is_symlink()):
        raise ModelFileError(f"{path} is a symbolic link, or in a linked folder, and links are not pushed. {_REMEDY}")
    try:
        with open(path, "rb", opener=_open_file) as source, target.open("wb") as stream:
            status = os.fstat(source.fileno())
            if not stat.S_ISREG(status.st_mode) or (facts is None and status.st_nlink > 1):
                raise ModelFileError(f"{path} is not a regular file, or has several names. {_REMEDY}")
            if facts is None or status.st_size == facts.get("bytes"):
                shutil.copyfileobj(source, stream)
    except OSError as error:
        if isinstance(error, ModelFileError):
            raise
        if error.errno == errno.ENOSPC:
            raise StorageError(
                f"{copy.parent} has no space for a copy of {folder}. Set TMPDIR to a folder with more space."
            ) from error
        raise ModelFileError(f"{path} cannot be copied for the upload: {error.strerror}. {_REMEDY}") from error
    if facts not in (None, file_facts(target)):
        raise ModelFileError(
            f"{path} was altered after the release was written: its digest differs from {MANIFEST}. {_REMEDY}"
        )


def _open_file(path: str, flags: int) -> int:
    """Open a file, but neither follow a link nor wait for the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _heads(folder: Path, release: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of the heads that belong to a release, and the heads' files: its own, or the last checkpoint's."""
    own = {name: None for name in _HEADS if (folder / name).exists()}
    if any(map(is_weights, own)):
        return folder, own
    others = []
    for place in reversed(checkpoints(folder)):
        heads = {name: facts for name, facts in read_manifest(place)["files"].items() if name in _HEADS}
        if any(map(is_weights, heads)):
            if _same_weights(release, place):
                return place, heads
            others.append(place.name)
    if others:
        raise MissingFileError(
            f"{folder} has no heads for the released encoder: those of {', '.join(others)} were trained with other weights. "
            f"Push without heads, or copy the heads to {folder / HEADS}."
        )
    raise MissingFileError(
        f"{folder} has no heads to push: neither {folder / HEADS} nor a checkpoint has weights of heads. Push without heads."
    )


def _same_weights(release: Path, checkpoint: Path) -> bool:
    """Whether a checkpoint has every tensor of a release, with equal values."""
    for name in filter(is_weights, release_files(release)):
        if not (checkpoint / name).is_file():
            return False
        with safe_open(release / name, "pt") as ours, safe_open(checkpoint / name, "pt") as theirs:
            keys = set(ours.keys())
            if not keys <= set(theirs.keys()):
                return False
            if not all(torch.equal(ours.get_tensor(key), theirs.get_tensor(key)) for key in keys):
                return False
    return True


def _check_finite(copy: Path, path: Path) -> None:
    """Check the weights in the copy of a file."""
    try:
        with safe_open(copy, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    raise ModelError(
                        f"Tensor {name} in {path} has NaN or infinite values; the model is not pushed. Release an earlier "
                        "checkpoint with `metaphrase.release`, and push that."
                    )
    except SafetensorError as error:
        raise ModelFileError(f"{path} is damaged ({error}). {_REMEDY}") from error
