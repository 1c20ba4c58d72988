"""The file of a task vector: safetensors, with the facts of the vector as JSON in its metadata.

Each changed weight ``name`` is stored as ``name/values`` and, in 8 and 4 bits, ``name/scales`` (see `quantization`), and
directions to project out as ``directions``. A digest of everything reveals damage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from metaphrase.exceptions import MissingFileError, ModelFileError, NonFiniteError, UsageError
from metaphrase.io.arguments import Count, Finite, PoolingMode, check_value
from metaphrase.io.digests import tensors_digest
from metaphrase.io.files import replacing
from metaphrase.merging.quantization import Bits, dequantize, quantize

#: Version of the format. A reader refuses later ones.
VERSION = 1
#: Name of the metadata.
KEY = "task_vector"
#: Name of the tensor of directions.
DIRECTIONS = "directions"
#: Facts of a vector, and their types.
_FACTS: dict[str, Any] = {
    "base": str,
    "base_name": str | None,
    "alpha": Finite,
    "recipe": Mapping[str, Any] | None,
    "license": str | None,
    "card": str | None,
    "prompts": Mapping[str, str] | None,
    "default_prompt_name": str | None,
    "settings": Mapping[str, Any] | None,
}
#: Facts that are stored only if they are set.
_OPTIONAL = {"default_prompt_name", "settings"}
#: Settings of an encoder, and their types.
SETTINGS: dict[str, Any] = {
    "max_seq_length": Count | None,
    "truncate_dim": Count | None,
    "similarity_fn_name": Literal["cosine", "dot", "euclidean", "manhattan"],
    "pooling": PoolingMode,
}
_FORMAT: dict[str, Any] = {"version": int, "bits": Bits, "shapes": Mapping[str, list[Count]], "digest": str}


def write_vector(
    path: str | Path,
    differences: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    bits: Bits,
    *,
    directions: Tensor | None = None,
) -> Path:
    """Write a file atomically; see `TaskVector.save`."""
    facts = {**facts, "alpha": _plain(facts["alpha"]), "base_name": facts["base_name"] and str(facts["base_name"])}
    try:
        _check_facts(facts, _FACTS)
    except ValueError as error:
        raise UsageError(f"The task vector cannot be saved, because {error}") from error
    tensors = {} if directions is None else {DIRECTIONS: directions.float().cpu().contiguous()}
    for name, difference in differences.items():
        for part, tensor in quantize(difference.cpu(), bits).items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise NonFiniteError(
                    f"{name} has a difference of {difference.abs().max():g}, which is NaN, infinite or too large for "
                    f"{bits} bits. Check the tuned model, or save the vector in 8 bits."
                )
            tensors[f"{name}/{part}"] = tensor
    content = {
        **{name: value for name, value in facts.items() if name not in _OPTIONAL or value is not None},
        "version": VERSION,
        "bits": bits,
        "shapes": {name: list(one.shape) for name, one in differences.items()},
    }
    content["digest"] = tensors_digest(tensors, content)
    data = save(tensors, {KEY: json.dumps(content, ensure_ascii=False, default=str)})
    with replacing(path, unique=True) as partial:
        partial.write_bytes(data)
    return Path(path)


def read_vector(path: str | Path) -> tuple[dict[str, Tensor], Tensor | None, dict[str, Any]]:
    """Read the differences, the directions and the facts of a file; see `TaskVector.load`."""
    if not Path(path).is_file():
        what = f"{path} is a folder, not a task vector" if Path(path).is_dir() else f"There is no task vector {path}"
        raise MissingFileError(f"{what}. Write one with `metaphrase merge BASE TUNED --vector`.")
    try:
        with safe_open(path, framework="pt") as file:
            content = _content(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
        directions = tensors.get(DIRECTIONS)
        if directions is not None and (directions.dim() != 2 or not directions.isfinite().all()):
            raise ValueError("its directions are not finite rows")
        return _differences(content, tensors), directions, {name: content.get(name) for name in _FACTS}
    except Exception as error:  # the errors of safetensors have no common class
        if isinstance(error, MemoryError):
            raise
        raise ModelFileError(
            f"{path} cannot be read as a task vector: {error}. Download or write the file again."
        ) from error


def is_vector(path: str | Path) -> bool:
    """Whether a file is a task vector, of any version."""
    try:
        with safe_open(path, framework="pt") as file:
            return KEY in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def _content(metadata: Mapping[str, str]) -> dict[str, Any]:
    if KEY not in metadata:
        raise ValueError(f"its metadata have no {KEY!r}, so it is another kind of file")
    content = json.loads(metadata[KEY])
    if not isinstance(content, dict):
        raise ValueError(f"its metadata {KEY!r} are not a JSON object")
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ValueError(f"its format is {version}, but this version of metaphrase reads up to {VERSION}")
    known = _FACTS | _FORMAT
    if other := sorted((content.keys() ^ known.keys()) - (_OPTIONAL - content.keys())):
        raise ValueError(f"keys of its metadata are missing or unknown: {', '.join(map(repr, other[:3]))}")
    _check_facts(content, known)
    return content


def _check_facts(facts: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Check the types of facts."""
    for name, value in facts.items():
        check_value(value, known[name], f"{name!r} of its metadata")
    default = facts.get("default_prompt_name")
    if default is not None and default not in (facts["prompts"] or {}):
        raise ValueError(f"'default_prompt_name' of its metadata is {default!r}, which its 'prompts' do not have")
    for name, value in (facts.get("settings") or {}).items():
        if name not in SETTINGS:
            raise ValueError(f"'settings' of its metadata has the unknown key {name!r}")
        check_value(value, SETTINGS[name], f"{name!r} of its metadata")


def _plain(number: Any) -> Any:
    """A number of NumPy, or a tensor of one value, as a number of Python."""
    is_one = isinstance(number, np.number) or (isinstance(number, Tensor) and number.numel() == 1)
    return number.item() if is_one else number


def _differences(content: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored: dict[str, dict[str, Tensor]] = {name: {} for name in content["shapes"]}
    for key, tensor in tensors.items():
        if key == DIRECTIONS:
            continue
        name, _, part = key.rpartition("/")
        if name not in stored:
            raise ValueError(f"its metadata do not list {key!r}")
        stored[name][part] = tensor
    differences = {}
    for name, parts in stored.items():
        try:
            differences[name] = dequantize(parts, content["shapes"][name], content["bits"])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    digest = content.pop("digest")
    if tensors_digest(tensors, content) != digest:
        raise ValueError("its content does not match its digest")
    return differences
