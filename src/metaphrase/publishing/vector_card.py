"""Model cards of task vectors."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import yaml

from metaphrase.corpus.text import one_line
from metaphrase.encoders.installed import installed_models
from metaphrase.encoders.names import PLUS, is_starter, split_revision
from metaphrase.encoders.starter import HUB_ID
from metaphrase.merging import TaskVector
from metaphrase.publishing.markdown import cell, code, fence, hub_languages
from metaphrase.publishing.provenance import LICENSE_KEYS, license_metadata, recorded_runs, stated, stated_in

#: Suffix of the file of a task vector.
SUFFIX = ".safetensors"

_CARD = """\
---
{metadata}---

# {title}

A task vector: {parameters:,} weight differences, which turn {base} into an encoder that was tuned from it. The weight of the
differences, alpha, is {alpha:g}{directions}. With [metaphrase](https://github.com/metaphrase/metaphrase),
{call} loads the base and adds the vector. To write a plain folder, which Sentence Transformers loads without metaphrase:

{command}
"""


def license_of(vector: TaskVector, models: Iterable[str] = ()) -> dict[str, Any]:
    """The metadata of the licence of a task vector, with the name and link that its card and some models state."""
    if not vector.license:
        return {}
    names = (
        [*chain.from_iterable(stated(name, key) for name in models), *stated_in(vector.card, key)]
        for key in LICENSE_KEYS[1:]
    )
    return license_metadata(vector.license.split(" AND "), *names)


def vector_card(
    vector: TaskVector,
    place: str,
    loaded: str,
    *,
    languages: Iterable[str] | None,
    license: Mapping[str, Any] | None = None,
    runs: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Text of a card for a task vector: the file or repository that it is in, and the name that loads the encoder.

    ``license`` and ``runs``, the records of the training that it contains, default to those in the vector's own card.
    """
    base = vector.base_name
    runs = recorded_runs(vector.card) if runs is None else [*runs]
    metadata = {
        **(license_of(vector) if license is None else license),
        **hub_languages(languages or ()),
        "base_model": HUB_ID if is_starter(base) else _hub_id(base),
        "library_name": "metaphrase",
        "tags": ["metaphrase", "task-vector"],
        "metaphrase": {"runs": runs} if runs else None,
    }
    names = (one_line(base or "BASE"), one_line(place))
    removed = "" if vector.directions is None else f", and {len(vector.directions)} directions are projected out"
    return _CARD.format(
        metadata=yaml.safe_dump({key: value for key, value in metadata.items() if value}, sort_keys=False),
        title=cell(place.removesuffix(SUFFIX)),
        parameters=parameter_count(vector),
        base=cell(base or "the base"),
        alpha=vector.alpha,
        directions=removed,
        call=code(f"load_encoder({json.dumps(loaded, ensure_ascii=False)})"),
        command=fence(shlex.join(["metaphrase", "merge", *names, "--output_dir", "merged"]), "bash"),
    )


def _hub_id(base: str | None) -> str | None:
    """The Hub id in the name of a base with its commit, or of the last task vector that is part of the base."""
    name, revision = split_revision((base or "").split(PLUS)[-1])
    return name if revision and name not in installed_models() else None


def parameter_count(vector: TaskVector) -> int:
    """Number of differences in a task vector."""
    return sum(one.numel() for one in vector.differences.values())
